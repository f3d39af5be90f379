"""The representation test of arXiv 2409.01482: how much of a text can be recovered from a layer's
output, in any causal language model, with its trained weights and with random ones.

A guess starts as Gaussian noise in place of the text's embeddings. Gradient descent minimizes the
L1 distance between the layer's outputs for the guess and for the text: of all tokens, or of the
last alone. The pseudo-inverse of the embedding then turns the guess into tokens. The Hamming score
is the share of positions whose token is wrong. The author's script accepts the five best tokens at
a position, so its scores are no higher. A better search might recover more.
"""

import copy
import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from mixer.checkpoints.pretrained import check_token, load_checkpoint
from mixer.common.errors import UserError
from mixer.common.progress import time_reported
from mixer.evaluation import evaluate, texts
from mixer.evaluation.config import EvalOptions
from mixer.evaluation.scoring import choose_device
from mixer.models.architecture import blocks_of, body_of
from mixer.models.masked_mixer.configuration import MaskedMixerConfig
from mixer.reporting.text import WIDTH, table, wrapped

TOKENS = (16, 32, 64, 128)  # the default of --tokens
TEXTS = 8  # windows for each length
READ = {"all": slice(None), "last": slice(-1, None)}  # the tokens whose outputs are compared
LR = 0.02  # of the first step


def representation(
    source: EvalOptions, layers: list[int] | None, tokens: list[int] | None, steps: int
) -> dict:
    """All numbers of the report.

    source: the checkpoint, and the text of which windows are taken. layers, tokens: None stands for
    all blocks, and for those of TOKENS that fit. Raises UserError for what the model does not have.
    """
    directory = Path(source.checkpoint)
    model, tokenizer = load_checkpoint(directory, choose_device(source.device, source.dtype))
    context, _ = evaluate.choose_window(source, model)
    text = texts.choose_text(source, context, tokenizer)
    check_token(text.largest_token, model, text.name)
    stream = max(text.streams, key=len)
    block_count = len(block_list(model))
    layers = list(range(block_count + 1)) if layers is None else layers
    longest = min(context, len(stream))
    lengths = tokens or [n for n in TOKENS if n <= longest] or [longest]
    for name, values, least, most in (
        ("steps", [steps], 1, 10**9),
        ("layers", layers, 0, block_count),
        ("tokens", lengths, 1, longest),
    ):
        if wrong := [value for value in values if not least <= value <= most]:
            raise UserError(f"--{name} is {wrong[0]}; allowed here: {least} to {most}")
    windows = []  # of each length (texts, length), their beginnings spread evenly over the stream
    for length in lengths:
        starts = np.linspace(0, len(stream) - length, TEXTS).astype(int)
        window = np.stack([stream[start : start + length] for start in starts]).astype(np.int64)
        windows.append(torch.from_numpy(window).to(model.device))
    rows = []
    for weights, tested in (("trained", model), ("random", random_twin(model))):
        tested.requires_grad_(False)
        embed = tested.get_input_embeddings()  # which may also scale
        assert isinstance(embed.weight, Tensor)
        inverse = torch.linalg.pinv(embed.weight)
        for layer in layers:
            print(f"{weights} weights, layer {layer}", file=sys.stderr, flush=True)
            run = first_layers(tested, layer)
            for (outputs, read), window in itertools.product(READ.items(), windows):
                with time_reported(f"{window.shape[1]} tokens, outputs of {outputs}"):
                    layers_of_text = partial(run, window)
                    guess, distance_left = reconstruct(layers_of_text, embed(window), read, steps)
                row = {
                    "weights": weights,
                    "outputs": outputs,
                    "layer": layer,
                    "tokens": window.shape[1],
                    "hamming": hamming_score(guess, window, inverse),
                    "distance_left": distance_left,
                }
                rows.append(row)
    return evaluate.describe_model(directory, model, tokenizer) | {
        "text": text.name,
        "texts": TEXTS,
        "steps": steps,
        "rows": rows,
    }


