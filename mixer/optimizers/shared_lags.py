"""AdamW for mixing weights that also learn as their lags.

A mixing weight W[i, j] gets a gradient from one place of each sample, where a linear layer's weight
gets one from every token. A lag's weight a[i - j], shared by all places, hears from all of them.
Training V and a with W = V + toeplitz(a) is the same functions, learned faster. V and a act through
W alone, so only the optimizer needs to know: the gradient of a is the sum of W's gradient along
each diagonal, and an update of a is added to W along the diagonals. `a` itself is never kept.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mixer.ops.lags import diagonal_sums, toeplitz

MOMENTS = ("lag_exp_avg", "lag_exp_avg_sq")


class SharedLagsAdamW(torch.optim.AdamW):
    """torch.optim.AdamW(fused=True), where groups may have `shared_lags`, a factor of their
    learning rate: their parameters are mixing weights (heads, taps, context, context), not sharded,
    and get the AdamW update of their lags, too.

    Without weight decay that is the training of V and a, to the last rounding error. Weight decay
    acts on W, where the reparametrised model would decay V alone, and clipping sees the gradient of
    W alone.
    """

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        # before AdamW's own step, which divides the gradients in place
        sums = {
            weight: diagonal_sums(weight.grad)
            for group in self.param_groups
            for weight in group["params"]
            if group.get("shared_lags") and weight.grad is not None
        }
        super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                if weight in sums:
                    self._move(weight, sums[weight], group)

    def _move(self, weight: nn.Parameter, gradient: Tensor, group: dict) -> None:
        """Adds AdamW's update (arXiv 1711.05101) of the lags to a weight, or nothing where the step
        is skipped. gradient: of the lags, (heads, taps, context).
        """
        state, (beta1, beta2) = self.state[weight], group["betas"]
        for name in MOMENTS:
            state.setdefault(name, torch.zeros_like(gradient))
        first, second = (state[name] for name in MOMENTS)
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        gradient = gradient if scale is None else gradient / scale
        live = torch.ones_like(first, dtype=bool) if found_inf is None else found_inf == 0
        first.copy_(torch.where(live, torch.lerp(first, gradient, 1 - beta1), first))
        new_second = beta2 * second + (1 - beta2) * gradient.square()
        second.copy_(torch.where(live, new_second, second))
        step = state["step"].double()
        root = (1 - beta2**step).sqrt().to(first.dtype)
        rate = (group["lr"] * group["shared_lags"] / (1 - beta1**step)).to(first.dtype)
        change = rate * first / (second.sqrt() / root + group["eps"])
        weight -= toeplitz(torch.where(live, change, 0), weight.shape[-1])
