"""How the loss of each kind of model falls with the compute, and how many times as much of it the
plan's first kind needs for the same loss.

    python benchmarks/scaling.py RESULTS.json --output PATH

RESULTS.json has the runs of benchmarks/plans/scaling.yaml, or of a plan like it: kinds with several
sizes after several times. Writes PATH.md and PATH.png.

- A size's loss is the mean of its seeds, with the best of its learning rates and other options. A
  budget's is that of its best size, which is best for the time, not for the FLOPs.
- The law of a kind is loss = a + b C^-c, with C in FLOPs or in seconds as they were. Its floor a is
  one for all kinds: of two kinds after three times each, five numbers leave one degree of freedom.
  Kinds are compared by their laws, hardly beyond what was measured.
- Intervals (95%) are of seeds alone: all of this is repeated with losses drawn around the means,
  as far apart as the seeds of all sizes together say.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np
from saving import file_of, markdown, parser_of

from mixer.common.errors import UserError, run_command
from mixer.common.files import as_path, read_json, write_text
from mixer.common.terminal import counted
from mixer.comparison.report import sweep_budgets
from mixer.reporting.figure import can_draw, curves, log_axis, write_names
from mixer.reporting.text import LOSS, SECONDS, wrapped

DRAWS = 2000
FLOORS = np.linspace(0, 0.9, 91)  # of the loss that are tried, as shares of the lowest loss
OTHER_FLOORS = (0.0, 0.5, 0.75)  # for which the factors of time are given, too
PFLOP = 1e15
POSITIVE = ("validation_loss", "training_seconds", "useful_tflops", "parameters")


@dataclass(frozen=True)
class Cell:
    """The runs of one size of a kind after one time, which differ by their seeds."""

    budget: float
    parameters: int
    flops: float  # of the whole run, useful ones
    seconds: float  # of training
    losses: tuple[float, ...]

    @property
    def log_loss(self) -> float:
        return fmean(map(math.log, self.losses))


@dataclass(frozen=True)
class Law:
    """ln (loss - floor) = intercept + slope x ln compute."""

    floor: float
    slope: float
    intercept: float

    def loss(self, log_compute: float) -> float:
        return self.floor + math.exp(self.intercept + self.slope * log_compute)

    def log_ratio(self, rival: "Law", log_compute: float) -> float:
        """ln of how many times this compute it needs for the loss that a rival of the same floor
        has with it.
        """
        rival_log = rival.intercept + rival.slope * log_compute
        return (rival_log - self.intercept) / self.slope - log_compute


@dataclass(frozen=True)
class Estimate:
    """A number, and its interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"

    def exp(self) -> "Estimate":
        with np.errstate(over="ignore"):
            return Estimate(*np.exp([self.value, self.low, self.high]))


Compute = Callable[[Cell], float]  # its logarithm
COMPUTE: dict[str, Compute] = {
    "FLOPs": lambda cell: math.log(cell.flops),
    "time": lambda cell: math.log(cell.seconds),
}
Kinds = dict[str, list[Cell]]
Quantity = tuple[str, str, str, float]  # what it is, measure of compute, kind and budget


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("results", type=Path, help="JSON file of the results")
    options = parser.parse_args()
    result = read_runs(as_path(options.results))
    kinds = cells_of(result)
    text = table(kinds)
    picture = file_of(options.output, ".png")
    if can_draw():
        draw(kinds, picture)
        text += f"\n![Loss by compute]({picture.name})\n"
    file = options.results.name
    text += f"\nFrom [{file}]({file}), which has hardware and commits.\n"
    write_text(file_of(options.output, ".md"), text)
    print(text)


# ------------------------------------------------------------------------- the runs


