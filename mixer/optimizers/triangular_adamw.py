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

from collections.abc import Callable, Iterable

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
        self.lag_changes, self.update_rows = compile(lag_changes), compile(update_rows)

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            parts = row_parts(weights[0].shape[-1]) if weights else []
            size = max(1, MATRICES // max(1, len(parts)))
            for start in range(0, len(weights), size):
                self._update(weights[start : start + size], parts, group)

    def _update(
        self, weights: list[nn.Parameter], parts: list[tuple[int, int]], group: dict
    ) -> None:
        states = [self._state(weight, group) for weight in weights]
        moments = [[state[key] for state in states] for key in MOMENTS]
        gradients = [weight.grad for weight in weights]
        settings = (self._numbers(states, group), group["betas"], group["eps"])
        changes = None
        if share := group["shared_lags"]:
            lag_moments = [[state[key] for state in states] for key in LAG_MOMENTS]
            changes = self.lag_changes(gradients, *lag_moments, share, *settings)
        for first, end in parts:
            # The compiler would write the whole matrix for a change of its part, so it gets parts.
            rows = [
                [tensor[..., first:end, :end] for tensor in tensors]
                for tensors in (weights, gradients, *moments)
            ]
            self.update_rows(*rows, changes, *settings)

    def _numbers(self, states: list[dict[str, Tensor]], group: dict) -> Tensor:
        """The `numbers` of `change`, and the learning rate times the weight decay: (weights, 5).
        Counts the step.

        A tensor: compiled functions would be compiled anew for other numbers. A row for each
        weight: what reads the same memory would be compiled into one large kernel.
        """
        steps = [state["step"] for state in states]
        skip, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        zero = torch.zeros((), device=steps[0].device)
        skip = zero if skip is None else skip.to(zero)
        scale = zero + 1 if scale is None else scale.to(zero)
        torch._foreach_add_(steps, [1 - skip] * len(steps))  # of one tensor it waits for the GPU

        step, (beta1, beta2) = torch.stack(steps).double(), group["betas"]
        rate, root = group["lr"] / (1 - beta1**step), (1 - beta2**step).sqrt()
        skip, scale = skip.double().expand_as(step), scale.double().expand_as(step)
        decay = group["lr"] * group["weight_decay"] * (1 - skip)
        return torch.stack([rate, root, skip, scale, decay], 1).to(states[0][MOMENTS[0]].dtype)

    def _state(self, weight: nn.Parameter, group: dict) -> dict[str, Tensor]:
        state = self.state[weight]
        if "step" not in state:
            state["step"] = torch.zeros((), device=weight.device)
            state |= {key: torch.zeros_like(weight) for key in MOMENTS}
        if group["shared_lags"] and LAG_MOMENTS[0] not in state:
            state |= {key: torch.zeros_like(weight[..., 0]) for key in LAG_MOMENTS}
        return state


# Lists hold a tensor for each weight; a weight is (heads, taps, context, context).


def change(
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    numbers: Tensor,
    betas: tuple[float, float],
    eps: float,
) -> Tensor:
    """AdamW's update without weight decay (arXiv 1711.05101): what is to be added to a parameter
    with this gradient and these moments, which are updated. All have one shape.

    numbers: the learning rate divided by 1 - beta1^step, the root of 1 - beta2^step, 1 where
    nothing is to be changed (a gradient that is not finite does no harm then), and what the
    gradient is divided by.
    """
    (rate, root, skip, scale), (beta1, beta2) = numbers[:4].unbind(), betas
    gradient, skipped = gradient / scale, skip > 0
    new_first = torch.lerp(first, gradient, 1 - beta1)
    new_second = beta2 * second + (1 - beta2) * gradient.square()
    found = -rate * new_first / (new_second.sqrt() / root + eps)
    first.copy_(torch.where(skipped, first, new_first))
    second.copy_(torch.where(skipped, second, new_second))
    return torch.where(skipped, 0, found)


def lag_changes(
    gradients: list[Tensor],
    first_moments: list[Tensor],
    second_moments: list[Tensor],
    share: float,
    numbers: Tensor,
    betas: tuple[float, float],
    eps: float,
) -> list[Tensor]:
    """AdamW's update of the lags, `share` as fast as that of the weights with these gradients: what
    is to be added to the weights along their diagonals, (heads, taps, context) as the moments.
    """
    sums = [diagonal_sums(gradient) for gradient in gradients]
    tensors = zip(sums, first_moments, second_moments, numbers.unbind(), strict=True)
    return [share * change(*one, betas, eps) for one in tensors]


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
    """AdamW's update of a part of the rows of all weights, in place: (heads, taps, rows, columns)
    each, where the last column is that of the last row's diagonal.

    changes: by the lag, to be added along the diagonals, (heads, taps, context) each, or None.
    """
    tensors = zip(weights, gradients, first_moments, second_moments, strict=True)
    for place, (weight, *others) in enumerate(tensors):
        new = weight - numbers[place, 4] * weight + change(*others, numbers[place], betas, eps)
        if changes is not None:
            new = new + toeplitz_rows(changes[place], *weight.shape[-2:])
        weight.copy_(new)
