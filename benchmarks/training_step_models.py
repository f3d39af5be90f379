"""What is trained in benchmarks/training_step.py: our model in its forms, clean masked mixers, and
the reference's form.

Each form is a module that takes tokens (batch, tokens) and returns the mean loss. All have the same
parameters in the same order, which share one piece of memory, so that many forms fit beside each
other on a GPU and their rounds can interleave.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from dense_mixing import MatmulMixing
from torch import Tensor, nn

from mixer import MaskedMixerConfig, MaskedMixerForCausalLM
from mixer.objectives.language import TokenLoss
from mixer.training.optim import Guard, OptimConfig, build_optimizer, clip, gradient_norm
from mixer.training.passes import compiled, compiled_parts, set_recompute


@dataclass(frozen=True)
class Size:
    tokens: int
    batch: int
    hidden: int
    layers: int
    vocabulary: int


@dataclass(frozen=True)
class Form:
    """`model`: ours, matmul, limit (clean ones) or reference."""

    description: str
    model: str = "ours"
    backend: str = ""  # empty: the kernels on a GPU, or it is an error; on a CPU dense
    compile: str = "no"  # ours: no, blocks, model; others: no, model
    recompute: str = "none"
    graph: bool = False  # its passes are replayed as a CUDA graph
    window: int | None = None  # ours: weights by lag with so many lags; 0: all


FORMS = {
    "blocks": Form("ours, each block and the loss compiled", compile="blocks"),
    "model": Form("ours, compiled whole", compile="model"),
    "graph": Form("blocks, replayed as a CUDA graph", compile="blocks", graph=True),
    "eager": Form("ours, eager"),
    "dense": Form("ours with `dense`, as blocks", backend="dense", compile="blocks"),
    "matmul": Form("a clean model's dense matmul, compiled", "matmul", compile="model"),
    "limit": Form("matmul with mixing removed, compiled", "limit", compile="model"),
    "reference": Form("the reference implementation's form, eager", "reference"),
    "activation": Form("blocks, the GELU computed again", compile="blocks", recompute="activation"),
    "lags": Form("blocks, weights by lag", compile="blocks", window=0),
    "window": Form("blocks, a window of 128 lags", compile="blocks", window=128),
    "block": Form("blocks, each block computed again", compile="blocks", recompute="block"),
}
DEFAULT_FORMS = ("blocks", "model", "eager", "dense", "matmul", "limit", "reference")


class Step:
    """One form with its optimizer: a call is a whole training step on one batch of random
    tokens.
    """

    def __init__(self, form: Form, size: Size, device: str, memory: "SharedMemory"):
        self.device = device
        self.module = build(form, size, device)
        self.ours = isinstance(self.module, Ours)
        model = self.module.loss.model if self.ours else self.module
        compile_step = compiled if self.ours and form.compile != "no" else None
        config = OptimConfig(lr=1e-4)
        self.optimizer = build_optimizer(model, config, compile=compile_step)
        self.guard = Guard(self.optimizer, False, True, torch.device(device))
        memory.share(self.module, self.optimizer)
        if form.graph and device != "cuda":
            raise ValueError(f"a CUDA graph on a {device}")
        for module, name in self.module.methods_to_compile(form.compile):
            method = getattr(module, name)
            if self.ours:
                setattr(module, name, compiled(method))
            else:
                setattr(module, name, torch.compile(method, fullgraph=True, dynamic=False))
        shape = (size.batch, size.tokens + self.ours)
        tokens = torch.randint(size.vocabulary, shape, device=device)
        if self.ours:
            self.inputs = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        else:
            self.inputs = (tokens,)

        self.graph = torch.cuda.CUDAGraph() if form.graph else None
        if self.graph:
            self.passes()
            self.optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(self.graph):
                self.loss = self.passes()
            self.gradients = [weight.grad for weight in self.module.parameters()]

    def passes(self) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            loss = self.module(*self.inputs)
        loss.backward()
        return loss.detach()

    def replayed(self) -> Tensor:
        self.graph.replay()
        for weight, gradient in zip(self.module.parameters(), self.gradients, strict=True):
            weight.grad = gradient
        return self.loss

    def __call__(self, _slot: int = 0) -> Tensor:
        loss = self.replayed() if self.graph else self.passes()
        if self.ours:
            norm = gradient_norm(self.optimizer)
            clip(self.optimizer, norm, 1.0)
            self.guard.before_step(norm)
        else:
            nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss


class SharedMemory:
    """Weights and AdamW's moments of the first module that shares, of which later ones take what
    has the size of theirs.
    """

    def __init__(self):
        self.weights: list[Tensor] = []
        self.moments: list[tuple[Tensor, Tensor]] = []

    @property
    def bytes(self) -> int:
        return 3 * sum(weight.nbytes for weight in self.weights)

    def share(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        parameters = list(module.parameters())
        if not self.weights:
            self.weights = [parameter.data for parameter in parameters]
            self.moments = [
                (torch.zeros_like(weight), torch.zeros_like(weight)) for weight in self.weights
            ]
        index = 0
        for parameter in parameters:
            while self.weights[index].numel() != parameter.numel():
                index += 1  # a form without mixing lacks a few
            exp_avg, exp_avg_sq = self.moments[index]
            parameter.data = self.weights[index].view(parameter.shape)
            optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": exp_avg.view(parameter.shape),
                "exp_avg_sq": exp_avg_sq.view(parameter.shape),
            }
            index += 1


def build(form: Form, size: Size, device: str) -> nn.Module:
    if form.model in CLEAN:
        model_class = Reference if form.model == "reference" else Clean
        with torch.device(device):
            return model_class(size, CLEAN[form.model])
    backend = form.backend or ("cuda" if device == "cuda" else "dense")
    config = MaskedMixerConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        max_position_embeddings=size.tokens,
        mixing_backend=backend,
        mixing_weight="full" if form.window is None else "lags",
        mixing_window=form.window or 0,
    )
    with torch.device(device):
        model = MaskedMixerForCausalLM(config)
    set_recompute(model, form.recompute)
    return Ours(model)


class Ours(nn.Module):
    """The mean loss as the loop takes it."""

    def __init__(self, model: MaskedMixerForCausalLM):
        super().__init__()
        self.loss = TokenLoss(model).train()

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(inputs, targets).sum() * (1.0 / targets.numel())

    def methods_to_compile(self, unit: str) -> list[tuple[nn.Module, str]]:
        """By module and name. unit: no, blocks or model."""
        if unit == "blocks":
            return compiled_parts(self.loss)
        return {"no": [], "model": [(self.loss, "forward")]}[unit]


# ------------------------------------------------------------------------- the clean models


class ReferenceMixing(nn.Module):
    """The reference overwrites its weight with the masked one in each forward: it cannot be
    compiled.
    """

    def __init__(self, tokens: int):
        super().__init__()
        self.conv = nn.Conv1d(tokens, tokens, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.conv.weight.data = torch.tril(self.conv.weight[..., 0])[..., None]
        return self.conv(x)


CLEAN: dict[str, Callable[[int], nn.Module]] = {
    "matmul": MatmulMixing,
    "limit": lambda tokens: nn.Identity(),
    "reference": ReferenceMixing,
}


class CleanBlock(nn.Module):
    def __init__(self, size: Size, mixing: Callable[[int], nn.Module]):
        super().__init__()
        self.mixing_norm = nn.LayerNorm(size.hidden)
        self.mixing = mixing(size.tokens)
        self.mlp_norm = nn.LayerNorm(size.hidden)
        width = 4 * size.hidden
        self.mlp = nn.Sequential(
            nn.Linear(size.hidden, width), nn.GELU(), nn.Linear(width, size.hidden)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixing(self.mixing_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Clean(nn.Module):
    """A masked mixer as one writes it in a page of PyTorch, with the residual stream in bf16, as
    ours has it under autocast.
    """

    stream = torch.bfloat16

    def __init__(self, size: Size, mixing: Callable[[int], nn.Module]):
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.hidden)
        self.blocks = nn.ModuleList(CleanBlock(size, mixing) for _ in range(size.layers))
        self.head = nn.Linear(size.hidden, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).to(self.stream)
        for block in self.blocks:
            x = block(x)
        return self.loss(x, tokens)

    def loss(self, x: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def methods_to_compile(self, unit: str) -> list[tuple[nn.Module, str]]:
        return [(self, "forward")] if unit == "model" else []


class Reference(Clean):
    """The reference has an fp32 residual stream, and takes its loss over the second of three
    dimensions, of logits that are turned over and copied for it.
    """

    stream = torch.float32

    def loss(self, x: Tensor, tokens: Tensor) -> Tensor:
        logits = self.head(x).transpose(1, 2)  # (batch, vocabulary, tokens)
        return F.cross_entropy(logits[..., :-1].contiguous(), tokens[:, 1:].contiguous())