def read_runs(file: Path) -> dict:
    """The results. Raises UserError for those of other plans, for numbers that no run has, and for
    models whose FLOPs are not known.
    """
    otherwise = "name results of scaling.yaml"
    identity = {"kind": str, "size": str, "budget": float, "lr": float}
    plan_shape = {"kinds": {str: dict}, "sweep_share": float, str: object}
    required = {"plan": plan_shape, "runs": {str: identity | {str: object}}}
    result = read_json(file, otherwise, required)
    for name, row in result["runs"].items():
        if missing := sorted(identity.keys() - row.keys()):
            raise UserError(f"{file} is damaged (runs.{name} has no {missing[0]}): {otherwise}")
        if "failure" in row:
            continue
        if "useful_tflops" not in row:
            raise UserError(
                f"{file}: runs.{name} has no useful_tflops, as the FLOPs of its model cannot be "
                f"counted: give results of a plan without the kind {row['kind']!r}"
            )
        for key in POSITIVE:
            value = row.get(key)
            if not isinstance(value, (int, float)) or not 0 < value < math.inf:
                problem = f"runs.{name}.{key} = {value!r}; allowed: a number above 0"
                raise UserError(f"{file} is damaged ({problem}): {otherwise}")
    return result


def cells_of(result: dict) -> Kinds:
    """By kind, in the order of the plan, what was measured of each size after each time. Raises
    UserError for results that leave nothing to compare.
    """
    names = [*result["plan"].get("kinds", {})]
    if len(names) < 2:
        raise UserError("the results are not of two or more kinds, which are what is compared")
    swept = sweep_budgets(result["plan"])
    by_options: dict[tuple, list[dict]] = {}
    for row in result["runs"].values():
        if row["budget"] and row["budget"] not in swept and "failure" not in row:
            key = row["kind"], row["size"], row["budget"], row["lr"]
            by_options.setdefault(key, []).append(row)
    best: dict[tuple, Cell] = {}
    for (kind_name, *_), rows in by_options.items():
        cell = cell_of(rows)
        key = kind_name, cell.parameters, cell.budget
        if key not in best or rank(cell) < rank(best[key]):
            best[key] = cell
    kinds = {
        name: [cell for (kind_name, *_), cell in best.items() if kind_name == name]
        for name in names
    }
    for name, cells in kinds.items():
        if len({cell.budget for cell in cells}) < 2:
            raise UserError(f"{name} has runs of fewer than two times: let the plan end first")
    if not any(len(cell.losses) > 1 for cells in kinds.values() for cell in cells):
        raise UserError(
            "no run has a second seed, which intervals need: let a plan with seeds: [1] end"
        )
    return kinds


def cell_of(rows: list[dict]) -> Cell:
    flops = [row["useful_tflops"] * 1e12 * row["training_seconds"] for row in rows]
    return Cell(
        budget=rows[0]["budget"],
        parameters=rows[0]["parameters"],
        flops=fmean(flops),
        seconds=fmean(row["training_seconds"] for row in rows),
        losses=tuple(row["validation_loss"] for row in rows),
    )


# ------------------------------------------------------------------------- the law


def optima(cells: list[Cell]) -> list[Cell]:
    """The best size after each time."""
    by_budget: dict[float, list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: cell.budget):
        by_budget.setdefault(cell.budget, []).append(cell)
    return [min(of_budget, key=rank) for of_budget in by_budget.values()]


def rank(cell: Cell) -> tuple[int, float]:
    """The lowest is the best. What has one seed is not set against what has more: the luckiest
    seed would win.
    """
    return -len(cell.losses), cell.log_loss


def laws_of(best: Kinds, compute: Compute, floor: float | None = None) -> dict[str, Law]:
    """Of each kind, with a floor, or that which leaves the smallest squares of all together."""
    losses = {name: np.exp([point.log_loss for point in best[name]]) for name in best}
    floors = FLOORS * min(map(min, losses.values())) if floor is None else np.array([floor])
    squares = np.zeros(len(floors))
    lines = {}  # of each kind the slopes and the intercepts, by floor
    for name, points in best.items():
        log_compute = np.array([*map(compute, points)])
        slopes, intercepts = np.polyfit(log_compute, np.log(losses[name][:, None] - floors), 1)
        fitted = floors + np.exp(intercepts + slopes * log_compute[:, None])
        squares += (np.log(fitted / losses[name][:, None]) ** 2).sum(axis=0)
        lines[name] = slopes, intercepts
    best_floor = int(squares.argmin())
    floor = float(floors[best_floor])
    return {
        name: Law(floor, float(slopes[best_floor]), float(intercepts[best_floor]))
        for name, (slopes, intercepts) in lines.items()
    }


