"""A run's configuration: its sections, YAML files, overrides, and its problems in one report.
Importing it takes no time, so that a wrong option is refused at once.
"""

import difflib
import json
import textwrap
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mixer.checkpoints.checkpoint import TRAINER
from mixer.checkpoints.model_files import existing
from mixer.common.errors import UserError, errors_about
from mixer.common.files import as_path, read_json
from mixer.common.options import allowed_values, as_type, option, option_problems
from mixer.common.terminal import counted
from mixer.common.values import parse_yaml, read_yaml
from mixer.data.config import DataConfig, data_problems, unused_options, without_unused
from mixer.models.config import ModelConfig, model_problems, saved_options, with_content
from mixer.objectives.config import ObjectiveConfig, objective_problems

if TYPE_CHECKING:
    from mixer.objectives.objective import Objective


@dataclass
class TrainConfig(ObjectiveConfig):
    """The loop, and what it learns. The options that objectives read, too, are in ObjectiveConfig,
    as their folder is below this one: objective, batch_size, gradient_accumulation_steps,
    eval_samples and those of single objectives.
    """

    steps: int = option(1000, "optimizer steps of the whole run", at_least=1, at_most=10**9)
    init_from: str = option(
        "",
        "a checkpoint or export whose weights a new run starts from; the options of the model come "
        "from it",
    )
    mixed_precision: str = option("no", "autocast type; no: fp32", choices=("no", "fp16", "bf16"))
    max_grad_norm: float = option(1.0, "clip the gradient norm to this; 0: never", at_least=0)
    non_finite: str = option(
        "stop",
        "on a non-finite loss or gradient (without fp16): stop the run, or skip the step",
        choices=("stop", "skip"),
    )
    eval_every: int = option(1000, "steps between evaluations; 0: only at the end", at_least=0)
    tf32: bool = option(True, "allow TF32 in fp32 matrix products on GPUs that have it")
    compile: str = option(
        "auto",
        "torch.compile; blocks: each block, the final norm and the loss; auto: blocks on GPUs",
        choices=("auto", "no", "blocks"),
    )
    cuda_graphs: str = option(
        "auto",
        "replay a step's compiled passes as one CUDA graph, which saves kernel launches; auto: on "
        "Hopper and newer GPUs",
        choices=("auto", "true", "false"),
    )
    recompute: str = option(
        "none",
        "what the backward pass recomputes to save memory: nothing, the MLP's nonlinearity, or "
        "whole blocks",
        choices=("none", "activation", "block"),
    )


MOST_EPOCHS = 4  # of a text: beyond, what is repeated is worth less (arXiv 2305.16264)
# Where the function of an optimizer is, by the value of optim.name; it takes seconds to import.
OPTIMIZERS = {"adamw": "mixer.training.optim:adamw", "muon": "mixer.training.optim:muon"}
# The lags' learning rate as a multiple of lr where a run does not say. A lag moves the sums of all
# places at once, by the more the longer the context: at 8192 tokens the first one makes the loss
# jump (measured at 512, 2048 and 8192 tokens: dev/LOG.md).
LAGS_LR = 3.0
LONG_LAGS_LR = 1.0
LONG = 2048  # tokens of context; LONG_LAGS_LR is for longer ones


@dataclass
class OptimConfig:
    """The optimizers, their learning rates, and how these rise and fall."""

    name: str = option(
        "adamw",
        "adamw, or muon: Muon for the matrices of linear layers, AdamW for the rest",
        choices=OPTIMIZERS,
    )
    lr: float = option(5e-4, "peak learning rate", at_least=0)
    schedule: str = option(
        "cosine", "decay of lr after the warm-up", choices=("cosine", "linear", "constant")
    )
    warmup_steps: int = option(
        500, "steps of linear warm-up, at most train.steps of them", at_least=0
    )
    min_lr_ratio: float = option(0.0, "final learning rate as a share of lr", at_least=0, at_most=1)
    weight_decay: float = option(0.01, "of weights; biases, norms and lags have none", at_least=0)
    beta1: float = option(0.9, "AdamW's decay of the first moment", at_least=0, below=1)
    beta2: float = option(0.999, "AdamW's decay of the second moment", at_least=0, below=1)
    eps: float = option(1e-8, "AdamW's epsilon", above=0)
    momentum: float = option(0.95, "Muon's momentum", at_least=0, below=1)
    lags_lr: float | None = option(
        None,
        "learning rate of mixing weights by lag, as a multiple of lr; "
        f"null: {LAGS_LR:g}, or {LONG_LAGS_LR:g} if the context exceeds {LONG} tokens",
        above=0,
    )
    mixing_lr: float = option(1.0, "rate of full mixing weights, as a multiple of lr", above=0)
    matrices_lr: float = option(1.0, "rate of linear layers, as a multiple of lr", above=0)
    vectors_lr: float = option(
        1.0,
        "rate of biases, norms, short convolutions and recurrences, as a multiple of lr",
        above=0,
    )


