"""Which parameter is trained by which optimizer, several optimizers as one, the learning rate as a
function of the step, and what happens to gradients before a step: their norm, clipping, and a
guard against non-finite ones.

To add an optimizer: a function like `muon` below, and its name in OPTIMIZERS of config.py. It must
be able to skip a step: see ChainedOptimizer.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D  # a linear layer, of weights (columns, rows)

from mixer.common.errors import NotFinite
from mixer.common.hardware import lacks_bf16
from mixer.distributed.world import Group
from mixer.training.config import LAGS_LR, LONG, LONG_LAGS_LR, OPTIMIZERS, OptimConfig
from mixer.training.muon import Muon

ROUTERS = ("router", "gate")  # names of linear layers that choose experts
MOST_SKIPPED = 50  # so many skipped steps in a row end a run
Compile = Callable[[Callable], Callable] | None  # makes functions of whole parameters faster


@dataclass
class Kinds:
    """The trainable parameters of a model, by what they are."""

    matrices: list[nn.Parameter] = field(default_factory=list)  # of linear layers, see kinds_of
    # The rows of each layer where several stand one below another in a matrix, as queries, keys and
    # values do.
    rows: dict[nn.Parameter, tuple[int, ...]] = field(default_factory=dict)
    mixing: list[nn.Parameter] = field(default_factory=list)  # (heads, taps, context, context)
    lags: list[nn.Parameter] = field(default_factory=list)  # (heads, taps, context)
    # Of tokens, input and output; and of transformers, routers and experts (experts, rows, columns)
    embeddings: list[nn.Parameter] = field(default_factory=list)
    vectors: list[nn.Parameter] = field(default_factory=list)  # biases, norms, short convolutions


def kinds_of(model: nn.Module) -> Kinds:
    """Sorts a model's parameters. A module with a method `kind_of(name)` says what its own are; a
    mixing bias (heads, context) counts as a vector. Of the others, by this order:

    - vectors are biases, what has one dimension or one row, convolutions of each channel by itself
      (channels, 1, taps), and the decay rates of recurrences;
    - matrices are the weights of linear layers, but for the output layer and routers of experts;
    - all else counts as embeddings.
    """
    get_output = getattr(model, "get_output_embeddings", None)
    output = get_output() if get_output else None
    kinds = Kinds()
    seen = set()
    for path, module in model.named_modules():
        is_linear = isinstance(module, (nn.Linear, Conv1D))
        is_router = path.rpartition(".")[2] in ROUTERS
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or parameter in seen:  # tied weights have two owners
                continue
            seen.add(parameter)
            if kind_of := getattr(module, "kind_of", None):
                field_name = kind_of(name)
            elif is_vector(name, parameter, module):
                field_name = "vectors"
            elif is_linear and module is not output and not is_router:
                field_name = "matrices"
            else:
                field_name = "embeddings"
            getattr(kinds, field_name).append(parameter)
            rows = getattr(module, "projection_sizes", ())
            if field_name == "matrices" and len(rows) > 1:
                kinds.rows[parameter] = rows
    return kinds


def is_vector(name: str, parameter: Tensor, module: nn.Module) -> bool:
    is_row = parameter.numel() == max(parameter.shape, default=1)
    is_convolution = isinstance(module, nn.Conv1d)
    return name.endswith("bias") or name == "A_log" or is_row or is_convolution


class ChainedOptimizer(torch.optim.Optimizer):
    """One optimizer of several, each with parameters of its own.

    It has the groups of all of them and one state for all, so that accelerate, GradScaler and
    checkpoints meet a single optimizer. A step whose `found_inf` (set by GradScaler and by the
    guard) is 1 must change nothing, and gradients are to be divided by `grad_scale` (set by
    clipping). Each optimizer does both itself, as torch's do that are fused, and says so by
    `_step_supports_amp_scaling`. Raises TypeError for one that does not: to give it gradients of
    zeros instead would still change its moments, and by these the weights.
    """

    _step_supports_amp_scaling = True

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        for optimizer in optimizers:
            if not getattr(optimizer, "_step_supports_amp_scaling", False):
                name = type(optimizer).__name__
                raise TypeError(
                    f"{name} cannot skip a step on the device; allowed: torch's optimizers that "
                    "take fused=True, with it, and those that read found_inf and grad_scale as "
                    "Muon does (skip_and_scale)"
                )
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        super().__init__(groups, {})
        self.optimizers = list(optimizers)
        for optimizer in self.optimizers:
            self.state.update(optimizer.state)
        self._share()

    def __setstate__(self, state: dict) -> None:
        """Loading a state, as accelerate does to prepare an optimizer, makes new objects."""
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Gives the optimizers the chain's groups and state: the same objects, not copies."""
        groups = iter(self.param_groups)
        for optimizer in self.optimizers:
            optimizer.param_groups = [next(groups) for _ in optimizer.param_groups]
            optimizer.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        for optimizer in self.optimizers:
            optimizer.found_inf = getattr(self, "found_inf", None)  # pyright: ignore[reportAttributeAccessIssue]
            optimizer.grad_scale = getattr(self, "grad_scale", None)  # pyright: ignore[reportAttributeAccessIssue]
            optimizer.step()


