"""What a plan asks for: the runs of its models, one after the other, each with all its options.

A plan has `common`, the options of all runs by section.key, and either

- `runs`: for each name the options that differ. Each trains for its train.steps. `reference` names
  the run that the report compares the others with.
- `kinds`: for each kind of model its sizes, and for each size the options that differ. Each model
  trains for a few steps, which measures its speed; at each of `rates`, for `sweep_share` of the
  steps that it does in `seconds`; and for `seconds` at the best of these rates and at the next
  lower one. Then the best size of a kind trains for each of `seconds_of_best`, again at its rate
  and at the next lower one. Without `rates` each model keeps its own. `pretraining` has the
  options of a run that comes first, for as many seconds, at each model's own rate; all others
  start from its weights.

Each of `seeds` repeats the runs of `runs`, or the longer runs at the better of their rates, with
other initial weights and data. Where a plan or a run names a configuration as its `recipe`, the
optimizer and the initial mixing weights come from it, but not their form, model.mixing_weight.
"""

import shlex
from collections.abc import Generator
from dataclasses import dataclass, field, replace

from mixer.common.errors import UserError
from mixer.comparison.report import best_size
from mixer.training.config import RunConfig, load_config, override, read_yaml

EPOCHS = 4  # no run reads its text more often: beyond, repeated text is worth less (2305.16264)