def quantities_of(kinds: Kinds) -> dict[Quantity, float]:
    """By each measure of compute: the floor; of each kind the exponent, c; and for each kind but
    the first the ln of how many times as much the first needs, after each time, and of by what ten
    times the compute multiplies that; and how many nats the first's loss is above its own then.
    """
    reference, *rivals = kinds
    best = {name: optima(cells) for name, cells in kinds.items()}
    quantities: dict[Quantity, float] = {}
    for measure, compute in COMPUTE.items():
        laws = laws_of(best, compute)
        quantities["floor", measure, "", 0] = laws[reference].floor
        for name, law in laws.items():
            quantities["exponent", measure, name, 0] = -law.slope
        for name in rivals:
            law = laws[name]
            reference_law = laws[reference]
            for point in best[name]:
                log_compute = compute(point)
                ratio = reference_law.log_ratio(law, log_compute)
                quantities["ratio", measure, name, point.budget] = ratio
                lead = reference_law.loss(log_compute) - law.loss(log_compute)
                quantities["lead", measure, name, point.budget] = lead
            trend = law.slope / reference_law.slope - 1
            quantities["trend", measure, name, 0] = math.log(10) * trend
    return quantities


def estimates_of(kinds: Kinds) -> dict[Quantity, Estimate]:
    """`quantities_of`, and the middle 95% of them with losses that other seeds may give."""
    cells = [cell for of_kind in kinds.values() for cell in of_kind]
    deviations = [math.log(x) - cell.log_loss for cell in cells for x in cell.losses]
    squares = sum(deviation**2 for deviation in deviations)
    freedom = len(deviations) - len(cells)
    random = np.random.default_rng(0)

    def redrawn(cell: Cell, spread: float) -> Cell:
        log_loss = random.normal(cell.log_loss, spread / math.sqrt(len(cell.losses)))
        return replace(cell, losses=(math.exp(log_loss),))

    draws = []
    for _ in range(DRAWS):
        spread = math.sqrt(squares / random.chisquare(freedom))  # itself known from few seeds
        drawn = {name: [redrawn(cell, spread) for cell in kinds[name]] for name in kinds}
        draws.append(quantities_of(drawn))
    return {
        key: Estimate(value, *np.percentile([draw[key] for draw in draws], [2.5, 97.5]))
        for key, value in quantities_of(kinds).items()
    }


# ------------------------------------------------------------------------- the report


def table(kinds: Kinds) -> str:
    """Everything as Markdown."""
    reference, *rivals = kinds
    best = {name: optima(cells) for name, cells in kinds.items()}
    estimates = estimates_of(kinds)
    for name in kinds:
        if any(estimates["exponent", measure, name, 0].value <= 0 for measure in COMPUTE):
            raise UserError(f"the loss of {name} does not fall with the compute: no law fits it")
    freedom = sum(len(points) - 2 for points in best.values()) - 1
    notes = (
        "Losses are in nats per token, those of the size that is best after the time. The law is "
        "loss = a + b C^-c with one floor for all kinds, which leaves "
        f"{counted(max(freedom, 0), 'degree')} of freedom: it says nothing of other budgets. "
        "Ratios are those of the laws. Brackets have 95% of what other seeds would give, and "
        "nothing of other learning rates or texts. PFLOP are 1e15 useful FLOPs of training; time "
        "is the number of steps times the median time of a step."
    )
    sections = ["# Loss by compute", optima_table(kinds), laws_table(best, estimates)]
    for name in rivals:
        budgets = [point.budget for point in best[name]]
        sections.append(f"## How many times as much {reference} needs as {name}")
        sections.append(ratios_table(name, budgets, estimates))
        sections.append(floors_table(best, name))
    return "\n\n".join([*sections, wrapped(notes)]) + "\n"


def optima_table(kinds: Kinds) -> str:
    head = ["kind", "budget, s", "loss", "at", "parameters, M", "PFLOP", "training, s"]
    rows = [
        [
            name,
            f"{best.budget:g}",
            f"{math.exp(best.log_loss):{LOSS}}",
            place(best, cells),
            f"{best.parameters / 1e6:.1f}",
            f"{best.flops / PFLOP:.3g}",
            f"{best.seconds:{SECONDS}}",
        ]
        for name, cells in kinds.items()
        for best in optima(cells)
    ]
    return markdown(head, rows)


