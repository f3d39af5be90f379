"""A run's configuration: typed sections, a YAML file, `section.key=value` overrides, and every
problem reported at once.

Each section is the dataclass of the module that consumes it. OmegaConf checks and converts the
values.
"""

import dataclasses
import difflib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mixer.checkpoints.config import CheckpointConfig
from mixer.common.errors import UserError
from mixer.common.options import allowed_values, option, option_problems
from mixer.common.yaml_file import parse_yaml, read_yaml
from mixer.data.config import DataConfig, without_unused
from mixer.models.architecture import ModelConfig, model_problems
from mixer.reporting.tables import wrapped
from mixer.training.metrics import LoggingConfig
from mixer.training.optim import OptimConfig

# Keys of earlier versions, and what is in their place.
RENAMED = {"logging.wandb": "logging.tracker=wandb, with WANDB_MODE=offline where it was offline"}
LONGEST_NAME = 255  # bytes, on Linux and macOS
# Keys that earlier versions wrote into config.yaml, with the values that mean what is done now.
GONE = {"train.all_reduce": ("auto", "nccl"), "logging.wandb": ("disabled",)}


@dataclass
class TrainConfig:
    """The loop."""

    steps: int = option(1000, "optimizer steps of the whole run", at_least=1, at_most=10**9)
    init_from: str = option(
        "", "a checkpoint or an exported model whose weights a new run starts from; empty for none"
    )
    batch_size: int = option(32, "samples per process and micro-batch", at_least=1, at_most=2**20)
    gradient_accumulation_steps: int = option(
        1, "micro-batches per optimizer step", at_least=1, at_most=2**20
    )
    mixed_precision: str = option(
        "no", "the type of the arithmetic; no is fp32", choices=("no", "fp16", "bf16")
    )
    max_grad_norm: float = option(
        1.0, "clip the gradient's global norm to this; 0 for no clipping", at_least=0
    )
    non_finite: str = option(
        "stop",
        "on a loss or gradient that is not finite (without fp16): stop the run, or skip the step",
        choices=("stop", "skip"),
    )
    max_skipped_steps: int = option(
        50, "end the run after so many skipped steps in a row (fp16 overflows too)", at_least=1
    )
    eval_every: int = option(
        1000, "steps between evaluations; 0 for one at the end alone", at_least=0
    )
    eval_samples: int = option(
        2048,
        "samples per evaluation, spread evenly over the validation split; 0 for all",
        at_least=0,
    )
    tf32: bool = option(True, "allow TF32 in fp32 matrix products on GPUs that have it")
    compile: str = option(
        "auto",
        "torch.compile of nothing, of each block, the output layer and the loss, or of the "
        "whole model; auto: blocks on GPUs, where Triton can",
        choices=("auto", "no", "blocks", "model"),
    )
    cuda_graphs: str = option(
        "auto",
        "replay what torch.compile makes as CUDA graphs, which saves kernel launches; auto: where "
        "nothing excludes them",
        choices=("auto", "true", "false"),
    )
    recompute: str = option(
        "none",
        "what backward computes again to save memory: nothing, the MLP's nonlinearity, or whole "
        "blocks",
        choices=("none", "activation", "block"),
    )


@dataclass
class RunConfig:
    """Everything that defines a run."""

    name: str = option("run", "the run's directory under output_dir")
    output_dir: str = option("runs", "where runs go")
    seed: int = option(0, "initial weights and order of the data", at_least=0, below=2**32)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def directory(self) -> Path:
        return Path(self.output_dir) / self.name


def load_config(path: str | None, overrides: list[str]) -> RunConfig:
    """The configuration from a YAML file (None: the defaults) and `section.key=value` overrides,
    which win.

    Raises UserError that lists every problem: unknown keys with the nearest valid one, wrong types,
    values not allowed.
    """
    problems: list[str] = []
    given = read_yaml(path) if path else {}
    keys = dict(_options(RunConfig))
    entries = [(key, value, str(path)) for key, value in flatten(given)]
    for text in overrides:
        key, equals, value = text.removeprefix("--").partition("=")
        if not equals:
            problems.append(f"{text!r} on the command line: write overrides as section.key=value")
            continue
        if value and not (key in keys and keys[key].type is str):  # text is taken as it is
            try:
                value = parse_yaml(value)
            except yaml.YAMLError as error:
                problems.append(f"{key}: {value!r} cannot be read as a YAML value: {error}")
                continue
        entries.append((key, value, "command line"))

    config = OmegaConf.structured(RunConfig)
    for key, value, origin in entries:
        problem = _set(config, keys, key, value)
        if problem:
            problems.append(f"{problem} ({origin})")
    run: RunConfig = OmegaConf.to_object(config)
    run.data = without_unused(run.data)
    problems += _value_problems(run)
    if problems:
        raise UserError(_listing(problems))
    return run


def override(key: str, value: Any) -> str:
    """The command-line override that sets a key to a value."""
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}"


def describe_options() -> str:
    """Every key with its type, default, allowed values and meaning, for --help."""
    lines = ["keys (give them in the YAML file, or as section.key=value):"]
    for key, item in _options(RunConfig):
        allowed = allowed_values(item)
        lines.append(f"  {key}: {_type_name(item.type)} = {item.default!r}")
        lines[-1] += f"; allowed: {allowed}" if allowed else ""
        lines.append(wrapped(item.metadata["help"], "      ", "      "))
    return "\n".join(lines)


def flatten(node: dict, prefix: str = "") -> list[tuple[str, Any]]:
    """{"a": {"b": 1}} -> [("a.b", 1)]; an empty section gives nothing."""
    entries = []
    sections = {
        item.name for item in dataclasses.fields(RunConfig) if dataclasses.is_dataclass(item.type)
    }
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            entries += flatten(value, f"{key}.")
        elif not (value is None and key in sections):
            entries.append((key, value))
    return entries


def _options(section: type, prefix: str = "") -> list[tuple[str, dataclasses.Field]]:
    found = []
    for item in dataclasses.fields(section):
        if dataclasses.is_dataclass(item.type):
            found += _options(item.type, f"{prefix}{item.name}.")
        else:
            found.append((f"{prefix}{item.name}", item))
    return found


def _set(config: Any, keys: dict[str, dataclasses.Field], key: str, value: Any) -> str | None:
    """Sets one key, or says why it cannot be set."""
    if value in GONE.get(key, ()):
        return None
    if key not in keys:
        return f"unknown key {key} = {value!r}{_nearest(key, keys)}"
    if isinstance(value, str) and ("${" in value or value == "???"):  # marks of OmegaConf
        return f"{key} = {value!r}; allowed: no ${{...}} and no ???; write the value itself"
    kind = keys[key].type
    if isinstance(value, bool) and str(value).lower() in keys[key].metadata.get("choices", ()):
        value = str(value).lower()  # YAML's true, where it is one of several choices
    # OmegaConf would turn 3 into "3", "12" into 12 and 1 into true without a word; that may not be
    # what was meant.
    wrong = (
        (kind is str and not isinstance(value, str))
        or (kind in (int, float) and isinstance(value, (str, bool)))
        or (kind is bool and not isinstance(value, bool))
        or (kind is int and isinstance(value, float) and not value.is_integer())
    )
    if not wrong and kind is int and isinstance(value, float):
        value = int(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return f"{key} = {value} is out of range; allowed: integers of 64 bits"
    try:
        if not wrong:
            OmegaConf.update(config, key, value)
            return None
    except OmegaConfBaseException:
        pass
    quotes = ", written in quotes" if kind is str else ""
    return f"{key} = {value!r} is a {type(value).__name__}; allowed: {_type_name(kind)}{quotes}"


def _nearest(key: str, keys: dict) -> str:
    """What may have been meant by an unknown key: the same name in another section, or a name of
    its section that is written alike.
    """
    if key in RENAMED:
        return f"; it is now {RENAMED[key]}, or nothing where it was disabled"
    section, _, name = key.rpartition(".")
    near = [other for other in keys if other.rpartition(".")[2] == name]
    alike = {other.rpartition(".")[2]: other for other in keys if other.startswith(section)}
    near = near or [alike[one] for one in difflib.get_close_matches(name, alike, 1, cutoff=0.5)]
    return f"; did you mean {near[0]}?" if near else "; allowed keys: python train.py --help"


def _type_name(kind: Any) -> str:
    is_union = hasattr(kind, "__args__")  # int | None
    return str(kind) if is_union else getattr(kind, "__name__", str(kind))


def _value_problems(run: RunConfig) -> list[str]:
    """Values of the right type that make no sense, alone or together."""
    problems = option_problems(run) or _name_problems(run.name)
    for item in dataclasses.fields(run):
        if dataclasses.is_dataclass(item.type):
            problems += option_problems(getattr(run, item.name), f"{item.name}.")
    problems += [f"model.{problem}" for problem in model_problems(run.model)]
    problems += _graph_problems(run.train) if run.train.cuda_graphs == "true" else []
    problems += _transformer_problems(run) if run.model.architecture != "masked_mixer" else []
    if run.optim.shared_lags and run.model.mixing_weight == "lags":
        problems.append(
            "optim.shared_lags = true with model.mixing_weight = 'lags', where lags are the weight "
            "itself; allowed with it: false"
        )
    if run.optim.warmup_steps > run.train.steps:
        problems.append(
            f"optim.warmup_steps = {run.optim.warmup_steps} is more than train.steps = "
            f"{run.train.steps}; allowed: at most that"
        )
    return problems


def _name_problems(name: str) -> list[str]:
    """What keeps a run's name from being that of a directory."""
    if not name or "/" in name or name in (".", ".."):
        return [f"name = {name!r}; allowed: a directory name without slashes"]
    size = len(os.fsencode(name))
    if size > LONGEST_NAME:
        return [f"name has {size} bytes; allowed: at most {LONGEST_NAME}, as file systems have it"]
    return []


def _transformer_problems(run: RunConfig) -> list[str]:
    """Settings of masked mixers that a transformer cannot have; see also `model_problems`."""
    problems = []
    if run.train.recompute == "activation":
        problems.append(
            "train.recompute = 'activation', which is for masked mixers; allowed for architecture "
            f"{run.model.architecture}: none, block"
        )
    if run.optim.shared_lags:
        problems.append(
            "optim.shared_lags = true, which is for the mixing weights of masked mixers; allowed "
            f"for architecture {run.model.architecture}: false"
        )
    return problems


def _graph_problems(train: TrainConfig) -> list[str]:
    """What does not go together with CUDA graphs."""
    asked, micro_batches = "train.cuda_graphs = true", train.gradient_accumulation_steps
    problems = []
    if train.compile == "no":
        problems.append(f"{asked} with train.compile = 'no'; allowed with it: auto, blocks, model")
    if train.recompute == "block":
        problems.append(
            f"{asked} with train.recompute = 'block', which cannot be recorded; allowed with it: "
            "none, activation"
        )
    if micro_batches > 1:
        problems.append(
            f"{asked}, where each backward pass overwrites the gradients of the one before; "
            f"allowed with train.gradient_accumulation_steps = {micro_batches}: auto, false"
        )
    return problems


def _listing(problems: list[str]) -> str:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return f"{count} in the configuration:\n" + "\n".join(f"  - {problem}" for problem in problems)
