"""Imports inside the package point down, and no modules import each other in a circle."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

import mixer

PACKAGE = Path(mixer.__file__).parent
# Lower folders first; those of one row do not import each other. Commands (the files of mixer/)
# and mixer/__init__.py may import from all of them.
ORDER = [
    {"common"},
    {"ops"},
    {"models"},
    {"reporting", "data", "distributed"},
    {"checkpoints", "objectives"},
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


def test_what_asks_the_auto_classes_for_a_model_has_registered_ours():
    """Commands do not import all of the package."""
    graph = {module: set(imported(module, whole=True)) - {"mixer"} for module in MODULES}
    asks = re.compile(r"\bAuto(Model\w*|Config)\b[.,)]")
    for module in [name for name in MODULES if not name.startswith("mixer.models")]:
        path = PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")
        if path.is_file() and asks.search(path.read_text(encoding="utf-8")):
            reached, new = set(), {module}
            while new:
                reached |= new
                new = set().union(*(graph[each] for each in new)) - reached
            assert "mixer.models.auto" in reached, module


@pytest.mark.parametrize(
    "command", ["train.py", "-m mixer.train", "-mmixer.train", "-m mixer train"]
)
def test_a_wrong_option_is_refused_before_anything_is_imported_that_takes_time(command):
    arguments = [sys.executable, "-X", "importtime", *command.split(), "train.stepz=1"]
    output = {"capture_output": True, "text": True, "cwd": PACKAGE.parent}
    ended = subprocess.run(arguments, **output)
    assert ended.returncode == 2 and "unknown key train.stepz" in ended.stderr
    found = set(re.findall(r"(?m)^import time: .* \| +(\w+)$", ended.stderr))
    assert "yaml" in found and not found & {"torch", "transformers", "accelerate", "numpy"}


def test_a_command_registers_the_models_that_it_loads(finished, tmp_path):
    arguments = [sys.executable, "-m", "mixer.generate", "--checkpoint", str(finished / "best")]
    options = ["--prompt", "def", "--new-tokens", "2"]
    ended = subprocess.run([*arguments, *options], cwd=PACKAGE.parent, capture_output=True)
    assert ended.returncode == 0 and ended.stdout.startswith(b"def")