@dataclass
class CheckpointConfig:
    """When a run is saved, which checkpoints are kept, and from which one it continues."""

    save_every: int = option(1000, "steps between checkpoints; 0: only at the end", at_least=0)
    save_last: bool = option(True, "save at the end; false: for runs that are only timed")
    keep: int = option(2, "newest checkpoints to keep; the best one is kept too", at_least=2)
    keep_every: int = option(
        0, "also keep those whose step is a multiple of this; 0: none", at_least=0
    )
    resume: str = option(
        "auto", "auto: the run's newest complete checkpoint; or a checkpoint to branch from"
    )


@dataclass
class LoggingConfig:
    """How often metrics are written, and where else they go."""

    log_every: int = option(10, "steps between lines of metrics", at_least=1)
    tracker: str = option(
        "none",
        "also send the metrics to this; for wandb offline, set WANDB_MODE=offline",
        choices=("none", "wandb", "tensorboard"),
    )
    wandb_project: str = option("masked-mixer", "wandb's project")
    profile: bool = option(
        False, "write a trace of steps 10 to 14 after the start to the run's trace.json.gz"
    )


@dataclass
class RunConfig:
    """Everything that defines a run."""

    name: str = option("run", "the run's directory under output_dir")
    output_dir: str = option("runs", "directory of all runs")
    seed: int = option(0, "seed of the initial weights and the data order", at_least=0, below=2**32)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def directory(self) -> Path:
        return as_path(self.output_dir) / self.name

    def build_objective(self) -> "Objective":
        from mixer.objectives.objective import objective_of  # which takes seconds

        return objective_of(self.train, self.data, self.model.max_position_embeddings)


SECTIONS = {item.name: item.type for item in fields(RunConfig) if is_dataclass(item.type)}
OPTIONS = {item.name: item for item in fields(RunConfig) if item.name not in SECTIONS}
for section, section_class in SECTIONS.items():
    OPTIONS |= {f"{section}.{item.name}": item for item in fields(section_class)}


def load_config(
    path: str | None, overrides: list[str], settings: dict[str, Any] | None = None
) -> RunConfig:
    """The configuration from a YAML file (None: the defaults), a plan's settings by section.key,
    and `section.key=value` overrides, of which later ones win.

    Raises UserError that lists every problem: unknown keys with the nearest valid one, and values
    not allowed; or, where there are none, what options do not allow together.
    """
    run = RunConfig()
    problems = []
    sections = {} if path is None else read_yaml(as_path(path))
    entries = [(key, value, path) for key, value in flatten(sections)]
    entries += [(key, value, "plan") for key, value in (settings or {}).items()]
    for text in overrides:
        try:
            entries.append((*read_override(text), "command line"))
        except UserError as error:
            problems.append(str(error))
    for key, value, origin in entries:
        if problem := _set(run, key, value):
            problems.append(f"{problem} ({origin})")
    run.data = without_unused(run.data)
    problems += _single_problems(run)
    if run.train.init_from and not problems:
        _take_model(run, {key for key, _, _ in entries})
        problems += option_problems(run.model, "model.")
    if not problems:
        try:
            run.model.config = with_content(run.model.config)
        except UserError as error:
            problems.append(f"model.config: {error}")
    # What a configuration does not set is the checkpoint's.
    origin = f" (also by {run.train.init_from}, train.init_from)" if run.train.init_from else ""
    problems += [f"model.{problem}{origin}" for problem in model_problems(run.model)]
    if not problems:
        problems = _clashes(run) + data_problems(run.data) + objective_problems(run.train, run.data)
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        count = counted(len(problems), "problem")
        raise UserError(f"{count} in the configuration:\n{listed}")
    return run


def used_configuration(run: RunConfig) -> dict[str, Any]:
    """The sections of a configuration, without the options that its source of data does not use."""
    sections = asdict(run)
    for name in unused_options(run.data):
        del sections["data"][name]
    return sections


def read_override(text: str) -> tuple[str, Any]:
    """The key and the value of `section.key=value`. Raises UserError where there is none."""
    key, equals, value = text.removeprefix("--").partition("=")
    if not equals:
        meant = f"did you mean --config {text}?" if text.endswith((".yaml", ".yml")) else ""
        hint = meant or "write overrides as section.key=value"
        raise UserError(f"{text!r} on the command line: {hint}")
    if value and not (key in OPTIONS and OPTIONS[key].type is str):  # text is taken as it is
        try:
            value = parse_yaml(value)
        except yaml.YAMLError as error:
            cause = getattr(error, "problem", None) or error  # without a copy of the text
            raise UserError(f"{key}: {value!r} cannot be read as a YAML value: {cause}") from None
    return key, value


