"""AdamW with weight decay where it belongs, and the learning rate as a function of the step."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from mixer.common.options import option


@dataclass
class OptimConfig:
    lr: float = option(5e-4, "peak learning rate", at_least=0)
    schedule: str = option(
        "cosine", "learning rate after the warm-up", choices=("cosine", "linear", "constant")
    )
    warmup_steps: int = option(500, "steps of linear warm-up", at_least=0)
    min_lr_ratio: float = option(
        0.0, "final learning rate as a share of lr (cosine, linear)", at_least=0, at_most=1
    )
    weight_decay: float = option(
        0.01, "AdamW's; on weights alone, not on biases and norms", at_least=0
    )
    beta1: float = option(0.9, "AdamW's decay of the first moment", at_least=0, below=1)
    beta2: float = option(0.999, "AdamW's decay of the second moment", at_least=0, below=1)
    eps: float = option(1e-8, "AdamW's epsilon", above=0)


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW in two groups: matrices decay; biases and norms do not. (A mixing bias (heads, context)
    is no matrix.)
    """
    vectors = {
        id(parameter)
        for name, parameter in model.named_parameters()
        if name.endswith("bias") or parameter.ndim == 1
    }
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {
            "params": [p for p in parameters if id(p) not in vectors],
            "weight_decay": config.weight_decay,
        },
        {"params": [p for p in parameters if id(p) in vectors], "weight_decay": 0.0},
    ]
    # Fused everywhere: it is the one that can skip a step on the device (see guard.py).
    return torch.optim.AdamW(
        groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
    )


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """The rate of step `step` (0 is the first) of `steps`: no state, so resuming cannot go
    wrong.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)  # 0 .. 1
    decay = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
    }[config.schedule]
    if config.schedule == "constant":
        return config.lr
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * decay)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