def gradients_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    weights = (weight for group in optimizer.param_groups for weight in group["params"])
    return [weight.grad for weight in weights if weight.grad is not None]


def build_optimizer(
    model: nn.Module, config: OptimConfig, group: Group = None, compile: Compile = None
) -> ChainedOptimizer:
    """The optimizer of a run.

    Args:
        model: with its parameters on their device.
        group: of the processes that hold the same model and may share work.
        compile: such as torch.compile; None where there is no compiler, or parameters are going to
            be sharded.
    """
    build = resolve_name(OPTIMIZERS[config.name])
    return ChainedOptimizer(build(kinds_of(model), config, group, compile))


def adamw(
    kinds: Kinds, config: OptimConfig, group: Group, compile: Compile
) -> list[torch.optim.Optimizer]:
    """AdamW for everything; weights decay, biases, norms and lags do not."""
    decay = config.weight_decay
    lags_lr = config.lags_lr
    if lags_lr is None:
        context = max((weight.shape[-1] for weight in kinds.lags), default=0)
        lags_lr = LAGS_LR if context <= LONG else LONG_LAGS_LR
    groups = [
        {"params": kinds.matrices, "weight_decay": decay, "lr_factor": config.matrices_lr},
        {"params": kinds.lags, "weight_decay": 0.0, "lr_factor": lags_lr},
        {"params": kinds.embeddings, "weight_decay": decay},
        {"params": kinds.vectors, "weight_decay": 0.0, "lr_factor": config.vectors_lr},
        {"params": kinds.mixing, "weight_decay": decay, "lr_factor": config.mixing_lr},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        return []
    betas = (config.beta1, config.beta2)
    # Fused on every device: it is the implementation that skips a step on the device.
    return [torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)]


