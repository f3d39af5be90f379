"""Imports inside the package point down, and no modules import each other in a circle."""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import mixer

PACKAGE = Path(mixer.__file__).parent
# Lower folders first; those of one row do not import each other. Commands (the files of mixer/)
# and mixer/__init__.py may import from all of them.
ORDER = [
    {"common"},
    {"ops"},
    {"models"},
    {"reporting", "data", "distributed"},
    {"checkpoints"},
    {"training", "evaluation"},
    {"comparison"},
]
MODULES = {
    ".".join(("mixer", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
}


def imported(module: str, whole: bool) -> Iterator[str]:
    """Modules of the package that a module imports: `whole`, or only while it is imported itself,
    which leaves out the bodies of functions.
    """
    path = PACKAGE.joinpath(*module.split(".")[1:])
    is_package = path.is_dir()
    path = path / "__init__.py" if is_package else path.with_suffix(".py")
    nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if whole or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            nodes += ast.iter_child_nodes(node)
        names = [alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)]
        if isinstance(node, ast.Import):
            yield from MODULES.intersection(names)
        if isinstance(node, ast.ImportFrom):
            package = module if is_package else module.rpartition(".")[0]
            source = resolve_name("." * node.level + (node.module or ""), package)
            found = MODULES.intersection(f"{source}.{name}" for name in names)
            yield from found or MODULES.intersection({source})


def test_no_folder_imports_from_a_higher_one():
    rank = {folder: place for place, row in enumerate(ORDER) for folder in row}
    inside = [module for module in MODULES if module.split(".")[1:2] and module.count(".") > 1]
    assert {module.split(".")[1] for module in inside} == rank.keys(), "a folder without a place"
    for module in inside:
        folder = module.split(".")[1]
        for other in imported(module, whole=True):
            target = (other.split(".") + [""])[1]
            allowed = target == folder or rank.get(target, len(ORDER)) < rank[folder]
            assert allowed, f"{module} imports {other}"


def test_the_readmes_table_is_in_this_order():
    readme = (PACKAGE.parent / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)/` \|", readme, re.MULTILINE)
    ranks = [place for folder in rows for place, row in enumerate(ORDER) if folder in row]
    assert len(ranks) == len(rows) == sum(map(len, ORDER)) and ranks == sorted(ranks, reverse=True)


def test_each_folder_says_what_its_files_are():
    for init in PACKAGE.rglob("__init__.py"):
        if init.parent not in (PACKAGE, PACKAGE / "ops"):  # docs/add_a_kernel.md lists those of ops
            said = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
            files = {path.stem for path in init.parent.glob("*.py")} - {"__init__"}
            assert files <= set(re.findall(r"\w+", said)), init


def test_no_modules_import_each_other_in_a_circle():
    graph = {module: set(imported(module, whole=False)) - {"mixer"} for module in MODULES}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle
