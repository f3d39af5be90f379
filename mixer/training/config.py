"""A run's configuration: typed sections, a YAML file, `section.key=value` overrides, and every
problem reported at once.

Each section is the dataclass of the module that consumes it. OmegaConf checks and converts the
values.
"""

import dataclasses
import difflib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mixer.checkpoints.checkpoint import CheckpointConfig
from mixer.common.errors import UserError
from mixer.common.files import write_text
from mixer.data.corpus import DataConfig
from mixer.models.architecture import ModelConfig, model_problems
from mixer.training.metrics import LoggingConfig
from mixer.training.optim import OptimConfig


def option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class TrainConfig:
    """The loop."""

    steps: int = option(1000, "optimizer steps of the whole run")
    batch_size: int = option(32, "samples per process and micro-batch")
    gradient_accumulation_steps: int = option(1, "micro-batches per optimizer step")
    mixed_precision: str = option("no", "no (fp32), fp16 or bf16")
    max_grad_norm: float = option(1.0, "clip the gradient's global norm to this; 0 for no clipping")
    non_finite: str = option(
        "stop", "on a loss or gradient that is not finite (without fp16): stop, or skip the step"
    )
    max_skipped_steps: int = option(
        50, "end the run after so many skipped steps in a row (fp16 overflows too)"
    )
    eval_every: int = option(1000, "steps between evaluations; 0 for one at the end alone")
    eval_samples: int = option(2048, "samples of the validation split per evaluation; 0 for all")
    tf32: bool = option(True, "allow TF32 in fp32 matrix products on GPUs that have it")
    compile: str = option(
        "no", "torch.compile: no, blocks (each block and the loss) or model (all at once)"
    )
    cuda_graphs: bool = option(
        False, "replay what torch.compile makes as CUDA graphs, which spares the host its launches"
    )
    all_reduce: str = option(
        "nccl", "DDP's sums of gradients: nccl, or copy_engines (GPUs of one host, over NVLink)"
    )
    recompute: str = option(
        "none", "what backward computes again to save memory: none, activation (the GELU) or block"
    )


@dataclass
class RunConfig:
    """Everything that defines a run."""

    name: str = option("run", "the run's directory under output_dir")
    output_dir: str = option("runs", "where runs go")
    seed: int = option(0, "initial weights and order of the data")
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
    entries = [(key, value, str(path)) for key, value in _flatten(given)]
    for text in overrides:
        key, equals, value = text.removeprefix("--").partition("=")
        if not equals:
            problems.append(f"{text!r} on the command line: write overrides as section.key=value")
            continue
        parsed = _parse_value(key, value, problems)
        if key in keys and keys[key].type is str and not isinstance(parsed, str):
            parsed = value  # name=42: a shell has no types
        entries.append((key, parsed, "command line"))

    config = OmegaConf.structured(RunConfig)
    for key, value, origin in entries:
        problem = _set(config, keys, key, value)
        if problem:
            problems.append(f"{problem} ({origin})")
    run: RunConfig = OmegaConf.to_object(config)
    problems += _value_problems(run)
    if problems:
        raise UserError(_listing("configuration", problems))
    return run


def save_config(run: RunConfig, path: Path) -> None:
    """The resolved configuration as YAML, written whole or not at all."""
    write_text(path, OmegaConf.to_yaml(OmegaConf.structured(run)))


def describe_options() -> str:
    """Every key with its type, default and meaning, for --help."""
    lines = []
    for key, item in _options(RunConfig):
        lines.append(
            f"  {key}: {_type_name(item.type)} = {item.default!r}\n      {item.metadata.get('help', '')}"
        )
    return "keys (give them in the YAML file, or as section.key=value):\n" + "\n".join(lines)


def read_yaml(path: str | Path) -> dict:
    """A file of sections with keys. Raises UserError where it cannot be read as that."""
    try:
        given = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_Loader)
    except FileNotFoundError:
        near = (
            sorted(str(p) for p in Path(path).parent.glob("*.yaml"))
            if Path(path).parent.is_dir()
            else []
        )
        raise UserError(
            f"no configuration file {path}; there are: {', '.join(near) or 'none beside it'}"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path} cannot be read as YAML: {error}") from None
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise UserError(
            f"{path} holds a {type(given).__name__}; it must hold sections with keys, see configs/"
        )
    return given


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 5e-4 as text and no as false; people mean the number, and `mixed_precision:
    no`, as in YAML 1.2.
    """

    yaml_implicit_resolvers = {
        first: [
            (tag, pattern)
            for tag, pattern in resolvers
            if first in "tTfF" or tag != "tag:yaml.org,2002:bool"
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def _parse_value(key: str, text: str, problems: list[str]) -> Any:
    try:
        return yaml.load(text, Loader=_Loader) if text else ""
    except yaml.YAMLError as error:
        problems.append(f"{key}: {text!r} cannot be read as a YAML value: {error}")
        return None


def _flatten(node: dict, prefix: str = "") -> list[tuple[str, Any]]:
    """{"a": {"b": 1}} -> [("a.b", 1)]; an empty section gives nothing."""
    entries = []
    sections = {
        item.name for item in dataclasses.fields(RunConfig) if dataclasses.is_dataclass(item.type)
    }
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            entries += _flatten(value, f"{key}.")
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
    if key not in keys:
        return f"unknown key {key} = {value!r}{_nearest(key, keys)}"
    kind = keys[key].type
    # OmegaConf would quietly turn 3 into "3", "12" into 12 and 1 into true: what was meant is then
    # a guess.
    wrong = (
        (kind is str and not isinstance(value, str))
        or (kind in (int, float) and isinstance(value, (str, bool)))
        or (kind is bool and not isinstance(value, bool))
        or (kind is int and isinstance(value, float) and not value.is_integer())
    )
    try:
        if not wrong:
            whole = isinstance(value, float) and kind is int
            OmegaConf.update(config, key, int(value) if whole else value)
            return None
    except OmegaConfBaseException:
        pass
    return f"{key} = {value!r} is a {type(value).__name__}; allowed: {_type_name(kind)}"


def _nearest(key: str, keys: dict) -> str:
    by_name = [
        k for k in keys if k.rpartition(".")[2] == key.rpartition(".")[2]
    ]  # right name, wrong section
    near = by_name or difflib.get_close_matches(key, keys, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else "; allowed keys: python train.py --help"


def _type_name(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind)) if not hasattr(kind, "__args__") else str(kind)


CHOICES = {
    "train.mixed_precision": ("no", "fp16", "bf16"),
    "train.non_finite": ("stop", "skip"),
    "train.compile": ("no", "blocks", "model"),
    "train.all_reduce": ("nccl", "copy_engines"),
    "train.recompute": ("none", "activation", "block"),
    "optim.schedule": ("cosine", "linear", "constant"),
    "logging.wandb": ("disabled", "offline", "online"),
    "data.source": ("builtin", "text", "jsonl", "parquet", "hub"),
}
AT_LEAST = {
    "train.steps": 1,
    "train.batch_size": 1,
    "train.gradient_accumulation_steps": 1,
    "train.max_grad_norm": 0,
    "train.eval_every": 0,
    "train.eval_samples": 0,
    "optim.lr": 0,
    "optim.warmup_steps": 0,
    "optim.weight_decay": 0,
    "checkpoint.save_every": 0,
    "train.max_skipped_steps": 1,
    "checkpoint.keep": 2,
    "checkpoint.keep_every": 0,
    "logging.log_every": 1,
    "logging.profile_step": 1,
    "logging.profile_steps": 0,
    "data.max_documents": 0,
    "data.workers": 0,
}


def _value_problems(run: RunConfig) -> list[str]:
    """Values of the right type that make no sense, alone or together."""
    value = dict(_flatten(dataclasses.asdict(run)))
    problems = [
        f"{key} = {value[key]!r}; allowed: {', '.join(allowed)}"
        + "".join(
            f"; did you mean {near}?"
            for near in difflib.get_close_matches(str(value[key]), allowed, n=1)
        )
        for key, allowed in CHOICES.items()
        if value[key] not in allowed
    ]
    problems += [
        f"{key} = {value[key]}; allowed: {low} or more"
        for key, low in AT_LEAST.items()
        if value[key] < low
    ]
    problems += [f"model.{problem}" for problem in model_problems(run.model)]
    if run.train.recompute == "activation" and run.model.architecture == "llama":
        problems.append(
            "train.recompute = 'activation', which is for masked mixers; allowed for architecture llama: none, block"
        )
    if run.train.cuda_graphs and run.train.compile == "no":
        problems.append(
            "train.cuda_graphs = true with train.compile = 'no'; allowed with it: blocks, model"
        )
    if run.train.cuda_graphs and run.train.recompute == "block":
        problems.append(
            "train.cuda_graphs = true with train.recompute = 'block', which cannot be recorded; allowed with it: none, activation"
        )
    if run.train.cuda_graphs and run.train.gradient_accumulation_steps > 1:
        problems.append(
            "train.cuda_graphs = true, where each backward pass writes its gradients over the last one's; allowed with "
            f"train.gradient_accumulation_steps = {run.train.gradient_accumulation_steps}: false"
        )
    if not run.name or "/" in run.name or run.name in (".", ".."):
        problems.append(f"name = {run.name!r}; allowed: a directory name without slashes")
    if not 0 < run.data.validation_fraction < 1:
        problems.append(
            f"data.validation_fraction = {run.data.validation_fraction}; allowed: between 0 and 1"
        )
    if not 0 <= run.optim.min_lr_ratio <= 1:
        problems.append(f"optim.min_lr_ratio = {run.optim.min_lr_ratio}; allowed: 0 to 1")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(run.optim, name) < 1:
            problems.append(
                f"optim.{name} = {getattr(run.optim, name)}; allowed: 0 up to but not including 1"
            )
    if run.optim.warmup_steps > run.train.steps:
        problems.append(
            f"optim.warmup_steps = {run.optim.warmup_steps} is more than train.steps = {run.train.steps}; allowed: at most that"
        )
    return problems


def _listing(what: str, problems: list[str]) -> str:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return f"{count} in the {what}:\n" + "\n".join(f"  - {problem}" for problem in problems)
