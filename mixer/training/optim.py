"""AdamW with weight decay where it belongs, and the learning rate as a function of the step."""

import math
from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass
class OptimConfig:
    lr: float = field(default=5e-4, metadata={"help": "peak learning rate"})
    schedule: str = field(
        default="cosine", metadata={"help": "after the warm-up: cosine, linear or constant"}
    )
    warmup_steps: int = field(default=500, metadata={"help": "steps of linear warm-up"})
    min_lr_ratio: float = field(
        default=0.0, metadata={"help": "final learning rate as a share of lr (cosine, linear)"}
    )
    weight_decay: float = field(
        default=0.01, metadata={"help": "AdamW's; on weights alone, not on biases and norms"}
    )
    beta1: float = field(default=0.9, metadata={"help": "AdamW's decay of the first moment"})
    beta2: float = field(default=0.999, metadata={"help": "AdamW's decay of the second moment"})
    eps: float = field(default=1e-8, metadata={"help": "AdamW's epsilon"})


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
