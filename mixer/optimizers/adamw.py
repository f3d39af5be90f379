"""AdamW, and with it the update of the lags that mixing weights share (shared_lags.py)."""

from collections.abc import Callable, Iterable

import torch

from mixer.optimizers.shared_lags import update_lags

LAG_MOMENTS = ("lag_exp_avg", "lag_exp_avg_sq")


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW, fused, whose groups may have `shared_lags`, a factor of their learning
    rate.

    The parameters of such a group are mixing weights (heads, taps, context, context). After AdamW's
    own update they get the AdamW update of their lags, at `shared_lags` times the group's learning
    rate; the lags' moments are kept beside AdamW's. Without weight decay that is the training of V
    and a with W = V + toeplitz(a), to the last rounding error; weight decay acts on W, where the
    reparametrised model would decay V alone.

    A step whose `found_inf` (set by GradScaler and by the guard) is 1 changes nothing.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        compile: Callable[[Callable], Callable] = lambda function: function,
    ):
        # Fused on every device: it is the implementation that skips a step on the device.
        super().__init__(params, lr=lr, betas=betas, eps=eps, fused=True)
        self.update_lags = compile(update_lags)

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        super().step()
        for group in self.param_groups:
            if group.get("shared_lags"):
                self._step_lags(group)

    def _step_lags(self, group: dict) -> None:
        weights = [weight for weight in group["params"] if weight.grad is not None]
        if not weights:
            return
        states = [self.state[weight] for weight in weights]
        for weight, state in zip(weights, states, strict=True):
            if LAG_MOMENTS[0] not in state:
                state |= {key: torch.zeros_like(weight[..., 0]) for key in LAG_MOMENTS}
        device = weights[0].device
        found_inf = getattr(self, "found_inf", None)
        self.update_lags(
            weights,
            [weight.grad for weight in weights],
            *([state[key] for state in states] for key in LAG_MOMENTS),
            [state["step"] for state in states],
            # A tensor: a compiled function would be compiled anew for another number.
            torch.full((), group["lr"] * group["shared_lags"], device=device, dtype=torch.float64),
            group["betas"],
            group["eps"],
            torch.zeros((), device=device) if found_inf is None else found_inf.to(device),
        )
