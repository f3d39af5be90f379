"""AdamW for mixing weights: of their triangles alone, and in the same pass of their shared lags.

The upper triangle of a mixing weight is dead. An update of the whole square would read and write 28
bytes for each of its elements, half of them for nothing. Here a part of the rows at a time is
updated, up to its last live column: of 8192 rows, 0.56 of the square.

Shared lags: a mixing weight W[i, j] gets a gradient from one place of each sample, where a linear
layer's weight gets one from every token. A lag's weight a[i - j], shared by all places, hears from
all of them. Training V and a with W = V + toeplitz(a) is the same functions, learned faster. V and
a act through W alone, so only the optimizer needs to know: the gradient of a is the sum of W's
gradient along each diagonal, and an update of a is added to W along the diagonals. `a` itself is
never kept. The order of summation is fixed.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from mixer.ops.lags import diagonal_sums, row_parts, toeplitz_rows

# Parts of matrices that the compiled functions are made for: it bounds the time to compile them.
MATRICES = 32

MOMENTS, LAG_MOMENTS = ("exp_avg", "exp_avg_sq"), ("lag_exp_avg", "lag_exp_avg_sq")


class TriangularAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW on and below the diagonal of mixing weights, to the last rounding error.
    Its state has the same names, so that either can go on from the other's.

    Groups with `shared_lags`, a factor of their learning rate, get the AdamW update of their lags
    too, whose moments are kept beside AdamW's. Without weight decay that is the training of V and a
    with W = V + toeplitz(a), to the last rounding error; weight decay acts on W, where the
    reparametrised model would decay V alone. Clipping sees the gradient of W alone, where that
    model's norm would count the gradient of a, too, and so clip more.

    Args:
        params: groups of mixing weights (heads, taps, context, context), of one context and not
            sharded, whose gradients are zero above the diagonal.
        compile: what makes elementwise functions faster, such as torch.compile.

    Gradients are divided by `grad_scale`, where it is set. A step whose `found_inf` (set by
    GradScaler and by the guard) is 1 changes nothing.
    """

    _step_supports_amp_scaling = True  # see grad_scale and found_inf

    def __init__(
        self,
        params: Iterable,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        compile: Callable[[Callable], Callable] = lambda function: function,
    ):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "shared_lags": 0.0}
        super().__init__(params, defaults)
        self.gradient_sums, self.lag_changes = compile(gradient_sums), compile(lag_changes)
        self.update_rows = compile(update_rows)
        self.sums: dict[nn.Parameter, Tensor] = {}  # see gradient_norm

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """The norm of all gradients, from the triangles alone. The sums along diagonals, which come
        from the same reading of memory, are kept for the next step, until which the gradients must
        not change.
        """
        squares = []
        for weights, _, _ in self._chunks():
            sums, found = self.gradient_sums([weight.grad for weight in weights])
            self.sums |= zip(weights, sums, strict=True)
            squares += found
        return torch.nn.utils.get_total_norm(squares, norm_type=1).sqrt()

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        for weights, parts, group in self._chunks():
            self._update(weights, parts, group)
        self.sums = {}

    def _chunks(self) -> Iterator[tuple[list[nn.Parameter], list[tuple[int, int]], dict]]:
        """Weights that are worked on together, the parts of their rows, and their group."""
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            parts = row_parts(weights[0].shape[-1]) if weights else []
            size = max(1, MATRICES // max(1, len(parts)))
            for start in range(0, len(weights), size):
                yield weights[start : start + size], parts, group

    def _update(
        self, weights: list[nn.Parameter], parts: list[tuple[int, int]], group: dict
    ) -> None:
        states = [self._state(weight, group) for weight in weights]
        moments = [[state[key] for state in states] for key in MOMENTS]
        gradients = [weight.grad for weight in weights]
        numbers, lag_numbers = self._numbers(weights, group)
        changes = None
        if group["shared_lags"]:
            known = all(weight in self.sums for weight in weights)
            sums = [self.sums[w] for w in weights] if known else self.gradient_sums(gradients)[0]
            lag_moments = [[state[key] for state in states] for key in LAG_MOMENTS]
            settings = (lag_numbers, group["betas"], group["eps"])
            changes = self.lag_changes(sums, *lag_moments, *settings)
        for first, end in parts:
            # The compiler would write the whole matrix for a change of its part, so it gets parts.
            rows = [
                [tensor[..., first:end, :end] for tensor in tensors]
                for tensors in (weights, gradients, *moments)
            ]
            self.update_rows(*rows, changes, numbers, group["betas"], group["eps"])

    def _numbers(self, weights: list[nn.Parameter], group: dict) -> tuple[Tensor, Tensor]:
        """The `numbers` of `update_rows` and of `lag_changes`, (weights, 5) each; counts the step.

        A tensor: compiled functions would be compiled anew for other numbers. A row for each
        weight: what reads the same memory would be compiled into one large kernel.
        """
        steps = [self.state[weight]["step"] for weight in weights]
        skip, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        zero = torch.zeros((), device=weights[0].device)
        skip = zero if skip is None else skip.to(zero)
        scale = zero + 1 if scale is None else scale.to(zero)
        torch._foreach_add_(steps, [1 - skip] * len(steps))  # of one tensor it waits for the GPU

        step, (beta1, beta2) = torch.stack(steps).double(), group["betas"]
        rate = group["lr"] / (1 - beta1**step)
        root = (1 - beta2**step).sqrt()
        decay = torch.full_like(step, group["lr"] * group["weight_decay"])
        rest = (root, decay, skip.expand_as(step), scale.expand_as(step))
        rates = (rate, rate * group["shared_lags"])
        return tuple(torch.stack([r, *rest], 1).to(weights[0].dtype) for r in rates)

    def _state(self, weight: nn.Parameter, group: dict) -> dict[str, Tensor]:
        state = self.state[weight]
        if "step" not in state:
            state["step"] = torch.zeros((), device=weight.device)
            state |= {key: torch.zeros_like(weight) for key in MOMENTS}
        if group["shared_lags"] and LAG_MOMENTS[0] not in state:
            state |= {key: torch.zeros_like(weight[..., 0]) for key in LAG_MOMENTS}
        return state


def gradient_sums(gradients: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """What one reading of the gradients of mixing weights, (heads, taps, context, context) each,
    gives: their sums along the diagonals, (heads, taps, context) each, and tensors whose numbers
    add up to the sum of all squares.
    """
    found = [diagonal_sums(gradient) for gradient in gradients]
    return [sums for sums, _ in found], [part for _, parts in found for part in parts]


def lag_changes(
    sums: list[Tensor],
    first_moments: list[Tensor],
    second_moments: list[Tensor],
    numbers: Tensor,
    betas: tuple[float, float],
    eps: float,
) -> list[Tensor]:
    """AdamW's update of the lags (arXiv 1711.05101, without weight decay): what is to be added to
    the weights along their diagonals, (heads, taps, context) each.

    Args:
        sums: of the weights' gradients along the diagonals, (heads, taps, context) each.
        first_moments, second_moments: of the lags' gradients, likewise; updated.
        numbers: as those of `update_rows`, with the lags' learning rate.
    """
    beta1, beta2 = betas
    changes = []
    tensors = zip(sums, first_moments, second_moments, strict=True)
    for place, (gradient, first, second) in enumerate(tensors):
        rate, root, _, skip, scale = numbers[place].unbind()
        gradient, skipped = gradient / scale, skip > 0
        first.copy_(torch.where(skipped, first, torch.lerp(first, gradient, 1 - beta1)))
        second.copy_(torch.where(skipped, second, beta2 * second + (1 - beta2) * gradient.square()))
        change = -rate * first / (second.sqrt() / root + eps)
        changes.append(torch.where(skipped, 0, change))
    return changes


def update_rows(
    weights: list[Tensor],
    gradients: list[Tensor],
    first_moments: list[Tensor],
    second_moments: list[Tensor],
    changes: list[Tensor] | None,
    numbers: Tensor,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """AdamW's update (arXiv 1711.05101) of a part of the rows of all weights, in place.

    Args:
        weights, gradients, first_moments, second_moments: (heads, taps, rows, columns) each, where
            the last column is that of the last row's diagonal.
        changes: by the lag, to be added along the diagonals, (heads, taps, context) each, or None.
        numbers: for each weight the learning rate divided by 1 - beta1^step, the root of 1 -
            beta2^step, the learning rate times the weight decay, 1 where nothing is to be changed
            (gradients that are not finite do no harm then), and what gradients are divided by.
    """
    beta1, beta2 = betas
    tensors = zip(weights, gradients, first_moments, second_moments, strict=True)
    for place, (weight, gradient, first, second) in enumerate(tensors):
        rate, root, decay, skip, scale = numbers[place].unbind()
        gradient = gradient / scale
        new_first = torch.lerp(first, gradient, 1 - beta1)
        new_second = beta2 * second + (1 - beta2) * gradient.square()
        new = weight - decay * weight - rate * new_first / (new_second.sqrt() / root + eps)
        if changes is not None:
            new = new + toeplitz_rows(changes[place], *weight.shape[-2:])
        weight.copy_(torch.where(skip > 0, weight, new))
        first.copy_(torch.where(skip > 0, first, new_first))
        second.copy_(torch.where(skip > 0, second, new_second))
