"""The numbers of a comparison, from the metrics of its runs; see mixer.compare for how the runs are
made.
"""

from dataclasses import asdict, dataclass
from statistics import mean, median

import torch

from mixer.common.hardware import peak_tflops
from mixer.common.provenance import hardware
from mixer.data.manifest import Manifest
from mixer.models.architecture import model_class, model_config
from mixer.reporting.metrics_file import at_equal_time, start_up, training_times
from mixer.training.config import RunConfig

# The backends of one model compute the same but for rounding: their losses may differ by this.
LARGEST_GAP = 5e-3  # between the training losses, relative, at every logged step
LARGEST_GAP_AT_END = 1e-3  # between their means over the last logged steps
END = 0.1  # share of the logged steps that is the end


@dataclass
class Timing:
    """What a short run measured."""

    tokens_per_second: float
    peak_memory_gb: float  # on a CPU, of the process


@dataclass
class Sweep:
    """Short runs of a model at several learning rates."""

    steps: int
    losses: dict[float, float | None]  # validation loss by rate; None where the run diverged

    @property
    def best(self) -> float:
        """The rate with the lowest validation loss."""
        finite = {rate: loss for rate, loss in self.losses.items() if loss is not None}
        return min(finite, key=finite.get)


@dataclass
class Measured:
    """A model of the comparison: its short runs, and the metrics of its full runs."""

    name: str
    is_backend: bool  # the configuration's masked mixer, under one of the backends
    run: RunConfig
    timings: list[Timing]
    sweep: Sweep | None
    of_seeds: dict[int, list[dict]]  # metrics by seed, the configuration's first

    @property
    def lines(self) -> list[dict]:
        """The metrics of the run with the configuration's seed."""
        return next(iter(self.of_seeds.values()))


def result_of(measured: list[Measured], limit: list[Timing], conditions: dict) -> dict:
    """Everything that the report shows, as JSON.

    limit: the short runs of the masked mixer without token mixing; empty where there is no masked
    mixer. conditions: how it was measured, copied into the result.
    """
    result = {"hardware": hardware(), **conditions, "settings": asdict(measured[0].run)}
    result["limit"] = spread(limit) if limit else None
    result["models"] = {
        one.name: model_result(one, conditions["processes"])
        | {"token_mixing_share": mixing_share(one, result["limit"])}
        for one in measured
    }
    runs = {(one.name, seed): of for one in measured for seed, of in one.of_seeds.items()}
    result["equal_seconds"], losses = at_equal_time(runs)
    for one in measured:
        found = [losses[one.name, seed] for seed in one.of_seeds]
        at = None if None in found else mean(found)
        result["models"][one.name]["validation_loss_at_equal_time"] = at
    backends = [one for one in measured if one.is_backend]
    same_steps = not conditions["seconds"]
    result["gaps"] = [gap(backends[0], other) for other in backends[1:]] if same_steps else []
    return result


def model_result(one: Measured, processes: int) -> dict:
    vocabulary = Manifest.load(one.run.data.directory).vocab_size
    config = model_config(one.run.model, vocabulary, None)
    with torch.device("meta"):
        model = model_class(config)(config)
    # The run's settings, with what was null replaced by what the model has.
    shape = {name: getattr(config, name, given) for name, given in asdict(one.run.model).items()}
    speed, flops, train = spread(one.timings), model.flops_per_token(), one.run.train
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    peak = peak_tflops(device, train.mixed_precision)
    tflops = {kind: speed["median"] * flops[kind] / 1e12 for kind in ("useful", "executed")}
    times, losses = training_times(one.lines), losses_of(one.lines)
    by_seed = {
        seed: last_validation(lines)["validation_loss"] for seed, lines in one.of_seeds.items()
    }
    return {
        "model": shape,
        "vocab_size": vocabulary,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens_per_second": speed,
        "flops_per_token": flops,
        "useful_tflops": tflops["useful"],
        "executed_tflops": tflops["executed"],
        "useful_share_of_peak": tflops["useful"] / (peak * processes) if peak else None,
        "peak_memory_gb": max(timing.peak_memory_gb for timing in one.timings),
        "samples_per_step": train.batch_size * train.gradient_accumulation_steps * processes,
        "steps": max(losses),
        "tokens": one.lines[-1]["tokens"],
        "training_flops": one.lines[-1]["tokens"] * flops["useful"],
        "lr": one.sweep.best if one.sweep else one.run.optim.lr,
        "sweep": asdict(one.sweep) if one.sweep else None,
        "training_seconds": times[max(times)],
        "start_up_seconds": start_up(one.lines),
        "last_loss": losses[max(losses)],
        "validation_loss": mean(by_seed.values()),
        "validation_loss_by_seed": by_seed,
        "validation_bits_per_byte": mean(
            last_validation(lines)["validation_bits_per_byte"] for lines in one.of_seeds.values()
        ),
    }


def mixing_share(one: Measured, limit: dict | None) -> dict | None:
    """Share of a step that token mixing takes: 1 - tokens/s of the model / tokens/s without mixing.

    "lowest" and "highest" pair the slowest and the fastest of both models' short runs, so timing
    noise larger than the share can make "lowest" negative. None where the model has no counterpart
    without mixing, as a transformer.
    """
    if not (limit and one.is_backend):
        return None
    speed = spread(one.timings)
    return {
        "median": 1 - speed["median"] / limit["median"],
        "lowest": 1 - speed["highest"] / limit["lowest"],
        "highest": 1 - speed["lowest"] / limit["highest"],
    }


def spread(timings: list[Timing]) -> dict:
    rates = [timing.tokens_per_second for timing in timings]
    return {"median": median(rates), "lowest": min(rates), "highest": max(rates), "all": rates}


def last_validation(lines: list[dict]) -> dict:
    """The line of the last evaluation."""
    return [line for line in lines if "validation_loss" in line][-1]


def losses_of(lines: list[dict]) -> dict[int, float]:
    """Training loss by step, where it is finite."""
    return {line["step"]: line["loss"] for line in lines if line.get("loss") is not None}


def gap(first: Measured, second: Measured) -> dict:
    """How far the second model's training losses are from the first's, relative to the first's, at
    the steps that both logged.
    """
    ours, theirs = losses_of(first.lines), losses_of(second.lines)
    steps = sorted(ours.keys() & theirs.keys())
    gaps = {step: abs(theirs[step] - ours[step]) / ours[step] for step in steps}
    worst = max(gaps, key=gaps.get)
    end = steps[-max(1, round(END * len(steps))) :]
    at_end = abs(mean(theirs[step] for step in end) / mean(ours[step] for step in end) - 1)
    return {
        "models": [first.name, second.name],
        "steps_compared": len(steps),
        "by_step": gaps,
        "largest": gaps[worst],
        "at_step": worst,
        "mean": mean(gaps.values()),
        "steps_at_end": len(end),
        "of_means_at_end": at_end,
        "mean_at_end": mean(gaps[step] for step in end),
        "within_tolerance": gaps[worst] <= LARGEST_GAP and at_end <= LARGEST_GAP_AT_END,
    }