def place(best: Cell, cells: list[Cell]) -> str:
    """Which of the sizes after the same time it is: one at the end may not be the best there is."""
    sizes = sorted(cell.parameters for cell in cells if cell.budget == best.budget)
    text = f"the best of {counted(len(sizes), 'size')}"
    if len(sizes) > 1 and best.parameters in (sizes[0], sizes[-1]):
        text += ", the smallest" if best.parameters == sizes[0] else ", the largest"
    return text


def laws_table(best: Kinds, estimates: dict[Quantity, Estimate]) -> str:
    head = ["kind", "by", "floor, a", "exponent, c", "off the law"]
    rows = []
    for measure, compute in COMPUTE.items():
        laws = laws_of(best, compute)
        floor = str(estimates["floor", measure, "", 0])
        for name, points in best.items():
            residuals = [
                point.log_loss - math.log(laws[name].loss(compute(point))) for point in points
            ]
            exponent = str(estimates["exponent", measure, name, 0])
            rows.append([name, measure, floor, exponent, f"{max(map(abs, residuals)):.2%}"])
    return markdown(head, rows)


def ratios_table(name: str, budgets: list[float], estimates: dict[Quantity, Estimate]) -> str:
    """A column for each measure of compute, and the lead in nats."""
    rows = []
    for budget in budgets:
        ratios = [str(estimates["ratio", measure, name, budget].exp()) for measure in COMPUTE]
        rows.append([f"{budget:g} s", *ratios, str(estimates["lead", "time", name, budget])])
    trends = [estimates["trend", measure, name, 0] for measure in COMPUTE]
    multiplied = [str(trend.exp()) for trend in trends]
    rows.append(["ten times as much multiplies this by", *multiplied, "-"])
    rows.append(["so it", *map(direction, trends), "-"])
    return markdown(["after", *COMPUTE, "loss above, nats"], rows)


def floors_table(best: Kinds, name: str) -> str:
    """The factors of time with other floors than the one that fits best."""
    reference, compute = next(iter(best)), COMPUTE["time"]
    rows = []
    lowest = min(math.exp(point.log_loss) for points in best.values() for point in points)
    for share in OTHER_FLOORS:
        floor = share * lowest
        laws = laws_of(best, compute, floor)
        ratios = [laws[reference].log_ratio(laws[name], compute(point)) for point in best[name]]
        rows.append([f"{floor:.2f}", *(f"{math.exp(ratio):.3f}" for ratio in ratios)])
    return markdown(["floor, nats", *(f"time, {point.budget:g} s" for point in best[name])], rows)


def direction(trend: Estimate) -> str:
    if trend.low > 0:
        return "grows"
    return "shrinks" if trend.high < 0 else "may stay the same"


def draw(kinds: Kinds, output: Path) -> None:
    """A marker for each run, the law of each kind, and its name at the end."""
    best = {name: optima(cells) for name, cells in kinds.items()}
    laws = laws_of(best, COMPUTE["FLOPs"])
    names = []
    most_flops = max(cell.flops for cells in kinds.values() for cell in cells)
    lowest = min(min(cell.losses) for cells in kinds.values() for cell in cells)
    highest = max(max(cell.losses) for cells in kinds.values() for cell in cells)
    xlabel = "training compute (1e15 useful FLOPs)"
    with curves(output, "Loss by compute", xlabel, "validation loss (nats)") as axes:
        for number, (name, cells) in enumerate(kinds.items()):
            colour = f"C{number}"
            for cell in cells:
                of_seeds = [cell.flops / PFLOP] * len(cell.losses)
                axes.plot(of_seeds, cell.losses, "o", color=colour, alpha=0.4)
            flops = np.geomspace(best[name][0].flops, best[name][-1].flops, 50)
            losses = [*map(laws[name].loss, np.log(flops))]
            axes.plot(flops / PFLOP, losses, color=colour)
            names.append((most_flops / PFLOP, losses[-1], name, colour))
        log_axis(axes.xaxis, base=10, factors=(1, 2, 5))
        step = 0.1 if highest - lowest < 2 else 1.0
        ticks = np.arange(math.floor(lowest / step), math.ceil(highest / step) + 1) * step
        log_axis(axes.yaxis, base=10, ticks=ticks.round(1).tolist())
        write_names(axes, names)


if __name__ == "__main__":
    run_command(main)
