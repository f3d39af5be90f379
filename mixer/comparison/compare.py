"""A comparison from its options to its report: check, time every model, find its learning rate,
train it, report.

See mixer.compare for the command.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from mixer.common.errors import NotFinite, UserError
from mixer.common.files import check_writable
from mixer.common.provenance import commit
from mixer.comparison.entrants import Entrant, entrant, entrants_of, without_mixing
from mixer.comparison.report import report, write_report
from mixer.comparison.result import Measured, Sweep, Timing, last_validation, result_of
from mixer.comparison.runs import LOGS, Runs
from mixer.training.config import RunConfig


@dataclass(frozen=True)
class CompareOptions:
    """What to compare, and how; the fields are the options of `python -m mixer.compare`."""

    config: str
    backends: list[str]
    models: str  # a file, or empty
    output: str
    repeats: int
    timing_steps: int
    seconds: float | None
    tune: str | None
    rates: list[float]
    tune_share: float
    seeds: int
    resume: bool
    processes: int
    commit: str
    overrides: list[str]  # section.key=value
    command: str  # as it was typed, for the report


def compare(options: CompareOptions) -> Path:
    """Times, trains and reports; returns the report's path.

    Raises UserError for options that are not allowed, for an output directory that holds something
    else, and for a run that fails.
    """
    entrants = [entrant(name) for name in options.backends]
    entrants += entrants_of(options.models) if options.models else []
    check_options(options, entrants)
    output = Path(options.output)
    check_output(output, options.resume)
    runs = Runs(options.config, tuple(options.overrides), output, options.processes)
    # Before anything runs, so that mistakes in the settings show at once.
    configs = {who: runs.config(who, f"name={who.folder}") for who in entrants}

    limit = without_mixing()
    timed = [*entrants, limit] if any(who.is_backend for who in entrants) else entrants
    timings = time_in_turn(runs, timed, options)
    steps = {who: steps_of(who, run, timings[who], options) for who, run in configs.items()}
    sweeps = {who: tune(runs, who, run, steps[who], options) for who, run in configs.items()}
    measured = []
    for who, run in configs.items():
        of_seeds = train_with_seeds(runs, who, run, steps[who], sweeps[who], options.seeds)
        measured.append(
            Measured(who.name, who.is_backend, run, timings[who], sweeps[who], of_seeds)
        )
    conditions = {
        "command": options.command,
        "commit": options.commit or commit(),
        "processes": options.processes,
        "seconds": options.seconds,
        "timing_steps": options.timing_steps,
        "tune_share": options.tune_share if options.tune else None,
    }
    result = result_of(measured, timings.get(limit, []), conditions)
    print("\n" + report(result))
    return write_report(result, {one.name: one.lines for one in measured}, output)


def check_options(options: CompareOptions, entrants: list[Entrant]) -> None:
    names = [who.folder for who in entrants]
    if not names:
        raise UserError("nothing to compare; give --backends, or --models with a file")
    if len(set(names)) < len(names):
        raise UserError(f"{', '.join(names)}: one is named twice; give each once")
    if options.rates and not options.tune:
        raise UserError("--rates is for --tune lr; give that, or leave --rates out")
    if not all(0 < rate < float("inf") for rate in options.rates):
        raise UserError(f"--rates has {options.rates}; allowed: numbers above 0")
    if not 0 < options.tune_share <= 1:
        raise UserError(f"--tune-share is {options.tune_share:g}; allowed: above 0, at most 1")
    for name in ("repeats", "timing_steps", "processes", "seeds"):
        if getattr(options, name) < 1:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} is {getattr(options, name)}; allowed: 1 or more")
    if options.seconds is not None and not 0 < options.seconds < float("inf"):
        raise UserError(
            f"--seconds is {options.seconds:g}; allowed: above 0 and finite, or left out for "
            "train.steps"
        )


def check_output(output: Path, resume: bool) -> None:
    filled = output.exists() and (not output.is_dir() or any(output.iterdir()))
    if filled and not resume:
        raise UserError(
            f"{output} exists already; choose another --output, delete it, or give --resume to go "
            "on with a comparison that was cut short"
        )
    if filled and not (output / LOGS).is_dir():
        raise UserError(
            f"--resume: {output} is not a comparison's, which has {LOGS} in it; "
            "choose another --output"
        )
    check_writable(output)


def time_in_turn(
    runs: Runs, timed: list[Entrant], options: CompareOptions
) -> dict[Entrant, list[Timing]]:
    """--repeats short runs of each model. The models take turns, so that a machine that becomes
    slower or faster does so for all of them.
    """
    timings: dict[Entrant, list[Timing]] = {who: [] for who in timed}
    for repeat in range(1, options.repeats + 1):
        for who in timed:
            timing = runs.time(who, options.timing_steps, repeat)
            timings[who].append(timing)
            speed = f"{timing.tokens_per_second:,.0f} tokens/s"
            print(f"timing {repeat}/{options.repeats}: {who.name}, {speed}", flush=True)
    return timings


def steps_of(who: Entrant, run: RunConfig, timings: list[Timing], options: CompareOptions) -> int:
    """train.steps, or the steps that take --seconds at the median speed of the short runs."""
    if not options.seconds:
        return run.train.steps
    samples = run.train.batch_size * run.train.gradient_accumulation_steps * options.processes
    rate = median(timing.tokens_per_second for timing in timings)
    steps = max(1, round(options.seconds * rate / (samples * run.model.max_position_embeddings)))
    warmup = run.optim.warmup_steps
    if steps < warmup:
        raise UserError(
            f"--seconds {options.seconds:g} gives {who.name} {steps} steps; allowed: "
            f"optim.warmup_steps = {warmup} or more; give more seconds or fewer warm-up steps, "
            "and --resume, which keeps the timings"
        )
    return steps


def tune(
    runs: Runs, who: Entrant, run: RunConfig, steps: int, options: CompareOptions
) -> Sweep | None:
    """Short runs of a model, one for each learning rate: the long run's schedule with so much fewer
    steps. A run that diverges has no loss.

    Raises UserError where all diverge.
    """
    if not options.tune:
        return None
    rates = sorted(set(options.rates)) or [run.optim.lr * factor for factor in (0.5, 1, 2)]
    short = max(1, round(steps * options.tune_share))
    warmup = min(short, round(run.optim.warmup_steps * options.tune_share))
    losses: dict[float, float | None] = {}
    for rate in rates:
        changes = (f"optim.lr={rate!r}", f"optim.warmup_steps={warmup}", "train.eval_every=0")
        changes += ("checkpoint.save_every=0", "checkpoint.save_last=false")
        try:
            lines = runs.train(who, short, f"{who.folder}-lr-{rate:g}", *changes)
            losses[rate] = last_validation(lines)["validation_loss"]
        except NotFinite:
            losses[rate] = None
    if not any(loss is not None for loss in losses.values()):
        raise UserError(f"{who.name} diverges at all of --rates {rates}; give lower ones")
    return Sweep(short, losses)


def train_with_seeds(
    runs: Runs, who: Entrant, run: RunConfig, steps: int, sweep: Sweep | None, seeds: int
) -> dict[int, list[dict]]:
    """The metrics of a model's whole runs, by seed: the configuration's and those after it."""
    rate = (f"optim.lr={sweep.best!r}",) if sweep else ()
    found = {run.seed: runs.train(who, steps, who.folder, *rate)}
    for seed in range(run.seed + 1, run.seed + seeds):
        found[seed] = runs.train(who, steps, f"{who.folder}-seed-{seed}", *rate, f"seed={seed}")
    return found
