"""The layers of the author's structured recurrent mixers (arXiv 2605.08696) and of Toeplitz mixers
(arXiv 2605.06683), under the names and with the shapes that their state dicts have. Layers that mix
tokens take (batch, channels, tokens).
"""

import torch
from torch import Tensor, nn


def lags_between(tokens: int) -> Tensor:
    """How far back each token takes from each, (from, to); zero where it may not."""
    positions = torch.arange(tokens)
    return (positions - positions[:, None]).clamp(min=0)


class Repeat(nn.Module):
    """The author's ColRepeat (a number for each token that takes) or RowRepeat (one for each that
    gives), with a decay over context // 512 tokens; or a Toeplitz layer (one for each lag).
    """

    def __init__(self, context: int, form: str, decay: bool):
        super().__init__()
        self.form = form  # col, row or lag
        self.span = max(1, context // 512)
        self.weight = nn.Parameter(torch.randn(1, context) / context**0.5)
        self.bias = nn.Parameter(torch.randn(context))
        if decay:
            self.decay_value = nn.Parameter(0.88 + 0.14 * torch.rand(1))  # some beyond 0.9 to 1

    def forward(self, x):
        tokens = x.shape[-1]
        lag = lags_between(tokens)
        numbers = self.weight[0, :tokens]
        weight = {"col": numbers, "row": numbers[:, None], "lag": numbers[lag]}[self.form]
        if hasattr(self, "decay_value"):
            weight = weight * self.decay_value.clamp(0.9, 1) ** (lag / self.span)
        return x @ weight.expand(tokens, tokens).triu() + self.bias[:tokens]


class Heads(nn.Module):
    def __init__(
        self,
        width: int,
        context: int,
        forms: list[str],
        decay: bool,
        projections: bool,
    ):
        super().__init__()
        self.mixer_heads = nn.ModuleList(Repeat(context, form, decay) for form in forms)
        self.projections = projections
        if projections:
            heads = len(forms)
            self.proj_head = nn.ModuleList(nn.Linear(width, width // heads) for _ in forms)
            self.out_proj = nn.Linear(width, width)

    def forward(self, x):
        if self.projections:
            inputs = [project(x.mT).mT for project in self.proj_head]
        else:
            inputs = x.chunk(len(self.mixer_heads), 1)
        outputs = [mix(channels) for mix, channels in zip(self.mixer_heads, inputs, strict=True)]
        y = torch.cat(outputs, 1)
        return self.out_proj(y.mT).mT if self.projections else y


class ParallelHeads(nn.Module):
    """Four heads as one layer, which has its numbers for tokens that take in the first two, and for
    tokens that give in the others. Only the second of its decays is used.
    """

    def __init__(self, width: int, context: int):
        super().__init__()
        self.in_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)
        self.mixer_heads = nn.Module()
        self.span = max(1, context // 512)
        self.mixer_heads.weight = nn.Parameter(torch.randn(4, context) / context**0.5)
        self.mixer_heads.bias = nn.Parameter(torch.randn(4, context))
        self.mixer_heads.decay_value = nn.Parameter(torch.tensor([[0.91], [0.97]]))

    def forward(self, x):
        heads = self.mixer_heads
        tokens = x.shape[-1]
        take, give = heads.weight[:, :tokens].chunk(2)
        square = (-1, tokens, tokens)
        weight = torch.cat([take[:, None].expand(square), give[..., None].expand(square)])
        decay = heads.decay_value[1].clamp(0.9, 1)
        weight = weight * decay ** (lags_between(tokens) / self.span)
        y = self.in_proj(x.mT).mT.unflatten(1, (4, -1)) @ weight.triu()
        y = y + heads.bias[:, None, :tokens]
        return self.out_proj(y.flatten(1, 2).mT).mT


class ParallelToeplitzHeads(nn.Module):
    """Four Toeplitz heads as one layer."""

    def __init__(self, width: int, context: int):
        super().__init__()
        self.in_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)
        self.mixer_heads = nn.Module()
        self.mixer_heads.weight = nn.Parameter(torch.randn(4, context) / context**0.5)
        self.mixer_heads.bias = nn.Parameter(torch.randn(4, context))

    def forward(self, x):
        heads = self.mixer_heads
        tokens = x.shape[-1]
        weight = heads.weight[:, lags_between(tokens)].triu()
        y = self.in_proj(x.mT).mT.unflatten(1, (4, -1)) @ weight
        y = y + heads.bias[:, None, :tokens]
        return self.out_proj(y.flatten(1, 2).mT).mT


class Block(nn.Module):
    def __init__(self, width: int, mixing: nn.Module, dropout: bool):
        super().__init__()
        self.channel_norm = nn.LayerNorm(width)
        self.token_norm = nn.LayerNorm(width)
        between = [nn.SiLU(), nn.Dropout(0.0)] if dropout else [nn.SiLU()]
        self.channel_mixing_layer = nn.Sequential(
            nn.Linear(width, 4 * width), *between, nn.Linear(4 * width, width)
        )
        self.token_mixing_layer = mixing

    def forward(self, x):
        x = x + self.channel_mixing_layer(self.channel_norm(x))
        return x + self.token_mixing_layer(self.token_norm(x).mT).mT


class RecurrentReference(nn.Module):
    """forms: `col`, `row` or `lag` for each head, one for a mixer without heads; `parallel` or
    `parallel-lag` for heads as one layer. dropout: of the MLP, as all Toeplitz mixers have.
    """

    def __init__(
        self,
        forms: list[str],
        context: int,
        decay: bool,
        projections: bool = True,
        width: int = 8,
        vocabulary: int = 50,
        dropout: bool = False,
        tied: bool = False,
    ):
        super().__init__()
        torch.manual_seed(3)
        self.input_layer = nn.Embedding(vocabulary, width)

        def mixing() -> nn.Module:
            if forms == ["parallel"]:
                return ParallelHeads(width, context)
            if forms == ["parallel-lag"]:
                return ParallelToeplitzHeads(width, context)
            if len(forms) == 1:
                return Repeat(context, forms[0], decay)
            return Heads(width, context, forms, decay, projections)

        self.mixer_blocks = nn.ModuleList(Block(width, mixing(), dropout) for _ in range(2))
        self.output_layer = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.output_layer.weight = self.input_layer.weight
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)

    def forward(self, input_ids):
        x = self.input_layer(input_ids)
        for block in self.mixer_blocks:
            x = block(x)
        return self.output_layer(x)
