"""Several optimizers of one model that behave as one."""

from collections.abc import Callable, Sequence

import torch


class Together(torch.optim.Optimizer):
    """One optimizer of several, each with parameters of its own.

    It has the groups of all of them and one state for all, so that accelerate, GradScaler and
    checkpoints meet a single optimizer. A step whose `found_inf` (set by GradScaler and by the
    guard) is 1 must change nothing. Parts that know `found_inf` (`_step_supports_amp_scaling`) are
    given it; the gradients of others are set to zero on the device before they see them, so that
    NaN never reaches a weight.
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
        found_inf = getattr(self, "found_inf", None)
        for part in self.parts:
            if getattr(part, "_step_supports_amp_scaling", False):
                part.grad_scale, part.found_inf = getattr(self, "grad_scale", None), found_inf
            elif found_inf is not None:
                _zero_where(found_inf, part)
            part.step()


def _zero_where(found_inf: torch.Tensor, part: torch.optim.Optimizer) -> None:
    for group in part.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                bad = found_inf.to(parameter.grad.device) > 0
                parameter.grad.copy_(torch.where(bad, 0, parameter.grad))
