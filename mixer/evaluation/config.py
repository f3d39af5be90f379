"""The options of an evaluation, and what is wrong with them. Importing this file takes no time."""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path

from mixer.checkpoints.checkpoint import read_trainer
from mixer.checkpoints.model_files import check_checkpoint
from mixer.common.errors import UserError
from mixer.common.files import as_path, directory_for
from mixer.common.options import option, option_problems
from mixer.data.config import DataConfig, Manifest, from_values, has_no_splits
from mixer.data.sources import check_path
from mixer.evaluation.beir import read_collection
from mixer.models.masked_mixer.model_options import BACKENDS
from mixer.objectives.config import ObjectiveConfig, traits_of

DEVICES = ("auto", "cpu", "cuda")
TYPES = ("fp32", "fp16", "bf16")  # the names of those in mixer/common/hardware.py
FIRST_TOKEN = {"skip": "not scored", "eos": "scored, after an EOS put before it"}
LAST_WINDOW = {"short": "may be shorter", "full": "begins earlier, to be as long"}
UNCHANGING = ("checkpoint", "batch_size", "device")  # options that change no number
SOURCES = ("text", "data", "pairs", "retrieval", "hub")  # options that name what is evaluated
# Options that not all of these read, or of `EvalOptions.source`.
READ_BY = {"subset": ("hub",), "split": ("hub", "retrieval"), "text_field": ("text", "hub")}
OF_TEXTS = ("stride", "max_tokens", "first_token", "last_window")
READ_BY |= dict.fromkeys(OF_TEXTS, ("text", "data", "hub"))


@dataclass
class EvalOptions:
    """What to evaluate, and how; the fields are the options of `mixer eval`."""

    checkpoint: str = option(MISSING, "checkpoints, or directories of any causal language model")
    # At most one of SOURCES.
    text: Sequence[str] = option((), "files, folders or globs; .jsonl: one document per row")
    data: str = option("", "prepared data directory; default: the run's")
    pairs: str = option("", "prepared pairs: measure how often a text finds its partner")
    retrieval: str = option("", "BEIR's layout: measure how well queries find documents")
    hub: str = option("", "dataset of the hub")
    subset: str = option("", "hub: the dataset's configuration")
    split: str = option("", "hub, retrieval: the split to read; default: test")
    text_field: str = option("text", "field with the text of a row")
    window: int | None = option(None, "longest window; default: the context", at_least=1)
    stride: int | None = option(None, "window step in tokens; default: the window", at_least=1)
    batch_size: int = option(16, "windows per forward pass", at_least=1)
    max_tokens: int = option(0, "score at most this many tokens; 0: all", at_least=0)
    # Under eos a blank row is a document, too.
    first_token: str = option("skip", "skip it, or score it after an EOS", choices=FIRST_TOKEN)
    last_window: str = option("short", "may be short, or starts earlier", choices=LAST_WINDOW)
    device: str = option("auto", "where to compute", choices=DEVICES)
    dtype: str = option("fp32", "precision; fp16 and bf16: autocast", choices=TYPES)
    backend: str = option("", "mixing backend; default: the checkpoint's", choices=("", *BACKENDS))

    @property
    def split_or_default(self) -> str:
        return self.split or "test"

    @property
    def data_directory(self) -> str | None:
        """The prepared data that is scored by default, if it is known."""
        return self.data or read_trainer(as_path(self.checkpoint)).get("data_directory")

    @property
    def source(self) -> str:
        """What is evaluated: the one of SOURCES that is given, else the run's data, or "samples",
        those that the run's objective makes. Raises UserError as `objective_settings` does.
        """
        for name in SOURCES:
            if getattr(self, name):
                return name
        return "samples" if traits_of(*self.objective_settings()).makes_samples else "data"

    def objective_settings(self) -> tuple[ObjectiveConfig, DataConfig]:
        """What the checkpoint was trained on. Raises UserError for an objective that is unknown
        here, and for odd settings of one that makes samples.
        """
        settings = read_trainer(as_path(self.checkpoint)).get("settings", {})
        train = from_values(ObjectiveConfig, settings.get("train", {}))
        data = from_values(DataConfig, settings.get("data", {}))
        problems = option_problems(train, "train.")
        if not problems and traits_of(train, data).makes_samples:
            problems = option_problems(data, "data.")
        if problems:
            unknown = f"{self.checkpoint} was trained on {'; '.join(problems)}"
            raise UserError(f"{unknown}: give --data DIR, or another text, to score that")
        return train, data


def default_directory(evaluations: list[EvalOptions]) -> Path:
    """Beside the first checkpoint, with a name of its own for all options that change numbers."""
    first = evaluations[0]
    changed = [
        (name, value)
        for name, value in vars(first).items()
        if name not in UNCHANGING and value != getattr(EvalOptions, name)
    ]
    changed += [options.checkpoint for options in evaluations[1:]]
    paths = filter(None, [*first.text, first.data, first.pairs, first.retrieval])
    subject = " ".join(as_path(path).resolve().name for path in paths) or first.hub
    return directory_for(
        as_path(first.checkpoint),
        prefix="retrieval" if first.pairs or first.retrieval else "eval",
        subject=subject,
        options=repr(changed) if changed else "",
    )


def check_options(options: EvalOptions) -> None:
    """Raises UserError for whatever can be found wrong before a model is loaded."""
    if problems := option_problems(options):
        raise UserError("; ".join(problems))
    directory = as_path(options.checkpoint)
    check_checkpoint(directory)
    source = options.source
    for name, readers in READ_BY.items():
        if source not in readers and getattr(options, name) != getattr(EvalOptions, name):
            unread = f"--{name.replace('_', '-')} is given, which scoring {source} does not read"
            raise UserError(f"{unread}: leave it out, or give --{' or --'.join(readers)}")
    trained_on = options.data_directory
    has_data = options.data or (trained_on and as_path(trained_on).is_dir())
    if source == "data" and not has_data:
        problem = "does not say what data it was trained on"
        if trained_on:
            problem = f"was trained on {trained_on}, which is not in {Path.cwd()}"
        raise UserError(f"{directory} {problem}: give --data DIR, --text FILE... or --hub NAME")
    if options.hub and options.split and has_no_splits(options.hub):
        raise UserError(f"{options.hub} has no splits: leave out --split")
    for name in options.text:
        check_path(name)
    for name in filter(None, (options.data, options.pairs)):
        Manifest.load(as_path(name))
    if options.retrieval:
        read_collection(as_path(options.retrieval), options.split_or_default)
