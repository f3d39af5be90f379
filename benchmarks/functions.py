"""Functions to find by their docstrings, from the packages that are installed: a collection in
BEIR's layout of some packages, and pairs to train on of all others.

    python benchmarks/functions.py FOLDER [--held-out 0.25]

FOLDER/corpus.jsonl has functions of the packages that are held out, without their docstrings,
queries.jsonl the first paragraphs of these, and qrels/test.tsv which belong together.
FOLDER/pairs.jsonl has the pairs of all other packages. Train with

    data.source=jsonl data.path=FOLDER/pairs.jsonl data.text_field=query data.pair_field=document

A hash of its name says whether a package is held out; Python's library is one package. Copies of
what is held out, which packages bring along, are left out of the pairs: functions with the same
query, or with nearly the same code.
"""

import ast
import multiprocessing
import os
import re
import sysconfig
import textwrap
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from beir_pairs import LEAST_WORDS, write_rows

from mixer.common.errors import UserError, command_parser, run_command
from mixer.common.files import as_path, write_text
from mixer.common.progress import time_reported
from mixer.common.terminal import counted
from mixer.data.config import DataConfig
from mixer.data.sources import source_shards, text_hash

LEAST_LINES = 3  # of a function: shorter ones say little more than their names
TOKENS = re.compile(r"\w+|[^\w\s]")
WINDOW = 5  # tokens
SKETCH = 16  # windows by which code is compared, those with the smallest hashes
STATEMENTS = (ast.stmt, ast.ExceptHandler)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Function:
    name: str  # its file and line
    package: str
    query: str
    code: str  # without docstrings


def main() -> None:
    parser = command_parser("functions.py", __doc__)
    parser.add_argument("folder", type=Path, help="for the collection and the pairs")
    share = "share of the packages, by a hash of their names"
    parser.add_argument("--held-out", type=float, default=0.25, metavar="SHARE", help=share)
    options = parser.parse_args()
    if not 0 < options.held_out < 1:
        raise UserError(f"--held-out {options.held_out}; allowed: above 0, below 1")
    with time_reported("reading the packages"):
        functions = read_functions()
        is_held_out = {
            function.package: text_hash(function.package) >= (1 - options.held_out) * 2**64
            for function in functions
        }
        held_out = [function for function in functions if is_held_out[function.package]]
        rest = [function for function in functions if not is_held_out[function.package]]
        pairs = without_copies(rest, held_out)
    if not pairs or not held_out:
        raise UserError(
            f"of {counted(len(is_held_out), 'package')} {sum(is_held_out.values())} are held out "
            f"(--held-out {options.held_out}): give another share, or install more packages"
        )
    folder = as_path(options.folder)
    rows = ({"query": function.query, "document": function.code} for function in pairs)
    write_rows(folder / "pairs.jsonl", rows)
    print(f"{folder}: {write_collection(folder, held_out)}")
    print(f"held out: {listed(held_out)}")
    print(f"pairs: {listed(pairs)}")
    print(f"left out, as copies: {listed(set(rest).difference(pairs))}")


def listed(functions: Iterable[Function]) -> str:
    """How many there are, and of which packages the most."""
    packages = Counter(function.package for function in functions)
    most = ", ".join(f"{name} {number:,}" for name, number in packages.most_common(12))
    number = counted(packages.total(), "function")
    return f"{number} of {counted(len(packages), 'package')}: {most}"


# ------------------------------------------------------------------------- reading