def override(key: str, value: Any) -> str:
    """The command-line override that sets a key to a value."""
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}"


HELP_WIDTH = 79  # columns: of any terminal


def describe_options() -> str:
    """Every key with its type, default, allowed values and meaning, for --help."""
    lines = ["keys and their defaults, for the YAML file or as section.key=value:"]
    for key, item in OPTIONS.items():
        allowed = allowed_values(item).replace("text in quotes", "text")
        default = f"{override(key, item.default)}: {allowed}"
        for text, indent in ((default, 2), (item.metadata["help"], 6)):
            lines += textwrap.wrap(
                text,
                HELP_WIDTH,
                initial_indent=" " * indent,
                subsequent_indent=" " * 6,
                break_on_hyphens=False,
            )
    return "\n".join(lines)


def flatten(node: dict, prefix: str = "") -> list[tuple[str, Any]]:
    """{"a": {"b": 1}} -> [("a.b", 1)]; an empty section gives nothing, and the value of an option
    stays whole.
    """
    entries = []
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and (value or key in SECTIONS) and key not in OPTIONS:
            entries += flatten(value, f"{key}.")
        elif value is not None or key not in SECTIONS:
            entries.append((key, value))
    return entries


def _set(run: RunConfig, key: str, value: Any) -> str | None:
    """Sets a key, or says what is wrong with its name."""
    if key in SECTIONS:
        example = next(option for option in OPTIONS if option.startswith(f"{key}."))
        return f"{key} = {value!r:.60}; allowed: keys with values, such as {example}"
    if key not in OPTIONS:
        # its name in another section, or one like it
        name = key.rpartition(".")[2]
        near = [option for option in OPTIONS if option.rpartition(".")[2] == name]
        near += difflib.get_close_matches(key, OPTIONS, 1)
        hint = f"did you mean {near[0]}?" if near else "allowed keys: mixer train --help"
        return f"unknown key {key} = {value!r}; {hint}"
    choices = OPTIONS[key].metadata["choices"]
    if isinstance(value, bool) and str(value).lower() in choices:
        value = str(value).lower()  # YAML's true, where it is one of several choices
    section, _, name = key.rpartition(".")
    setattr(getattr(run, section) if section else run, name, as_type(value, OPTIONS[key].type))
    return None


def _single_problems(run: RunConfig) -> list[str]:
    """Values that are not allowed, whatever the others are."""
    problems = option_problems(run)
    for section in SECTIONS:
        problems += option_problems(getattr(run, section), f"{section}.")
    return problems


def _take_model(run: RunConfig, keys: set[str]) -> None:
    """Gives a run with train.init_from that model's options, but for those that `keys` set: what
    they contradict is refused when the weights are read. A run that goes on has its own checkpoints
    for that, also where the weights that it began from are gone.
    """
    init_from = as_path(run.train.init_from)
    candidates = list(run.directory.glob("step-*"))
    if run.checkpoint.resume != "auto":
        candidates.append(as_path(run.checkpoint.resume))
    candidates.append(init_from)
    checkpoint = next((path for path in candidates if (path / "config.json").is_file()), init_from)
    if not (checkpoint / "config.json").is_file():
        with errors_about("train.init_from"):
            existing(init_from)  # says what is there instead
    options = _options_of(checkpoint, is_own=checkpoint != init_from)
    if "model.architecture" in keys and run.model.architecture != options.get("architecture"):
        return
    for name, value in options.items():
        if f"model.{name}" not in keys:
            _set(run, f"model.{name}", value)


def _options_of(checkpoint: Path, is_own: bool) -> dict[str, Any]:
    """The options of the section `model` that give a checkpoint's model. is_own: the run goes on
    from it, and takes those that it recorded, as its config.json may say the same otherwise.
    """
    remedy = "give another checkpoint"
    if is_own:
        with suppress(UserError):  # a damaged one is passed over later, by name
            shape = {"settings": {"model": dict}}
            recorded = read_json(checkpoint / TRAINER, remedy, required=shape)
            options = recorded["settings"]["model"]
            return {name: value for name, value in options.items() if name != "mixing_backend"}
    return saved_options(read_json(checkpoint / "config.json", remedy))


def _clashes(run: RunConfig) -> list[str]:
    """Values that are allowed alone, but not together."""
    train = run.train
    architecture = run.model.architecture
    clashes = []
    if not run.name or "/" in run.name or run.name in (".", ".."):
        clashes.append(f"name = {run.name!r}; allowed: a directory name without slashes")
    if not run.output_dir:
        clashes.append("output_dir is empty; allowed: a directory, such as runs")
    if train.recompute == "activation" and architecture != "masked_mixer":
        clashes.append(
            "train.recompute = 'activation', which is for masked mixers; allowed for architecture "
            f"{architecture}: none, block"
        )
    return clashes
