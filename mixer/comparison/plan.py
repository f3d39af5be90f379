"""What a plan asks for: the runs of its models, one after the other, each with all its options.

A plan has `common`, the options of all runs by section.key, and either

- `runs`: for each name the options that differ. Each trains for its train.steps. `reference` names
  the run that the report compares the others with.
- `kinds`: for each kind of model its sizes, and for each size the options that differ. Each model
  trains for a few steps, which measures its speed; at each of `rates`, for `sweep_share` of the
  steps that it does in `seconds`; and for `seconds` at the best of these rates and at the next
  lower one. A size may have several such times of its own, `seconds: [20, 60]`. Then the best size
  of a kind trains for each of `seconds_of_best`, again at its rate and at the next lower one. All
  runs of a time have the same steps; those of a later one follow the model's fastest run so far.
  Without `rates` each model keeps its own. `pretraining` has the options of a run that comes
  first, for `seconds`, at each model's own rate; all others start from its weights.

With `keep_checkpoints` the results' folder keeps the checkpoints of `runs`, or of the longer runs.
Each of `seeds` repeats the runs of `runs`, or the longer runs at the better of their rates, with
other initial weights and data. Where a plan or a run names a configuration as its `recipe`, the
optimizer and the initial mixing weights come from it, but not their form, model.mixing_weight.
`options` is a place for what other parts refer to (YAML's anchors).
"""

import re
import shlex
import signal
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field, replace

from mixer.common.errors import UserError, errors_about
from mixer.common.files import as_path
from mixer.common.values import read_yaml, shape_problem
from mixer.comparison.report import best_size, sweep_budgets
from mixer.data.config import NOT_COMPARED
from mixer.models.config import with_content
from mixer.training.config import MOST_EPOCHS, RunConfig, flatten, load_config

SIGNALS = (signal.SIGINT, signal.SIGTERM)  # that stop a run, which is saved
OPTIONS = {str: object}  # of runs, by section.key; load_config checks them
ENTRY_SHAPE = {"recipe": str, "seconds": [float]} | OPTIONS
PLAN_SHAPE = {
    "common": OPTIONS,
    "recipe": str,
    "options": object,
    "seeds": [int],
    "runs": {str: dict | None},
    "reference": str,
    "kinds": {str: {str | int | float: dict | None}},
    "pretraining": OPTIONS,
    "seconds": float,
    "seconds_of_best": [float],
    "rates": [float],
    "sweep_share": float,
    "keep_checkpoints": bool,
}


@dataclass(frozen=True)
class Run:
    """What one process trains."""

    name: str
    settings: dict  # by section.key
    identity: dict = field(default_factory=dict)  # kind, size, budget, lr and seed
    keeps_checkpoint: bool = False  # for other runs to start from, or to be evaluated

    @property
    def folder(self) -> str:
        """The name of its directory, which is the same for names that differ by signs alone."""
        return re.sub(r"[^\w.+-]+", "-", self.name)

    def config(self, *changes: str) -> RunConfig:
        return load_config(None, list(changes), self.settings)

    def with_seed(self, seed: int) -> "Run":
        return replace(
            self,
            name=f"{self.name}, seed {seed}",
            settings=self.settings | {"seed": seed},
            identity=self.identity | {"seed": seed},
        )


