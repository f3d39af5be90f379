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
`options` is a place for what other parts refer to (YAML's anchors).
"""

import re
import shlex
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field, replace

from mixer.common.errors import UserError
from mixer.common.files import as_path
from mixer.common.values import read_yaml, shape_problem
from mixer.comparison.report import best_size
from mixer.training.config import RunConfig, flatten, load_config, override

EPOCHS = 4  # no run reads its text more often: beyond, repeated text is worth less (2305.16264)
OPTIONS = {str: object}  # of runs, by section.key; load_config checks them
OWN = {"recipe": str} | OPTIONS
SHAPE = {
    **{"common": OPTIONS, "recipe": str, "options": object, "seeds": [int]},
    **{"runs": {str: dict | None}, "reference": str},
    **{"kinds": {str: {str | int | float: dict | None}}, "pretraining": OPTIONS},
    **{"seconds": float, "seconds_of_best": [float], "rates": [float], "sweep_share": float},
}


@dataclass(frozen=True)
class Run:
    """What one process trains; or a model of a plan, of which `timed` makes runs."""

    name: str
    settings: dict  # by section.key
    about: dict = field(default_factory=dict)  # kind, size, budget, lr and seed
    keeps: bool = False  # whether its checkpoint stays, for others to start from

    @property
    def folder(self) -> str:
        """The name of its directory, which is the same for names that differ by signs alone."""
        return re.sub(r"[^\w.+-]+", "-", self.name)

    @property
    def rate(self) -> float:
        return self.settings.get("optim.lr") or RunConfig().optim.lr

    @property
    def measuring_steps(self) -> int:
        """How long a run is that measures the speed."""
        return 4 * self.settings.get("logging.log_every", RunConfig().logging.log_every)

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
    Raises UserError for values and options that are not allowed, for names that would be mixed up,
    and for options other than those of a known run.
    """
    check_plan(plan)

    def options(own: dict | None) -> dict:
        """All options of a run or model; later ones win."""
        own = dict(own or {})
        chosen = recipe(own.pop("recipe", None))
        return recipe(plan.get("recipe")) | plan["common"] | chosen | given | own

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
    seeds, jobs = plan.get("seeds", []), []
    firsts = [first_of(plan, model) for model in models] if "pretraining" in plan else []
    repeated = [run.with_seed(seed) for run in [*runs, *models] for seed in seeds]
    check_names([*runs, *models, *firsts, *repeated])
    for run in [*runs, *models, *firsts, *repeated]:  # refuses what is not allowed
        unmeasured = ["train.steps=1000000"] if "kind" in run.about else []
        run.config(f"name={run.folder}", *unmeasured)
    for run in [*runs, *models]:
        check_known(run, known)
    check_data([*runs, *models, *firsts], known)
    for run in runs:
        if not only or run.name in only:
            jobs.append(each for each in [run, *map(run.with_seed, seeds)])
    for kind in plan.get("kinds", {}):
        own = [model for model in models if model.about["kind"] == kind]
        if chosen := [model for model in own if not only or {kind, model.name} & {*only}]:
            jobs.append(job_of_kind(plan, own, chosen, known))
    return jobs


def check_plan(plan: dict) -> None:
    """Raises UserError for a plan that lacks something, and names what is of another kind."""
    if problem := shape_problem(plan, SHAPE, "the plan"):
        raise UserError(problem)
    runs, kinds = plan.get("runs", {}), plan.get("kinds", {})
    parts = {"common", "seconds", "kinds"} if kinds else {"common", "runs"}
    sweep = {"rates", "sweep_share"} & plan.keys()
    is_empty = not (runs or kinds) or not all([*kinds.values(), plan.get("rates", True)])
    if is_empty or (runs and kinds) or not parts <= plan.keys() or len(sweep) == 1:
        allowed = "`common` and `runs`, or `common`, `seconds` and `kinds`; optionally `rates` and"
        raise UserError(f"the plan is incomplete; allowed: {allowed} `sweep_share`")
    for name, own in [*runs.items(), *(item for sizes in kinds.values() for item in sizes.items())]:
        if problem := shape_problem(own or {}, OWN, f"the plan's {name}"):
            raise UserError(problem)
    numbers = [plan.get("seconds", 1), *plan.get("rates", []), *plan.get("seconds_of_best", [])]
    if wrong := [number for number in numbers if number <= 0]:
        raise UserError(f"the plan has {wrong[0]} as a time or a rate; allowed: above 0")
    if not 0 < plan.get("sweep_share", 0.5) < 1:
        raise UserError(f"the plan.sweep_share = {plan['sweep_share']}; allowed: above 0, below 1")
    if "reference" in plan and plan["reference"] not in runs:
        allowed = ", ".join(runs) or "none, as it has no `runs`"
        raise UserError(f"the plan.reference = {plan['reference']!r}; allowed: {allowed}")


def check_names(runs: list[Run]) -> None:
    """Raises UserError for runs or models whose results or directories would be the same."""
    names = Counter(run.folder for run in runs)
    if same := [run.name for run in runs if names[run.folder] > 1]:
        problem = f"{' and '.join(map(repr, same[:2]))} would share results"
        raise UserError(f"the plan has models of one name: {problem}; give them other names")


def recipe(file: str | None) -> dict:
    """The options of the configuration that a plan or a run names as its recipe."""
    if file is None:
        return {}
    values = dict(flatten(read_yaml(as_path(file))))
    options = {key: value for key, value in values.items() if key.startswith("optim.")}
    if not options:
        raise UserError(f"recipe: {file} has no section optim; give a configuration that has one")
    return options | {"model.mixing_init": values.get("model.mixing_init", "reference")}


def check_known(run: Run, known: dict) -> None:
    """Raises UserError if the results have this run, or runs of this model, with other options."""
    for name, row in known.items():
        had, now = row["settings"], run.settings
        if run.about and run.about == {key: row.get(key) for key in run.about}:
            # What differs between the runs of one model.
            now = run.timed(1, had.get("optim.lr", run.rate), had.get("train.steps", 1)).settings
            now |= {key: had[key] for key in ("seed", "train.init_from") if key in had}
        elif name != run.name:
            continue
        if other := [key for key in sorted({*had, *now}) if had.get(key) != now.get(key)]:
            said = ", ".join(f"{key} {had.get(key)}, not {now.get(key)}" for key in other)
            allowed = "give those options, or another --output"
            raise UserError(f"the results have {name!r} with other options: {said}; {allowed}")


def data_options(settings: dict) -> dict:
    """What decides on which samples a run trains; a task's depend on the context."""
    elsewhere = ("data.directory", "data.workers")  # where and how fast a text is tokenized
    read = ("data.", "model.max_position_embeddings")
    return {k: settings[k] for k in settings if k.startswith(read) and k not in elsewhere}


def check_data(runs: list[Run], known: dict) -> None:
    """Raises UserError if all runs have the same data, but the results have a run of other data."""
    first, *others = (data_options(run.settings) for run in runs)
    if any(other != first for other in others):
        return
    for name, row in known.items():
        had = data_options(row["settings"])
        if other := [key for key in sorted({*had, *first}) if had.get(key) != first.get(key)]:
            said = ", ".join(f"{key} {had.get(key)}, not {first.get(key)}" for key in other)
            problem = f"the results have {name!r} of other data: {said}"
            raise UserError(f"{problem}; give those options, or another --output")


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
    first = first_of(plan, model)
    speed = yield first.timed(0, first.rate, first.measuring_steps)
    run = first.timed(plan["seconds"], first.rate, steps_in(plan["seconds"], speed))
    row = yield replace(run if seed is None else run.with_seed(seed), keeps=True)
    return replace(model, settings=model.settings | {"train.init_from": row["checkpoint"]})


def first_of(plan: dict, model: Run) -> Run:
    """The pretraining of a model."""
    about = model.about | {"kind": f"{model.about['kind']}, pretraining"}
    options = model.settings | {"train.init_from": ""} | plan["pretraining"]
    return Run(" ".join(about.values()).strip(), options, about)


def runs_of_model(plan: dict, model: Run) -> Job:
    """A run that measures the speed, those of all rates, and the longer ones."""
    model = yield from pretrained(plan, model)
    rates, share, seconds = plan.get("rates"), plan.get("sweep_share"), plan["seconds"]
    lowest = min(rates or [model.rate])
    shorter = [(yield model.timed(0, lowest, model.measuring_steps))]
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
