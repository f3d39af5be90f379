"""Several optimizers of one model that behave as one, and their steps as one CUDA graph."""

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
        graph: whether steps are replays of a CUDA graph (see StepGraph).
    """

    _step_supports_amp_scaling = True

    def __init__(self, parts: Sequence[torch.optim.Optimizer], graph: bool = False):
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = list(parts)
        self.group_counts = [len(part.param_groups) for part in parts]
        self.graph = StepGraph(self._update) if graph else None
        self._share()

    def __setstate__(self, state: dict) -> None:
        """Loading a state, which accelerate does when it prepares an optimizer, makes new
        objects.
        """
        super().__setstate__(state)
        self.graph = self.graph and StepGraph(self._update)
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
        if self.graph is None:
            self._update(found_inf, scale)
        else:
            self.graph.step(self.param_groups, found_inf, scale)

    def _update(self, found_inf: Tensor | None, scale: Tensor | None) -> None:
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


class StepGraph:
    """The steps of an optimizer as replays of a CUDA graph: one launch in place of hundreds.

    A graph reads the same memory at each replay. So the gradients, learning rates, `found_inf` and
    `grad_scale` of a step are copied there first: one more copy of all gradients in memory. The
    first step runs as it is, since it makes the optimizer's state and compiles functions. It has
    the same inputs, so that it rounds as a replay does. The second step records the graph.

    Args:
        update: the step of `found_inf` and `grad_scale`.
    """

    def __init__(self, update: Callable[[Tensor, Tensor], None]):
        self.update = update
        self.gradients: list[Tensor] = []
        self.graph: torch.cuda.CUDAGraph | None = None

    def step(self, groups: list[dict], found_inf: Tensor | None, scale: Tensor | None) -> None:
        """A step of parameters with gradients, which must be the same at every step."""
        weights = [w for group in groups for w in group["params"] if w.grad is not None]
        gradients = [weight.grad for weight in weights]
        is_first = not self.gradients
        if is_first:
            self.gradients = [torch.empty_like(gradient) for gradient in gradients]
            self.numbers = torch.zeros(2 + len(groups), device=gradients[0].device)
        rates = [group["lr"] for group in groups]
        skip, scale = 0.0 if found_inf is None else found_inf, 1.0 if scale is None else scale
        torch._foreach_copy_(self.gradients, gradients)
        for place, number in zip(self.numbers.unbind(), (skip, scale, *rates), strict=True):
            place.copy_(number) if isinstance(number, Tensor) else place.fill_(number)
        if self.graph is None:
            self._run(weights, groups, is_first)
        if self.graph is not None:
            self.graph.replay()

    def _run(self, weights: list[Tensor], groups: list[dict], is_first: bool) -> None:
        """The update with the graph's inputs: runs the first one, and records the next."""
        found_inf, scale, *rates = self.numbers.unbind()
        for weight, gradient in zip(weights, self.gradients, strict=True):
            weight.grad = gradient
        before = [dict(group) for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
            if "capturable" in group:  # torch's optimizers ask for it, and warn in other steps
                group["capturable"] = not is_first
        if is_first:
            self.update(found_inf, scale)
        else:
            graph = torch.cuda.CUDAGraph()
            # Other threads copy a checkpoint or the next batch at the same time.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.update(found_inf, scale)
            self.graph = graph
        for group, earlier in zip(groups, before, strict=True):
            group.update(earlier)
