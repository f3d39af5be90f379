"""The ceiling of our older kernels: their own source with the triangle taken out of it, so that it
multiplies the whole square.

The same tiles, stages, fragments, order of blocks and epilogue; only which slices are read, and
that none is on a diagonal, is replaced. Where a line that is replaced is no longer there, this
fails.
"""

import re
import shutil
from pathlib import Path

from mixer.common.errors import UserError
from mixer.ops import build

REPLACEMENTS = {  # of each file: pattern, replacement; each pattern is there once
    "tensor_product.cuh": [
        (
            r"int first\(\) const \{ return kTransposed \? row0 : 0; \}",
            "int first() const { return 0; }",
        ),
        (
            r"int last\(\) const \{\s*return kTransposed \? [^}]*\}",
            "int last() const { return params.tokens; }",
        ),
    ],
    "ampere_product.cuh": [
        (r"const int before = [^;]*;", "const int before = slices(params.tokens);"),
        (r"const int diagonal = [^;]*;", "const int diagonal = 0;"),
        (r"const int after = [^;]*;", "const int after = 0;"),
    ],
    "volta_product.cuh": [
        (r"const bool on_diagonal = kTransposed \? [^;]*;", "const bool on_diagonal = false;")
    ],
}


def write_sources(directory: Path) -> Path:
    """`directory`, made anew with all of csrc, forward and grad-input dense. Raises UserError where
    csrc has changed.
    """
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(build.SOURCES, directory)
    for name, replacements in REPLACEMENTS.items():
        path = directory / name
        text = path.read_text()
        for pattern, replacement in replacements:
            text, count = re.subn(pattern, replacement, text)
            if count != 1:
                raise UserError(
                    f"{name} has {count} times `{pattern}`, not once: REPLACEMENTS in {__file__} "
                    "must follow it"
                )
        path.write_text(text)
    return directory


def build_library(directory: Path, capability: tuple[int, int]) -> Path:
    """The dense library for this GPU, in `directory`, without Hopper's kernels. Takes the compiler
    half a minute.
    """
    compiler = build.find_compiler()
    flags = [
        flag for flag in build.architecture_flags(compiler, capability) if flag != build.HOPPER_FLAG
    ]
    directory = directory.resolve()  # ninja works in a directory of its own
    target = directory / "library"
    shutil.rmtree(target, ignore_errors=True)
    build.build(
        target, write_sources(directory / "sources"), compiler, [*build.COMPILE_FLAGS, *flags]
    )
    return target / build.LIBRARY