def report(result: dict, width: int = WIDTH) -> str:
    """A Markdown table with notes."""
    table_rows: dict[tuple, dict] = {}  # by what they read
    for row in result["rows"]:
        name = {"outputs read": row["outputs"], "weights": row["weights"], "layer": row["layer"]}
        table_row = table_rows.setdefault(tuple(name.values()), name)
        table_row[f"Hamming, {row['tokens']} tokens"] = row["hamming"]
    distance_left = max(row["distance_left"] for row in result["rows"])
    notes = (
        f"{result['label']}: {result['architecture']}, {result['parameters']:,} parameters; "
        f"{result['text']}; a mean over {result['texts']} windows for each number of tokens. "
        "Hamming score: share of positions whose token is not recovered. Read from the layer's "
        "outputs of all tokens, or of the last alone; layer 0 is the embedding. "
        f"{result['steps']:,} steps of gradient descent on the L1 distance, rate {LR:g} falling to "
        f"a tenth, from Gaussian noise; at most {distance_left:.1%} of the noise's distance is "
        "left."
    )
    rows = list(table_rows.values())
    return f"{table(rows, keys=3, width=width)}\n\n{wrapped(notes, width)}"


def block_list(model: PreTrainedModel) -> nn.ModuleList:
    """The list that holds the model's blocks. Raises UserError for a model without one."""
    blocks = blocks_of(model)
    for module in model.modules():
        if blocks and isinstance(module, nn.ModuleList) and blocks[0] in list(module):
            return module
    raise UserError(f"this {model.config.model_type} has no list of blocks: give another model")


def first_layers(model: PreTrainedModel, layer: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The map from tokens, (texts, tokens) int64, and what stands for their embeddings to the
    output of block `layer`, both (texts, tokens, channels). Blocks are counted from 1; layer 0 is
    the embedding itself. What a model looks up by tokens besides, as suffix match does, is given.
    """
    if layer == 0:
        return lambda tokens, embedded: embedded
    model = copy.deepcopy(model)
    body = body_of(model)
    blocks = block_list(model)
    del blocks[layer:]  # the output of later blocks is not needed
    tensors = {}  # what goes into the first block, and what comes out of the last

    def replace_embedding(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        return tensors["input"]

    def record_output(module: nn.Module, inputs: tuple, output: Tensor | tuple) -> None:
        tensors["output"] = output if isinstance(output, Tensor) else output[0]

    model.get_input_embeddings().register_forward_hook(replace_embedding)
    blocks[-1].register_forward_hook(record_output)

    def run(tokens: Tensor, embedded: Tensor) -> Tensor:
        tensors["input"] = embedded
        body(input_ids=tokens, use_cache=False)
        return tensors["output"]

    return run


def reconstruct(
    layers: Callable[[Tensor], Tensor], embedded: Tensor, read: slice, steps: int
) -> tuple[Tensor, float]:
    """A guess of `embedded` from the output of `layers`, both (texts, tokens, channels), and its
    distance from the text's output as a share of the first noise's, a mean over texts.

    read: the tokens whose outputs are compared, one of READ. This is plain gradient descent, for
    each text alone; the rate falls linearly from LR to a tenth of it.
    """
    generator = torch.Generator().manual_seed(0)
    guess = torch.randn(embedded.shape, generator=generator).to(embedded.device).requires_grad_()
    with torch.no_grad():
        target = layers(embedded)[:, read]
    distances = []
    for step in range(steps + 1):
        distance = (layers(guess)[:, read] - target).abs().sum((1, 2))  # (texts,)
        distances.append(distance.detach())
        if step < steps:
            (gradient,) = torch.autograd.grad(distance.sum(), guess)
            with torch.no_grad():
                guess -= LR * (1 - 0.9 * step / steps) * gradient
    return guess.detach(), (distances[-1] / distances[0]).mean().item()


def hamming_score(guess: Tensor, tokens: Tensor, inverse: Tensor) -> float:
    """The share of positions at which the guess (texts, tokens, channels) is not the text's token.

    inverse: (channels, vocabulary), the pseudo-inverse of the embedding.
    """
    return (torch.argmax(guess @ inverse, dim=-1) != tokens).double().mean().item()


def random_twin(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the same configuration and device with random weights, in fp32 and eval mode."""
    config = copy.deepcopy(model.config)
    if isinstance(config, MaskedMixerConfig):
        config.mixing_init = "reference"  # "zero" would mix no tokens at all
    torch.manual_seed(0)
    twin = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return twin.to(model.device).eval()
