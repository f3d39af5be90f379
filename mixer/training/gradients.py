"""A step's gradients: their norm, clipping, and a guard against those that are not finite, which
says where they come from.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mixer.common.errors import NotFinite
from mixer.distributed.shards import local_part, whole
from mixer.distributed.world import World
from mixer.optimizers.chained import ChainedOptimizer


def gradient_norm(optimizer: ChainedOptimizer) -> Tensor:
    """The norm of all gradients, also where they are sharded over the processes.

    Parts of the optimizer with a `gradient_norm` of their own find it without another pass over the
    gradients.
    """
    norms = []
    for part in optimizer.parts:
        parameters = [weight for group in part.param_groups for weight in group["params"]]
        gradients = [weight.grad for weight in parameters if weight.grad is not None]
        if gradients and hasattr(part, "gradient_norm"):
            norms.append(part.gradient_norm())
        elif gradients:
            norms.append(whole(torch.nn.utils.get_total_norm(gradients)))
    return torch.linalg.vector_norm(torch.stack(norms))


def clip(optimizer: torch.optim.Optimizer, norm: Tensor, limit: float) -> None:
    """Makes the optimizer's next step use gradients whose norm is at most `limit`; 0 is no limit.

    The optimizer divides the gradients as it reads them, by what torch's optimizers call
    `grad_scale`. torch.nn.utils.clip_grad_norm_ would read and write all of them once more.
    """
    optimizer.grad_scale = ((norm + 1e-6) / limit).clamp(min=1.0) if limit else None


@dataclass
class Skipped:
    """What the guard saw since it was last looked at."""

    steps: int  # skipped
    first: int  # the first skipped step, 0 for none
    last: int  # the last one
    in_a_row: int  # the longest row of skipped steps, which may have begun before


class Guard:
    """Skips each optimizer step whose gradient is not finite, without waiting for the device.

    The step is skipped on the device: torch's fused AdamW leaves everything as it is where its
    `found_inf` is 1, which is how GradScaler skips steps too (and does here, with fp16). `look` is
    the one place that waits, and belongs where the loop waits anyway. With `stop_at_first`, nothing
    changes after the first such step either, until it is looked at.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scaled: bool,
        stop_at_first: bool,
        device: torch.device,
    ):
        self.optimizer, self.scaled = optimizer, scaled
        self.stop_at_first = stop_at_first and not scaled  # fp16 overflows now and then
        # skipped steps in a row, up to now
        self.in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self._forget()

    def before_step(self, gradient_norm: Tensor, step: int) -> None:
        """To be called with the gradient's norm before the optimizer's step number `step`."""
        bad = ~torch.isfinite(gradient_norm)
        if self.stop_at_first:
            bad = bad | (self.first > 0)
        if not self.scaled:
            self.optimizer.found_inf = bad.float()
        self.steps += bad
        self.first = torch.where(bad & (self.first == 0), step, self.first)
        self.last = torch.where(bad, step, self.last)
        self.in_a_row = torch.where(bad, self.in_a_row + 1, 0)
        self.longest = torch.maximum(self.longest, self.in_a_row)

    def look(self) -> Skipped:
        """What happened since the last look. Waits for the device."""
        found = Skipped(*torch.stack([self.steps, self.first, self.last, self.longest]).tolist())
        self._forget()
        return found

    def require_finite(
        self,
        found: Skipped,
        limit: int,
        trace: Callable[[int], str],
        last_good: Callable[[], str],
    ) -> None:
        """Raises NotFinite where the skipped steps of a `look` must end the run: the first one with
        stop_at_first, else `limit` of them in a row.

        trace: says where the bad numbers of a step are. last_good: a sentence that names the
        checkpoint to go on from.
        """
        if not found.steps:
            return
        if self.stop_at_first:
            raise NotFinite(
                f"the gradient of step {found.first} is not finite: {trace(found.first)}. "
                f"The step did not change the weights. {last_good()}. "
                "Lower optim.lr or raise optim.warmup_steps and run the same command again, "
                "or set train.non_finite=skip to skip such steps"
            )
        if found.in_a_row >= limit:
            advice = (
                "Set train.mixed_precision=bf16 (or no), which has no such limit"
                if self.scaled
                else "Lower optim.lr or raise optim.warmup_steps"
            )
            raise NotFinite(
                f"{found.in_a_row} steps in a row were skipped, up to step {found.last}, because "
                f"their gradients were not finite ({trace(found.last)}); allowed: fewer than "
                f"train.max_skipped_steps = {limit}. {last_good()}. {advice}"
            )

    def _forget(self) -> None:
        self.steps, self.first, self.last, self.longest = (
            torch.zeros_like(self.in_a_row) for _ in range(4)
        )


def where_not_finite(model: nn.Module, backward, batches: list, own_gradients, world: World) -> str:
    """Repeats a step's forward and backward passes, and says on which processes what is not finite.

    `backward(batch)` runs both passes of a micro-batch and returns its loss. In the context
    `own_gradients` they stay on each process, so that the process they come from shows.
    """
    with own_gradients:
        losses = [float(backward(batch)) for batch in batches]
    parameters = list(model.named_parameters())
    weights = [name for name, parameter in parameters if _bad(parameter)]
    gradients = [
        name
        for name, parameter in parameters
        if parameter.grad is not None and _bad(parameter.grad)
    ]
    for _, parameter in parameters:
        parameter.grad = None
    parts = [f"loss {loss}" for loss in losses if not abs(loss) < float("inf")]
    parts += [f"weight of {_few(weights)}"] if weights else []
    parts += [f"gradient of {_few(gradients)}"] if gradients else []
    reports = world.gather(", ".join(parts))
    found = [f"on process {rank}: {report}" for rank, report in enumerate(reports) if report]
    return "; ".join(found) or "repeated, the step is finite"


def _bad(tensor: Tensor) -> bool:
    return not bool(torch.isfinite(local_part(tensor)).all())


def _few(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
