"""How much of a text can be read back from the output of a layer: the representation test of arXiv
2409.01482.

A guess, at first Gaussian noise in place of the text's embeddings, is changed by gradient descent
until the layer gives for it what it gives for the text. The distance is L1, over the outputs of all
tokens or of the last token alone, which is all that the next token is predicted from. The
pseudo-inverse of the embedding then turns the guess into tokens.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from mixer.models.masked_mixer.configuration import MaskedMixerConfig

READ = {"all": slice(None), "last": slice(-1, None)}  # the tokens whose outputs are compared
LR = 0.02  # of the first step


def blocks(body: nn.Module) -> nn.ModuleList:
    """The blocks of a transformers model without its head: its longest list of modules."""
    return max((part for part in body.modules() if isinstance(part, nn.ModuleList)), key=len)


def first_layers(model: nn.Module, layer: int) -> Callable[[Tensor], Tensor]:
    """The map from embedded tokens to the output of block `layer`, both (texts, tokens, channels).

    Blocks are counted from 1; layer 0 is the embedding itself, so its map changes nothing.
    """
    if layer == 0:
        return lambda embedded: embedded
    body = copy.deepcopy(model.base_model)
    del blocks(body)[layer:]  # the output of later blocks is not needed
    kept = {}
    body.get_input_embeddings().register_forward_hook(lambda *_: kept["input"])
    blocks(body)[-1].register_forward_hook(
        lambda _block, _given, output: kept.update(output=output)
    )

    def run(embedded: Tensor) -> Tensor:
        kept["input"] = embedded  # which the hook above puts in place of the embedding's output
        unread = torch.zeros(embedded.shape[:2], dtype=torch.int64, device=embedded.device)
        body(input_ids=unread, use_cache=False)
        return kept["output"] if isinstance(kept["output"], Tensor) else kept["output"][0]

    return run


def reconstruct(
    layers: Callable[[Tensor], Tensor], embedded: Tensor, read: slice, steps: int
) -> tuple[Tensor, float]:
    """A guess of `embedded` from the output of `layers`, both (texts, tokens, channels), and its
    distance from the text's output as a share of the first noise's, a mean over texts.

    read: the tokens whose outputs are compared, one of READ. This is plain gradient descent; the
    rate falls linearly from LR to a tenth of it. Distances are sums over tokens and channels, so a
    text's guess does not depend on the other texts.
    """
    generator = torch.Generator().manual_seed(0)
    guess = torch.randn(embedded.shape, generator=generator).to(embedded.device).requires_grad_()
    with torch.no_grad():
        target = layers(embedded)[:, read]
    first = None
    for step in range(steps + 1):
        distance = (layers(guess)[:, read] - target).abs().sum((1, 2))  # (texts,)
        first = distance.detach() if first is None else first
        if step < steps:
            (gradient,) = torch.autograd.grad(distance.sum(), guess)
            with torch.no_grad():
                guess -= LR * (1 - 0.9 * step / steps) * gradient
    return guess.detach(), (distance.detach() / first).mean().item()


def hamming_score(guess: Tensor, tokens: Tensor, inverse: Tensor) -> float:
    """The share of positions at which the guess is not the text's token; 0 is best.

    guess: (texts, tokens, channels); tokens: (texts, tokens); inverse: (channels, vocabulary), the
    pseudo-inverse of the embedding.
    """
    return (torch.argmax(guess @ inverse, dim=-1) != tokens).double().mean().item()


def score_layer(
    model: PreTrainedModel, layer: int, inverse: Tensor, windows: list[Tensor], steps: int
) -> list[dict]:
    """A row of numbers for each of READ and of `windows` (texts, tokens) int64.

    inverse: see `hamming_score`. The model is in fp32 and eval mode.
    """
    run, embedding, rows = first_layers(model, layer), model.get_input_embeddings().weight, []
    for name, read in READ.items():
        for tokens in windows:
            guess, left = reconstruct(run, embedding[tokens].detach(), read, steps)
            about = {"outputs": name, "layer": layer, "tokens": tokens.shape[1]}
            score = hamming_score(guess, tokens, inverse)
            rows.append(about | {"hamming": score, "distance_left": left})
    return rows


def random_twin(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the same configuration with random weights, in fp32 and eval mode, on the same
    device. Mixing weights are random too, whatever the training began with.
    """
    config = copy.deepcopy(model.config)
    if isinstance(config, MaskedMixerConfig):
        config.mixing_init = "reference"  # "zero" would mix no tokens at all
    torch.manual_seed(0)
    twin = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return twin.to(model.device).eval()