@dataclass(frozen=True)
class Run:
    """What one process trains; or a model of a plan, of which `timed` makes runs."""

    name: str
    settings: dict  # by section.key
    about: dict = field(default_factory=dict)  # kind, size, budget, lr and seed
    keeps: bool = False  # whether its checkpoint stays, for others to start from

    @property
    def rate(self) -> float:
        return self.settings.get("optim.lr") or RunConfig().optim.lr

    def config(self, *changes: str) -> RunConfig:
        return load_config(None, [*(override(*item) for item in self.settings.items()), *changes])

    def with_seed(self, seed: int) -> "Run":
        changes = {"settings": self.settings | {"seed": seed}, "about": self.about | {"seed": seed}}
        return replace(self, name=f"{self.name}, seed {seed}", **changes)

    def timed(self, budget: float, rate: float, steps: int) -> "Run":
        """budget: the seconds that the steps should take; 0 for a run that measures the speed."""
        name = f"{self.name}, {budget:g} s, lr {rate:g}" if budget else f"{self.name}, speed"
        # A longer warm-up than a third of a short run would be most of what a sweep compares.
        warmup = self.settings.get("optim.warmup_steps", RunConfig().optim.warmup_steps)
        changes = {"train.steps": steps, "optim.lr": rate}
        changes["optim.warmup_steps"] = min(warmup, steps // 3)
        return Run(name, self.settings | changes, self.about | {"budget": budget, "lr": rate})


Job = Generator[Run, dict, None]  # yields runs, one after the other, and receives their rows


def jobs_of(plan: dict, given: dict, only: list[str], known: dict) -> list[Job]:
    """The jobs of the runs, kinds or models that `only` names, or of all.

    given: options of the command line, by section.key. known: rows of the runs that have ended.
    Raises UserError for options that are not allowed, or other than those of a known run.
    """
    is_whole = "common" in plan and ("runs" in plan or {"kinds", "seconds"} <= plan.keys())
    if not is_whole or ("rates" in plan) != ("sweep_share" in plan):
        allowed = "`common` and `runs`, or `common`, `seconds` and `kinds`; optionally `rates` and"
        raise UserError(f"the plan is incomplete; allowed: {allowed} `sweep_share`")

    def options(own: dict | None) -> dict:
        """All options of a run or model; later ones win."""
        chosen = recipe(plan) | plan["common"] | recipe(own or {}) | given | (own or {})
        return {key: value for key, value in chosen.items() if key != "recipe"}

    runs = [Run(name, options(own)) for name, own in plan.get("runs", {}).items()]
    models = [
        Run(f"{kind} {size}".strip(), options(own), {"kind": kind, "size": str(size)})
        for kind, sizes in plan.get("kinds", {}).items()
        for size, own in sizes.items()
    ]
    names = {run.name for run in [*runs, *models]} | {*plan.get("kinds", {})}
    if unknown := sorted({*only} - names):
        allowed = shlex.join(sorted(names))
        raise UserError(f"--only {shlex.join(unknown)}: not in the plan; allowed: {allowed}")
    for run in [*runs, *models]:
        (run.timed(0, run.rate, 100) if run.about else run).config()  # refuses what is not allowed
        check_known(run, known)
    seeds, jobs = plan.get("seeds", []), []
    for run in runs:
        if not only or run.name in only:
            jobs.append(each for each in [run, *map(run.with_seed, seeds)])
    for kind in plan.get("kinds", {}):
        own = [model for model in models if model.about["kind"] == kind]
        if chosen := [model for model in own if not only or {kind, model.name} & {*only}]:
            jobs.append(job_of_kind(plan, own, chosen, known))
    return jobs


def recipe(changes: dict) -> dict:
    """The options of the configuration that a plan or a run names as its recipe."""
    if "recipe" not in changes:
        return {}
    file = read_yaml(changes["recipe"])
    options = {f"optim.{name}": value for name, value in file["optim"].items()}
    return options | {"model.mixing_init": file["model"].get("mixing_init", "reference")}


def check_known(run: Run, known: dict) -> None:
    """Raises UserError if the results have this run, or runs of this model, with other options."""
    for name, row in known.items():
        had, now = row["settings"], run.settings
        if run.about and run.about == {key: row.get(key) for key in run.about}:
            # What differs between the runs of one model.
            now = run.timed(1, had["optim.lr"], had["train.steps"]).settings
            now |= {key: had[key] for key in ("seed", "train.init_from") if key in had}
        elif name != run.name:
            continue
        if other := [key for key in sorted({*had, *now}) if had.get(key) != now.get(key)]:
            said = ", ".join(f"{key} {had.get(key)}, not {now.get(key)}" for key in other)
            allowed = "give those options, or another --output"
            raise UserError(f"the results have {name!r} with other options: {said}; {allowed}")


def job_of_kind(plan: dict, models: list[Run], chosen: list[Run], known: dict) -> Job:
    """All runs of the chosen sizes of a kind, and longer ones of the best of all sizes."""
    for model in chosen:
        yield from runs_of_model(plan, model)
    for seconds in plan.get("seconds_of_best", []):
        if best := best_size(known, models[0].about["kind"], plan["seconds"]):
            model = next(model for model in models if model.about["size"] == best["size"])
            model = yield from pretrained(plan, model)
            yield from longer_runs(plan, model, seconds, [best])


def pretrained(plan: dict, model: Run, seed: int | None = None) -> Generator[Run, dict, Run]:
    """The model as it starts: where the plan has `pretraining`, from the weights of such a run."""
    if "pretraining" not in plan:
        return model
    about = model.about | {"kind": f"{model.about['kind']}, pretraining"}
    options = model.settings | {"train.init_from": ""} | plan["pretraining"]
    first = Run(" ".join(about.values()).strip(), options, about)
    speed = yield first.timed(0, first.rate, 4 * options["logging.log_every"])
    run = first.timed(plan["seconds"], first.rate, steps_in(plan["seconds"], speed))
    row = yield replace(run if seed is None else run.with_seed(seed), keeps=True)
    return replace(model, settings=model.settings | {"train.init_from": row["checkpoint"]})


def runs_of_model(plan: dict, model: Run) -> Job:
    """A run that measures the speed, those of all rates, and the longer ones."""
    model = yield from pretrained(plan, model)
    rates, share, seconds = plan.get("rates"), plan.get("sweep_share"), plan["seconds"]
    lowest = min(rates or [model.rate])
    shorter = [(yield model.timed(0, lowest, 4 * model.settings["logging.log_every"]))]
    if rates and "failure" not in shorter[0]:
        steps, shorter = max(1, round(share * steps_in(seconds, shorter[0]))), []
        for rate in rates:
            shorter.append((yield model.timed(share * seconds, rate, steps)))
    good = [row for row in shorter if "failure" not in row]
    if not good:
        raise UserError(f"{model.name}: diverges even at {lowest:g}; add lower rates")
    yield from longer_runs(plan, model, seconds, good)


def longer_runs(plan: dict, model: Run, seconds: float, shorter: list[dict]) -> Job:
    """A model at the best rate of shorter runs and at the next lower one, which more steps may
    want; then with the other seeds at the better of these two.
    """
    best = min(shorter, key=lambda row: row["validation_loss"])
    steps = steps_in(seconds, max(shorter, key=lambda row: row["tokens_per_second"]))
    rates = sorted(rate for rate in plan.get("rates", [best["lr"]]) if rate <= best["lr"])[-2:]
    losses = {}
    for rate in reversed(rates):
        row = yield model.timed(seconds, rate, steps)
        losses[rate] = row.get("validation_loss", float("inf"))
    for seed in plan.get("seeds", []):
        better = min(losses, key=losses.get)
        again = yield from pretrained(plan, model, seed)
        yield again.timed(seconds, better, steps).with_seed(seed)


def steps_in(seconds: float, measured: dict) -> int:
    """The steps that a model was measured to do in a time, at most EPOCHS of its text."""
    most = EPOCHS * measured["training_tokens"]
    tokens = min(seconds * measured["tokens_per_second"], most)
    return max(1, int(tokens / measured["tokens_a_step"]))
