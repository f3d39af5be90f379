"""Makes programs for the CPU of the kernels' own source, with functions of the emulator in place of
PTX and launches.

A form that is new here fails, by name, instead of being emulated wrongly.
"""

import re
import subprocess
from pathlib import Path

from mixer.ops import toolchain

HERE = Path(__file__).parent
LAUNCH = r"(\w+(?:<[^;{}]*?>)?)\s*<<<([^;]*?), (\w+), 0, [^;]*?>>>\(([^;]*?)\);"
COMMON = [  # pattern, replacement
    (r'asm volatile\("mov\.u32 %0, %%laneid.*?\);', "lane = threadIdx.x % 32;"),
    (r"__shared__ unsigned char memory\[[\w:]+\];", "unsigned char* memory = emulator::shared;"),
    (LAUNCH, r"emulator::launch(\2, \3, [&] { \1(\4); });"),
]


def emulated(unit: Path, replacements: list[tuple[str, str]]) -> str:
    """The file `unit` and what it includes as one, each pattern of `replacements` replaced where it
    is: at least once.
    """
    seen, parts = set(), []

    def add(name: str) -> None:
        if name in seen:
            return
        seen.add(name)
        for line in (unit.parent / name).read_text().splitlines():
            if found := re.match(r'#include "(.*)"', line):
                add(found[1])
            elif not line.startswith("#pragma once"):
                parts.append(line)

    add(unit.name)
    text = "\n".join(parts) + "\n"
    for pattern, replacement in [*replacements, *COMMON]:
        text, count = re.subn(pattern, replacement, text, flags=re.DOTALL)
        assert count > 0, f"{pattern} is nowhere: the emulator knows the kernels no longer"
    if found := re.search(r"^.*(\basm\b|<<<|__shared__).*$", text, flags=re.MULTILINE):
        raise AssertionError(f"new to the emulator: {found[0]}")
    return text


def compiled(name: str, text: str, directory: Path) -> Path:
    """The library of NAME.cpp with these kernels, for `emulated_cases.py`."""
    (directory / "kernels.inc").write_text(text)
    nvcc = str(toolchain.find_compiler().path)  # it knows where its headers are
    flags = ["-shared", "-Xcompiler=-fPIC,-fno-strict-aliasing", "-std=c++17", "-O2", "-w"]
    flags += ["-U_FORTIFY_SOURCE", "-cudart=none", f"-I{directory}"]
    library = directory / "kernels.so"
    subprocess.run([nvcc, *flags, str(HERE / f"{name}.cpp"), "-o", str(library)], check=True)
    return library
