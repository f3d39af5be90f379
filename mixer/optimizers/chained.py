"""Several optimizers of one model that behave as one."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class ChainedOptimizer(torch.optim.Optimizer):
    """One optimizer of several, each with parameters of its own.

    It has the groups of all of them and one state for all, so that accelerate, GradScaler and
    checkpoints meet a single optimizer. A step whose `found_inf` (set by GradScaler and by the
    guard) is 1 must change nothing, and gradients are to be divided by `grad_scale` (set by
    clipping). Parts that know both (`_step_supports_amp_scaling`) are given them. The gradients of
    others are divided before they see them, or set to zero on the device, so that NaN never reaches
    a weight.

    Args:
        parts: the optimizers.
    """

    _step_supports_amp_scaling = True

    def __init__(self, parts: Sequence[torch.optim.Optimizer]):
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = list(parts)
        self.group_counts = [len(part.param_groups) for part in parts]
        self._share()

    def __setstate__(self, state: dict) -> None:
        """Loading a state, which accelerate does when it prepares an optimizer, makes new
        objects.
        """
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Gives the parts the groups and the state of the whole: the same objects, not copies."""
        start = 0
        for part, count in zip(self.parts, self.group_counts, strict=True):
            part.param_groups = self.param_groups[start : start + count]
            part.state = self.state
            start += count

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        for part in self.parts:
            if getattr(part, "_step_supports_amp_scaling", False):
                part.grad_scale, part.found_inf = scale, found_inf
            else:
                _prepare_gradients(part, found_inf, scale)
            part.step()


def _prepare_gradients(
    part: torch.optim.Optimizer, found_inf: Tensor | None, scale: Tensor | None
) -> None:
    parameters = [p for group in part.param_groups for p in group["params"]]
    for gradient in (p.grad for p in parameters if p.grad is not None):
        if scale is not None:
            gradient.div_(scale.to(gradient.device))
        if found_inf is not None:
            gradient.masked_fill_(found_inf.to(gradient.device) > 0, 0)
