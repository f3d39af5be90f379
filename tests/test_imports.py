"""Imports inside the package point down, and no modules import each other in a circle; what is
imported is what is needed, and the Auto classes of transformers know the models.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest
import torch
from models import small_model

import mixer
from mixer.models.shifted_qwen3 import ShiftedQwen3Config, ShiftedQwen3ForCausalLM
from mixer.ops.registration import constant_in_a_graph

PACKAGE = Path(mixer.__file__).parent
# Lower folders first; those of one row do not import each other.
ORDER = [
    {"common"},
    {"ops"},
    {"models"},
    {"reporting", "data", "distributed"},
    {"checkpoints", "objectives"},
    {"training", "evaluation"},
    {"comparison"},
    {"commands"},
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


# Runs each program in a process of its own, which has loaded as much as this one: it takes seconds.
RUN_EACH = """
import os
for program in {programs!r}:
    if os.fork() == 0:
        exec(program, {{"__name__": "__main__"}})
        break
    _, status = os.wait()
    assert status == 0, program
"""


def run_each(programs: list[str], loaded: str) -> list[str]:
    """The lines that programs print, of which each starts where only `loaded` is imported."""
    command = f"import {loaded}\n{RUN_EACH.format(programs=programs)}"
    options = {"cwd": PACKAGE.parent, "capture_output": True, "text": True}
    ended = subprocess.run([sys.executable, "-c", command], **options)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


UNASKED = {"torch._dynamo", "transformers.modeling_utils", "mixer.models.masked_mixer.modeling"}
ABSENT = {
    "from mixer import triangular_conv": {"torch._dynamo", "triton", "transformers"},
    "import mixer; from transformers import AutoConfig, AutoModel, AutoTokenizer": UNASKED,
    "from transformers import AutoModelForCausalLM; import mixer": UNASKED,
}


@pytest.mark.parametrize(
    ("loaded", "absent"),
    [("sys", {"import mixer": {"torch", "numpy", "transformers"}}), ("torch", ABSENT)],
)
def test_the_package_imports_only_what_is_asked_for(loaded, absent):
    programs = [f"{program}; import sys; print(*sys.modules)" for program in absent]
    for modules, unasked in zip(run_each(programs, loaded), absent.values(), strict=True):
        assert "mixer" in modules.split() and not unasked.intersection(modules.split())


LOADS = """
config = AutoConfig.from_pretrained({place!r})
model = AutoModelForCausalLM.from_pretrained({place!r})
body = AutoModel.from_config(config)
again = AutoModelForCausalLM.from_config(config)
names = [type(each).__name__ for each in (config, model, body, again)]
assert all(type(each).__module__.startswith("mixer.models.") for each in (config, model, body))
registered = AutoModelForCausalLM._model_mapping._extra_content
assert {{type(model)}} <= set(registered.values()) and type(config) in registered.keys()
print(" ".join(names))
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> list[str]:
    """The directories of a saved model of each kind."""
    folder = tmp_path_factory.mktemp("saved")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 50}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    small_model().save_pretrained(folder / "masked_mixer")
    qwen3 = ShiftedQwen3ForCausalLM(ShiftedQwen3Config(**sizes, **heads))
    qwen3.save_pretrained(folder / "shifted_qwen3")
    return [str(folder / "masked_mixer"), str(folder / "shifted_qwen3")]


ORDERS = (
    "import mixer",
    "from transformers import AutoModelForCausalLM",
    "import mixer; from transformers import AutoModelForCausalLM",
    "import mixer; from transformers import GenerationMixin",
    "from mixer import MaskedMixerForCausalLM",
    "import mixer; mixer.ops.keyed_conv; from mixer import *",
)


def test_the_auto_classes_know_the_models_in_each_order_of_imports(saved):
    then = ["import mixer", "from transformers import AutoConfig, AutoModel"]
    then += ["from transformers import AutoModelForCausalLM"]
    then += [LOADS.format(place=place) for place in saved]
    assert run_each(["\n".join([first, *then]) for first in ORDERS], "torch._dynamo") == [
        f"{name}Config {name}ForCausalLM {name}Model {name}ForCausalLM"
        for _ in ORDERS
        for name in ("MaskedMixer", "ShiftedQwen3")
    ]


def test_constants_of_a_graph_are_marked_as_torch_marks_them():
    """Where PyTorch has another mark, compiled models would break into many graphs."""
    theirs = torch.compiler.assume_constant_result(lambda: None)
    assert vars(constant_in_a_graph(lambda: None)) == vars(theirs) != {}


def test_a_command_registers_the_models_that_it_loads(finished):
    command = ["mixer", "generate", "--checkpoint", str(finished / "best")]
    command += ["--prompt", "def", "--new-tokens", "2"]
    program = (
        f"import runpy, sys; sys.argv = {command}; runpy.run_module('mixer', None, '__main__')"
    )
    assert run_each([program], "torch._dynamo")[0].startswith("def")