@dataclass(frozen=True)
class Model:
    """A size of a kind, which trains for each of its budgets."""

    kind: str
    size: str
    settings: dict  # by section.key
    budgets: tuple[float, ...]  # the seconds of its longer runs

    @property
    def name(self) -> str:
        return model_name(self.kind, self.size)

    @property
    def rate(self) -> float:
        return self.settings.get("optim.lr", RunConfig().optim.lr)

    def has(self, row: dict) -> bool:
        """Whether a row of the results is that of a run of this model."""
        return (row.get("kind"), row.get("size")) == (self.kind, self.size)

    def untimed(self) -> Run:
        """Stands for its runs where names and options are checked, before any steps are known."""
        return Run(self.name, self.settings | {"train.steps": 1_000_000})

    def speed_run(self, rate: float) -> Run:
        """A run that measures the speed."""
        log_every = self.settings.get("logging.log_every", RunConfig().logging.log_every)
        return self._run(f"{self.name}, speed", 0, rate, 4 * log_every)

    def timed(self, budget: float, rate: float, steps: int) -> Run:
        """budget: the seconds that the steps should take."""
        return self._run(f"{self.name}, {budget:g} s, lr {rate:g}", budget, rate, steps)

    def _run(self, name: str, budget: float, rate: float, steps: int) -> Run:
        # A longer warm-up than a third of a short run would be most of what a sweep compares.
        warmup = self.settings.get("optim.warmup_steps", RunConfig().optim.warmup_steps)
        schedule = {
            "train.steps": steps,
            "optim.lr": rate,
            "optim.warmup_steps": min(warmup, steps // 3),
        }
        identity = {"kind": self.kind, "size": self.size, "budget": budget, "lr": rate}
        return Run(name, self.settings | schedule, identity)


def model_name(kind: str, size: str) -> str:
    return f"{kind} {size}".strip()


Job = Generator[Run, dict, None]  # yields runs, one after the other, and receives their rows


def jobs_of(plan: dict, overrides: dict, only: list[str], results: dict) -> list[Job]:
    """The jobs of the runs, kinds or models that `only` names, or of all.

    overrides: options of the command line, by section.key. results: the rows of the runs that have
    ended, by name, with those that the jobs receive. Raises UserError for values and options that
    are not allowed, for names that would be mixed up, and for options other than those of a run in
    the results.
    """
    check_plan(plan)
    runs = runs_of(plan, overrides)
    models = models_of(plan, overrides)
    firsts = [first_of(plan, model) for model in models] if "pretraining" in plan else []
    check_only(only, {entry.name for entry in [*runs, *models]} | plan.get("kinds", {}).keys())
    seeds = plan.get("seeds", [])
    check_runs([*runs, *(model.untimed() for model in [*models, *firsts])], seeds)
    check_run_options(runs, results)
    check_model_options(models, results, has_rates="rates" in plan)
    check_model_options(firsts, results, has_rates=False)
    check_data([entry.settings for entry in [*runs, *models, *firsts]], results)
    jobs = [job_of_run(run, seeds) for run in runs if not only or run.name in only]
    for kind_name in plan.get("kinds", {}):
        of_kind = [model for model in models if model.kind == kind_name]
        chosen = [model for model in of_kind if not only or {kind_name, model.name} & {*only}]
        if chosen:
            jobs.append(job_of_kind(plan, of_kind, chosen, results))
    return jobs


def runs_of(plan: dict, overrides: dict) -> list[Run]:
    """The runs that a plan has by name."""
    keeps = plan.get("keep_checkpoints", False)
    return [
        Run(name, settings_of(plan, overrides, name, entry or {}), keeps_checkpoint=keeps)
        for name, entry in plan.get("runs", {}).items()
    ]


def models_of(plan: dict, overrides: dict) -> list[Model]:
    """All sizes of all kinds of a plan."""
    models = []
    for kind_name, sizes in plan.get("kinds", {}).items():
        for size, entry in sizes.items():
            options = dict(entry or {})
            budgets = tuple(options.pop("seconds", [plan["seconds"]]))
            name = model_name(kind_name, str(size))
            settings = settings_of(plan, overrides, name, options)
            models.append(Model(kind_name, str(size), settings, budgets))
    return models


def settings_of(plan: dict, overrides: dict, name: str, entry: dict) -> dict:
    """All options of a run or model of the plan; later ones win."""
    entry = dict(entry)
    with errors_about(name):
        entry_recipe = recipe(entry.pop("recipe", None))
        settings = recipe(plan.get("recipe")) | plan["common"] | entry_recipe | overrides | entry
        if isinstance(settings.get("model.config"), str):  # the results keep what was trained
            settings["model.config"] = with_content(settings["model.config"])
    return settings


def recipe(file: str | None) -> dict:
    """The options of the configuration that a plan or a run names as its recipe."""
    if file is None:
        return {}
    values = dict(flatten(read_yaml(as_path(file))))
    options = {key: value for key, value in values.items() if key.startswith("optim.")}
    if not options:
        raise UserError(f"recipe: {file} has no section optim; give a configuration that has one")
    return options | {"model.mixing_init": values.get("model.mixing_init", "reference")}


def check_plan(plan: dict) -> None:
    """Raises UserError for a plan that lacks something, and names what is of another kind."""
    if problem := shape_problem(plan, PLAN_SHAPE, "the plan"):
        raise UserError(problem)
    check_parts(plan)
    entries = entries_of(plan)
    for path, entry in entries.items():
        if problem := shape_problem(entry, ENTRY_SHAPE, f"the plan.{path}"):
            raise UserError(problem)
    check_times(plan, entries)
    if not 0 < plan.get("sweep_share", 0.5) < 1:
        raise UserError(f"the plan.sweep_share = {plan['sweep_share']}; allowed: above 0, below 1")
    runs = plan.get("runs", {})
    if "reference" in plan and plan["reference"] not in runs:
        allowed = ", ".join(runs) or "none, as it has no `runs`"
        raise UserError(f"the plan.reference = {plan['reference']!r}; allowed: {allowed}")


def check_parts(plan: dict) -> None:
    """Raises UserError for a plan that lacks a part, or has one that does not go with another."""
    runs = plan.get("runs", {})
    kinds = plan.get("kinds", {})
    allowed = "`common` and `runs`, or `common`, `seconds` and `kinds`"
    if bool(runs) == bool(kinds):
        which = "both `runs` and `kinds`" if runs else "neither `runs` nor `kinds`"
        raise UserError(f"the plan has {which}; allowed: {allowed}")
    required = ("common", "seconds") if kinds else ("common",)
    if missing := [name for name in required if name not in plan]:
        raise UserError(f"the plan has no `{missing[0]}`; allowed: {allowed}")
    for kind_name, sizes in kinds.items():
        if not sizes:
            allowed = "one or more sizes, such as 512: {model.hidden_size: 512}"
            raise UserError(f"the plan.kinds.{kind_name} = {{}}; allowed: {allowed}")
    if len({"rates", "sweep_share"} & plan.keys()) == 1:
        raise UserError("the plan has one of `rates` and `sweep_share`; allowed: both, or none")


def entries_of(plan: dict) -> dict[str, dict]:
    """The options of each run or size, by its place in the plan, such as kinds.mixer.512."""
    entries = {f"runs.{name}": entry for name, entry in plan.get("runs", {}).items()}
    for kind_name, sizes in plan.get("kinds", {}).items():
        entries |= {f"kinds.{kind_name}.{size}": entry for size, entry in sizes.items()}
    return {path: entry or {} for path, entry in entries.items()}


def check_times(plan: dict, entries: dict[str, dict]) -> None:
    """Raises UserError for a time or a rate that is none, and for a time that means two things."""
    numbers = {name: plan[name] for name in ("rates", "seconds_of_best") if name in plan}
    if "seconds" in plan:
        numbers["seconds"] = [plan["seconds"]]
    for path, entry in entries.items():
        if "seconds" in entry:
            numbers[f"{path}.seconds"] = entry["seconds"]
    for path, listed in numbers.items():
        if not listed:
            raise UserError(f"the plan.{path} = []; allowed: one or more numbers above 0")
        if wrong := [number for number in listed if number <= 0]:
            raise UserError(f"the plan.{path} has {wrong[0]}; allowed: above 0")
    # A sweep's runs would be told from others, of the same names, by nothing.
    budgets = {*plan.get("seconds_of_best", [])}
    for entry in entries.values():
        budgets |= {*entry.get("seconds", [plan.get("seconds")])}
    if plan.get("kinds") and (clashes := sweep_budgets(plan) & budgets):
        problem = f"{min(clashes):g} s is the time of a sweep (sweep_share times another), too"
        raise UserError(f"the plan has a time twice: {problem}; give another sweep_share")


def check_only(only: list[str], names: set[str]) -> None:
    """Raises UserError for names of the command line that the plan does not have."""
    if unknown := sorted({*only} - names):
        allowed = shlex.join(sorted(names))
        raise UserError(f"--only {shlex.join(unknown)}: not in the plan; allowed: {allowed}")


def check_runs(runs: list[Run], seeds: list[int]) -> None:
    """Raises UserError for options that are not allowed, for a seed that would train twice, and for
    runs whose results or directories would be the same.
    """
    for run in runs:
        if (seed := run.settings.get("seed", RunConfig.seed)) in seeds:
            raise UserError(f"{run.name}: seed {seed} is its first seed already; give other seeds")
    runs = [*runs, *(run.with_seed(seed) for run in runs for seed in seeds)]
    folders = Counter(run.folder for run in runs)
    if same := [run.name for run in runs if folders[run.folder] > 1]:
        problem = f"{' and '.join(map(repr, same[:2]))} would share results"
        raise UserError(f"the plan has models of one name: {problem}; give them other names")
    for run in runs:
        with errors_about(run.name):
            run.config(f"name={run.folder}")


def check_run_options(runs: list[Run], results: dict) -> None:
    """Raises UserError if the results have one of these runs with other options."""
    for run in runs:
        if run.name in results:
            check_same(run.name, results[run.name]["settings"], run.settings)


def check_model_options(models: list[Model], results: dict, has_rates: bool) -> None:
    """Raises UserError if the results have runs of these models with other options. has_rates:
    whether the plan gives them others than their own.
    """
    for model in models:
        for name, row in results.items():
            if model.has(row):
                recorded = row["settings"]
                # What differs between the runs of one model.
                rate = recorded.get("optim.lr", model.rate) if has_rates else model.rate
                run = model.timed(1, rate, recorded.get("train.steps", 1))
                between = {k: recorded[k] for k in ("seed", "train.init_from") if k in recorded}
                check_same(name, recorded, run.settings | between)


def check_same(name: str, recorded: dict, planned: dict) -> None:
    """Raises UserError if a run of the results had other options than it has now."""
    if difference := difference_of(recorded, planned):
        problem = f"the results have {name!r} with other options: {difference}"
        raise UserError(f"{problem}; give those options, or another --output")


def difference_of(recorded: dict, planned: dict) -> str:
    """The options that differ, in words; "" if none does."""
    return ", ".join(
        f"{key} {recorded.get(key)}, not {planned.get(key)}"
        for key in sorted({*recorded, *planned})
        if recorded.get(key) != planned.get(key)
    )


def data_options(settings: dict) -> dict:
    """What decides on which samples a run trains; a task's depend on the context."""
    read = ("data.", "model.max_position_embeddings")
    left_out = {f"data.{name}" for name in NOT_COMPARED}
    return {k: settings[k] for k in settings if k.startswith(read) and k not in left_out}


def check_data(settings: list[dict], results: dict) -> None:
    """Raises UserError if all runs have the same data, but the results have a run of other data."""
    first, *later = map(data_options, settings)
    if any(options != first for options in later):
        return
    for name, row in results.items():
        if difference := difference_of(data_options(row["settings"]), first):
            problem = f"the results have {name!r} of other data: {difference}"
            raise UserError(f"{problem}; give those options, or another --output")


def job_of_run(run: Run, seeds: list[int]) -> Job:
    """A run, and its repetitions."""
    yield run
    for seed in seeds:
        yield run.with_seed(seed)


def job_of_kind(plan: dict, models: list[Model], chosen: list[Model], results: dict) -> Job:
    """All runs of the chosen sizes of a kind, and longer ones of the best of all sizes."""
    problems = []
    for model in chosen:
        try:
            yield from runs_of_model(plan, model, results)
        except UserError as error:  # the other sizes go on
            problems.append(str(error))
    for seconds in plan.get("seconds_of_best", []):
        if best := best_size(results, models[0].kind, plan["seconds"]):
            model = next(model for model in models if model.size == best["size"])
            model = yield from pretrained(plan, model, results)
            yield from longer_runs(plan, model, seconds, best["lr"], results)
    if problems:
        raise UserError("\n".join(problems))


def runs_of_model(plan: dict, model: Model, results: dict) -> Job:
    """A run that measures the speed; for each budget those of all rates, and the longer ones."""
    model = yield from pretrained(plan, model, results)
    yield from needed(model.speed_run(min(plan.get("rates", [model.rate]))))
    for budget in model.budgets:
        rate = model.rate
        if "rates" in plan:
            rate = yield from best_rate(plan, model, budget, results)
        yield from longer_runs(plan, model, budget, rate, results)


def pretrained(
    plan: dict, model: Model, results: dict, seed: int | None = None
) -> Generator[Run, dict, Model]:
    """The model as it starts: where the plan has `pretraining`, from the weights of such a run.
    Raises UserError if that has diverged.
    """
    if "pretraining" not in plan:
        return model
    first = first_of(plan, model)
    yield from needed(first.speed_run(first.rate))
    steps = steps_of(first, plan["seconds"], results)
    run = first.timed(plan["seconds"], first.rate, steps)
    if seed is not None:
        run = run.with_seed(seed)
    row = yield from needed(replace(run, keeps_checkpoint=True))
    return replace(model, settings=model.settings | {"train.init_from": row["checkpoint"]})


def first_of(plan: dict, model: Model) -> Model:
    """The pretraining of a model."""
    settings = model.settings | {"train.init_from": ""} | plan["pretraining"]
    return Model(f"{model.kind}, pretraining", model.size, settings, (plan["seconds"],))


def needed(run: Run) -> Generator[Run, dict, dict]:
    """The row of a run that others need. Raises UserError if it has diverged."""
    row = yield run
    if "failure" in row:
        problem = f"{run.name}: diverged at {row['lr']:g}, and others need it"
        raise UserError(f"{problem}; lower optim.lr or the plan's rates, and give another --output")
    return row


def best_rate(
    plan: dict, model: Model, seconds: float, results: dict
) -> Generator[Run, dict, float]:
    """That of the lowest loss after a share of the steps. Raises UserError if all runs diverge."""
    share = plan["sweep_share"]
    steps = steps_of(model, seconds, results, share)
    losses = {}
    for rate in plan["rates"]:
        row = yield model.timed(share * seconds, rate, steps)
        if "failure" not in row:
            losses[rate] = row["validation_loss"]
    if not losses:
        lowest = min(plan["rates"])
        raise UserError(f"{model.name}: diverges even at {lowest:g}; add lower rates")
    return min(losses, key=losses.__getitem__)


def longer_runs(plan: dict, model: Model, seconds: float, best: float, results: dict) -> Job:
    """A model at the best rate of shorter runs and at the next lower one, which more steps may
    want; then with the other seeds at the better of these two.
    """
    steps = steps_of(model, seconds, results)
    rates = sorted(rate for rate in plan.get("rates", [best]) if rate <= best)[-2:]
    keeps = plan.get("keep_checkpoints", False)
    losses = {}
    for rate in reversed(rates):
        row = yield replace(model.timed(seconds, rate, steps), keeps_checkpoint=keeps)
        losses[rate] = row.get("validation_loss", float("inf"))
    for seed in plan.get("seeds", []):
        better = min(losses, key=losses.__getitem__)
        try:
            again = yield from pretrained(plan, model, results, seed)
        except UserError:  # the report has it, and other seeds go on
            continue
        run = again.timed(seconds, better, steps).with_seed(seed)
        yield replace(run, keeps_checkpoint=keeps)


def steps_of(model: Model, seconds: float, results: dict, share: float = 1.0) -> int:
    """The steps of a model's runs for a share of a time: as many as the first of these had, or else
    as many as fit by the model's fastest run so far. The run that measures the speed counts only
    where no other has ended: it is short, and what starts on the same machine meanwhile slows it.
    """
    rows = [row for row in results.values() if model.has(row)]
    for row in rows:
        if row["budget"] == share * seconds:
            return row["settings"]["train.steps"]
    with_speed = [row for row in rows if "failure" not in row]
    longer = [row for row in with_speed if row["budget"]]
    fastest = max(longer or with_speed, key=lambda row: row["tokens_per_second"])
    tokens = min(seconds * fastest["tokens_per_second"], MOST_EPOCHS * fastest["training_tokens"])
    return max(1, round(share * max(1, int(tokens / fastest["tokens_a_step"]))))