def muon(
    kinds: Kinds, config: OptimConfig, group: Group, compile: Compile
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of linear layers, AdamW for the rest."""
    optimizers = adamw(replace(kinds, matrices=[]), config, group, compile)
    if kinds.matrices:
        matrices = {"params": kinds.matrices, "lr_factor": config.matrices_lr}
        optimizers.append(
            Muon(
                [matrices],
                lr=config.lr,
                weight_decay=config.weight_decay,
                momentum=config.momentum,
                rows=kinds.rows,
                group=group,
                compile=compile,
            )
        )
    return optimizers


def begin_state(optimizer: torch.optim.Optimizer) -> None:
    """Creates the state that the optimizer's first step would create, with a step that is skipped
    on the device (`found_inf` is 1) and so changes no weight. It has that of parameters without a
    gradient, too, as of experts that no token goes to. Muon has its state already.
    """
    parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
    for weight in parameters:
        # With a CUDA graph, it has that of the graph, which stays where it is.
        if weight.grad is None and weight not in optimizer.state:
            weight.grad = torch.zeros_like(weight)
    optimizer.found_inf = torch.ones((), device=parameters[0].device)  # pyright: ignore[reportAttributeAccessIssue]
    optimizer.step()
    optimizer.found_inf = None  # pyright: ignore[reportAttributeAccessIssue]
    optimizer.zero_grad()


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """The rate of step `step` (0 is the first) of `steps`."""
    warmup_steps = min(config.warmup_steps, steps)
    if step < warmup_steps:
        return config.lr * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)  # 0 .. 1
    if config.schedule == "constant":
        return config.lr
    is_linear = config.schedule == "linear"
    decay = 1.0 - progress if is_linear else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * decay)


def jump_of_rate(config: OptimConfig, steps: int, changed: dict[str, Any], step: int) -> str:
    """Says that the learning rate rises after `step`, where settings were others before: their old
    values, by section.key. "" if it does not.
    """
    options = {}
    for key, value in changed.items():
        section, _, name = key.partition(".")
        if section == "optim":
            options[name] = value
    old_steps = changed.get("train.steps", steps)
    old_rate = learning_rate(replace(config, **options), min(step, old_steps - 1), old_steps)
    new_rate = learning_rate(config, step, steps)
    if new_rate <= 1.1 * old_rate:
        return ""
    return (
        f"the learning rate jumps from {old_rate:.3g} to {new_rate:.3g}: the loss may rise. To "
        f"continue at the old rate set optim.schedule=constant optim.lr={old_rate:.3g} "
        "optim.warmup_steps=0; for one schedule over all steps, train again under another name"
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Each group gets the rate times its own `lr_factor`, where it has one."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_factor", 1.0)


# ------------------------------------------------------------------------- before a step


def gradient_norm(optimizer: torch.optim.Optimizer) -> Tensor:
    """The norm of all gradients, also where they are sharded over the processes."""
    norm = torch.nn.utils.get_total_norm(gradients_of(optimizer))
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def clip(optimizer: torch.optim.Optimizer, norm: Tensor, limit: float) -> None:
    """Makes the optimizer's next step use gradients whose norm is at most `limit`; 0 is no limit.

    The optimizer divides the gradients as it reads them, by what torch's optimizers call
    `grad_scale`. torch.nn.utils.clip_grad_norm_ would read and write all of them once more.
    """
    scale = ((norm + 1e-6) / limit).clamp(min=1.0) if limit else None
    optimizer.grad_scale = scale  # pyright: ignore[reportAttributeAccessIssue]


class Guard:
    """Skips each optimizer step whose gradient is not finite, without waiting for the device: the
    optimizer leaves everything as it is where its `found_inf` is 1. With fp16 GradScaler does that
    (`scaled`). With `stop_at_first`, all steps after the first such one are skipped too. `look` is
    the one place that waits, and belongs where the loop waits anyway.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scaled: bool,
        stop_at_first: bool,
        device: torch.device,
    ):
        self.optimizer = optimizer
        self.scaled = scaled
        self.stop_at_first = stop_at_first and not scaled  # fp16 overflows now and then
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)  # since the last look
        self.in_a_row = torch.zeros_like(self.skipped)  # up to the last step

    def before_step(self, gradient_norm: Tensor) -> None:
        """To be called with the gradient's norm before each step of the optimizer."""
        bad = ~torch.isfinite(gradient_norm)
        if self.stop_at_first:
            bad = bad | (self.in_a_row > 0)
        if not self.scaled:
            self.optimizer.found_inf = bad.float()  # pyright: ignore[reportAttributeAccessIssue]
        self.skipped += bad
        self.in_a_row = torch.where(bad, self.in_a_row + 1, 0)

    def look(self, step: int) -> int:
        """How many steps were skipped since the last look, when `step` is done. Waits for the
        device. Raises NotFinite where the skipped steps must end the run.
        """
        skipped, in_a_row = torch.stack([self.skipped, self.in_a_row]).tolist()
        self.skipped.zero_()
        allowed = 1 if self.stop_at_first else MOST_SKIPPED
        if in_a_row >= allowed:
            advice = "lower optim.lr or raise optim.warmup_steps"
            problem = f"the gradient of step {step - in_a_row + 1} is not finite"
            if self.stop_at_first:
                advice += " (or set train.non_finite=skip, to skip such steps)"
            else:
                problem += f", and {in_a_row} steps in a row were skipped, up to step {step}; "
                problem += f"allowed: fewer than {MOST_SKIPPED}"
            if self.scaled:
                precisions = "no" if lacks_bf16(self.skipped.device) else "bf16 or no"
                advice = f"set train.mixed_precision={precisions}"
            raise NotFinite(
                f"{problem}. The weights did not change: {advice} and run the same command again, "
                "which resumes from the last checkpoint"
            )
        return skipped