def read_functions() -> list[Function]:
    """Those of all files, in the files' order."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(mp_context=spawn) as pool:
        of_files = pool.map(functions_of, *zip(*python_files(), strict=True), chunksize=64)
        return [function for functions in of_files for function in functions]


def python_files() -> Iterator[tuple[Path, str, str]]:
    """Path, name and package of each file that source builtin reads with subset packages."""
    paths = {name: os.path.realpath(path) for name, path in sysconfig.get_paths().items()}
    for shard in source_shards(DataConfig(source="builtin", subset="packages")):
        assert shard.file
        file = Path(os.path.realpath(shard.file.parent), shard.file.name)
        installed = (paths[name] for name in ("purelib", "platlib"))
        folder = next((folder for folder in installed if file.is_relative_to(folder)), "")
        name = file.relative_to(folder or paths["stdlib"]).as_posix()
        yield file, name, name.partition("/")[0].removesuffix(".py") if folder else "python"


def functions_of(file: Path, name: str, package: str) -> list[Function]:
    """The functions and methods of a file that have a docstring and a body."""
    try:
        text = file.read_text(encoding="utf-8")
        with warnings.catch_warnings(action="ignore"):  # of escapes in strings
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):  # of tests of parsers, and no UTF-8
        return []
    functions = []
    lines = text.split("\n")
    for node in definitions(tree):
        # One that shares a line with the name could not be left out.
        shares_line = node.body[0].lineno == node.lineno
        docstring = "" if shares_line else ast.get_docstring(node) or ""
        query = " ".join(re.split(r"\n\s*\n", docstring)[0].split())
        code = code_of(node, lines)
        if len(query.split()) >= LEAST_WORDS and code.count("\n") + 1 >= LEAST_LINES:
            functions.append(Function(f"{name}:{node.lineno}", package, query, code))
    return functions


def definitions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods, but none inside of another."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, FUNCTIONS):
            yield node
        elif isinstance(node, STATEMENTS):
            yield from definitions(node)


def code_of(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> str:
    """Its lines, without blank ones and without docstrings, also those of functions inside."""
    left_out = set()
    for node in ast.walk(function):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            first_line = max(docstring.lineno, node.lineno + 1)  # `def f(): "..."` is one line
            left_out |= {*range(first_line, (docstring.end_lineno or 0) + 1)}
    first = min(node.lineno for node in (function, *function.decorator_list))
    numbers = range(first, (function.end_lineno or 0) + 1)
    code = [lines[n - 1].rstrip() for n in numbers if n not in left_out and lines[n - 1].strip()]
    return textwrap.dedent("\n".join(code))


# ------------------------------------------------------------------------- copies


def without_copies(functions: list[Function], originals: list[Function]) -> list[Function]:
    """The functions that have neither the query nor nearly the code of an original."""
    queries = {original.query for original in originals}
    by_window: dict[int, list[int]] = {}
    for number, original in enumerate(originals):
        for window in sketch(original.code):
            by_window.setdefault(window, []).append(number)
    different = []
    for function in functions:
        windows = sketch(function.code)
        shared = Counter(number for window in windows for number in by_window.get(window, ()))
        is_copy = any(2 * count >= len(windows) for _, count in shared.most_common(1))
        if function.query not in queries and not is_copy:
            different.append(function)
    return different


def sketch(code: str) -> list[int]:
    """The smallest hashes of the windows of a code's tokens: two codes share the more of them, the
    more windows they share.
    """
    tokens = TOKENS.findall(code)
    windows = {" ".join(tokens[i : i + WINDOW]) for i in range(max(1, len(tokens) - WINDOW + 1))}
    return sorted({zlib.crc32(window.encode()) for window in windows})[:SKETCH]


# ------------------------------------------------------------------------- writing


def write_collection(folder: Path, functions: list[Function]) -> str:
    """Writes a collection, and returns its size in words. A code that comes again is one document,
    and a text that does is one query, with several documents.
    """
    documents: dict[str, str] = {}
    queries: dict[str, str] = {}
    relevant: dict[tuple[str, str], int] = {}
    for function in functions:
        document = documents.setdefault(function.code, function.name)
        query = queries.setdefault(function.query, f"q{len(queries) + 1}")
        relevant[query, document] = 1
    write_rows(folder / "corpus.jsonl", ({"_id": i, "text": t} for t, i in documents.items()))
    write_rows(folder / "queries.jsonl", ({"_id": i, "text": t} for t, i in queries.items()))
    lines = ["query-id\tcorpus-id\tscore", *(f"{q}\t{d}\t1" for q, d in relevant)]
    write_text(folder / "qrels/test.tsv", "\n".join(lines) + "\n")
    return f"{counted(len(documents), 'document')}, {counted(len(queries), 'query', 'queries')}"


if __name__ == "__main__":
    run_command(main)
