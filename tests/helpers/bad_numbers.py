"""NaN and infinity put into a run, and fp16's loss scale on a CPU. Call these in the process that
trains, before it does.
"""

import torch

from mixer.objectives import language
from mixer.training import loop
from mixer.training.optim import ChainedOptimizer


def scaled_in_fp32(init_scale: float = 2.0**127) -> None:
    """fp16's dynamic loss scale around fp32 arithmetic, from a scale that overflows even that: a
    CPU has no fp16 autocast.
    """
    real = loop.build_accelerator

    def build(precision):
        accelerator = real(precision)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=5)
        # accelerate does this itself where mixed_precision is fp16
        accelerator.unscale_gradients = lambda: [
            accelerator.scaler.unscale_(wrapper.optimizer) for wrapper in accelerator._optimizers
        ]
        return accelerator

    real_nats = language.token_nats
    loop.build_accelerator = build
    language.token_nats = lambda *arguments: 256 * real_nats(*arguments)


def plant(target: str, step: int, bad: float) -> None:
    """Step `step` will leave `bad` in one number of a "weight" or "moment", take it from one number
    of a "gradient" that the guard has seen before, or have it as "loss".
    """
    real_step = ChainedOptimizer.step
    real_nats = language.token_nats
    steps_done = -1  # of a run: the first step only creates the state of the optimizer

    def planted_step(optimizer, closure=None):
        nonlocal steps_done
        steps_done += 1
        parameter = optimizer.param_groups[-1]["params"][-1]
        if steps_done == step and target == "gradient":
            parameter.grad.view(-1)[-1] = bad
        real_step(optimizer, closure)
        if steps_done == step and target == "weight":
            parameter.data.view(-1)[-1] = bad
        if steps_done == step and target == "moment":
            moments = [value for value in optimizer.state[parameter].values() if value.ndim]
            moments[-1].view(-1)[-1] = bad

    def planted_nats(logits, targets):
        is_bad = target == "loss" and torch.is_grad_enabled() and steps_done == step - 1
        return real_nats(logits, targets) * (bad if is_bad else 1.0)

    language.token_nats = planted_nats
    ChainedOptimizer.step = planted_step
