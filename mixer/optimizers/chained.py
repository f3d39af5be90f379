"""Several optimizers of one model that behave as one, and what happens to its gradients before a
step: their norm, clipping, and a guard against those that are not finite.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mixer.common.errors import NotFinite

MOST_SKIPPED = 50  # so many skipped steps in a row end a run


class ChainedOptimizer(torch.optim.Optimizer):
    """One optimizer of several, each with parameters of its own.

    It has the groups of all of them and one state for all, so that accelerate, GradScaler and
    checkpoints meet a single optimizer. A step whose `found_inf` (set by GradScaler and by the
    guard) is 1 must change nothing, and gradients are to be divided by `grad_scale` (set by
    clipping). For parts that do not know both (`_step_supports_amp_scaling`), gradients are divided
    here, or set to zero, so that NaN never reaches a weight.
    """

    _step_supports_amp_scaling = True

    def __init__(self, parts: Sequence[torch.optim.Optimizer]):
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = list(parts)
        self._share()

    def __setstate__(self, state: dict) -> None:
        """Loading a state, as accelerate does to prepare an optimizer, makes new objects."""
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Gives the parts the groups and the state of the whole: the same objects, not copies."""
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        for part in self.parts:
            if getattr(part, "_step_supports_amp_scaling", False):
                part.found_inf = getattr(self, "found_inf", None)
                part.grad_scale = getattr(self, "grad_scale", None)
            else:
                for gradient in gradients_of(part):
                    skip, scale = skip_and_scale(self, gradient.device)
                    gradient.div_(scale).masked_fill_(skip > 0, 0)
            part.step()


def gradients_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    weights = (weight for group in optimizer.param_groups for weight in group["params"])
    return [weight.grad for weight in weights if weight.grad is not None]


def skip_and_scale(optimizer: torch.optim.Optimizer, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of a step: 1 if it is to change nothing, else 0, and what gradients are divided by."""
    found_inf = getattr(optimizer, "found_inf", None)
    scale = getattr(optimizer, "grad_scale", None)
    skip = torch.zeros((), device=device) if found_inf is None else found_inf.to(device)
    return skip, torch.ones((), device=device) if scale is None else scale.to(device)


def gradient_norm(optimizer: torch.optim.Optimizer) -> Tensor:
    """The norm of all gradients, also where they are sharded over the processes."""
    norm = torch.nn.utils.get_total_norm(gradients_of(optimizer))
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def clip(optimizer: torch.optim.Optimizer, norm: Tensor, limit: float) -> None:
    """Makes the optimizer's next step use gradients whose norm is at most `limit`; 0 is no limit.

    The optimizer divides the gradients as it reads them, by what torch's optimizers call
    `grad_scale`. torch.nn.utils.clip_grad_norm_ would read and write all of them once more.
    """
    optimizer.grad_scale = ((norm + 1e-6) / limit).clamp(min=1.0) if limit else None


class Guard:
    """Skips each optimizer step whose gradient is not finite, without waiting for the device: the
    optimizer leaves everything as it is where its `found_inf` is 1. With fp16 GradScaler does that
    (`scaled`). With `stop_at_first`, all steps after the first such one are skipped too. `look` is
    the one place that waits, and belongs where the loop waits anyway.
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
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)  # since the last look
        self.in_a_row = torch.zeros_like(self.skipped)  # up to the last step

    def before_step(self, gradient_norm: Tensor) -> None:
        """To be called with the gradient's norm before each step of the optimizer."""
        bad = ~torch.isfinite(gradient_norm)
        if self.stop_at_first:
            bad = bad | (self.in_a_row > 0)
        if not self.scaled:
            self.optimizer.found_inf = bad.float()
        self.skipped += bad
        self.in_a_row = torch.where(bad, self.in_a_row + 1, 0)

    def look(self, step: int) -> int:
        """How many steps were skipped since the last look, when `step` is done. Waits for the
        device. Raises NotFinite where the skipped steps must end the run.
        """
        skipped, in_a_row = torch.stack([self.skipped, self.in_a_row]).tolist()
        self.skipped.zero_()
        allowed = 1 if self.stop_at_first else MOST_SKIPPED
        if in_a_row >= allowed:
            advice = "lower optim.lr or raise optim.warmup_steps"
            found = f"the gradient of step {step - in_a_row + 1} is not finite"
            if self.stop_at_first:
                advice += " (or set train.non_finite=skip, to skip such steps)"
            else:
                found += f", and {in_a_row} steps in a row were skipped, up to step {step}; "
                found += f"allowed: fewer than {MOST_SKIPPED}"
            if self.scaled:
                advice = "set train.mixed_precision=bf16 or no"
            raise NotFinite(
                f"{found}. The weights did not change: {advice} and run the same command again, "
                "which goes on from the last checkpoint"
            )
        return skipped
