"""The representation test of arXiv 2409.01482: how much of a text can be read back from the output
of a layer.

python -m mixer.representation --checkpoint runs/demo/step-600
python -m mixer.representation --checkpoint path/to/gpt2 --text book.txt --layers 1 6 12 --tokens 64 256     # any causal LM

A guess, at first Gaussian noise in place of the text's embeddings, goes down the gradient of the L1
distance between what a layer gives for it and for the text. The pseudo-inverse of the embedding
then turns the guess into tokens. The model is tested with the checkpoint's weights and with random
ones, and the distance is taken over all tokens' outputs or over the last token's alone, which is
all that the next token is predicted from.

Hamming score: the share of positions whose token is not the text's; 0 is best. The one best token
counts, where the author's own script counts a token as found that is among the five best, so that
its scores are no higher than ours. Bits of context: the tokens found x log2(vocabulary), a mean
over texts; what naming them takes without a model of language. Both are of this search: it shows
that so much is there to be read, not that no other way could read more.
"""

import argparse
import copy
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from mixer.checkpoints.pretrained import load_checkpoint
from mixer.common.errors import UserError, run_command
from mixer.common.files import check_writable, directory_for, place_for, write_text
from mixer.evaluation.evaluate import (
    EvalOptions,
    check_options,
    check_tokens,
    choose_text,
    choose_window,
    describe_model,
)
from mixer.evaluation.measure import choose_device
from mixer.reporting.figure import COLOURS, new_figure, save
from mixer.reporting.tables import table

READ = {"all": slice(None), "last": slice(-1, None)}  # the tokens whose outputs are compared
TOKENS = (16, 32, 64, 128)


# ------------------------------------------------------------------------------------------------------------- test


def blocks(body: nn.Module) -> nn.ModuleList:
    """Its longest list of modules, which is where models of transformers keep their blocks."""
    return max((part for part in body.modules() if isinstance(part, nn.ModuleList)), key=len)


def first_layers(model: nn.Module, layer: int) -> Callable[[Tensor], Tensor]:
    """The map from embedded tokens to the output of block `layer`, counted from 1, both (texts,
    tokens, channels).

    Layer 0 is the embedding itself.
    """
    if layer == 0:
        return lambda embedded: embedded
    body = copy.deepcopy(model.base_model)
    del blocks(body)[layer:]  # later blocks would be computed in vain
    kept = {}
    body.get_input_embeddings().register_forward_hook(lambda *_: kept["input"])
    blocks(body)[-1].register_forward_hook(
        lambda _block, _given, output: kept.update(output=output)
    )

    def run(embedded: Tensor) -> Tensor:
        kept["input"] = embedded
        body(
            input_ids=torch.zeros(embedded.shape[:2], dtype=torch.int64, device=embedded.device),
            use_cache=False,
        )
        return kept["output"] if isinstance(kept["output"], Tensor) else kept["output"][0]

    return run


def reconstruct(
    layers: Callable[[Tensor], Tensor],
    embedded: Tensor,
    read: slice,
    steps: int,
    lr: float,
    seed: int,
):
    """(guess (texts, tokens, channels), its distance from the target as a share of the noise's, a
    mean over texts).

    Plain gradient descent; the rate falls linearly from `lr` to a tenth of it. Distances are sums,
    so no text depends on which others are reconstructed with it.
    """
    generator = torch.Generator().manual_seed(seed)
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
                guess -= lr * (1 - 0.9 * step / steps) * gradient
    return guess.detach(), (distance.detach() / first).mean().item()


def hamming_score(guess: Tensor, tokens: Tensor, inverse: Tensor) -> float:
    """The share of `tokens` (texts, tokens) that is not what `inverse` (channels, vocabulary) makes
    of the guess.
    """
    return (torch.argmax(guess @ inverse, dim=-1) != tokens).double().mean().item()


@torch.no_grad()
def embedding_and_inverse(model) -> tuple[Tensor, Tensor]:
    """(vocabulary, channels) and its Moore-Penrose pseudo-inverse (channels, vocabulary)."""
    embedding = model.get_input_embeddings().weight
    return embedding, torch.linalg.pinv(embedding)


def score_layer(
    model,
    layer: int,
    embedding: Tensor,
    inverse: Tensor,
    windows: list[Tensor],
    steps: int,
    lr: float,
    seed: int,
) -> list[dict]:
    """A row for each of `windows` (texts, tokens) int64 and each of READ; model in fp32 and eval
    mode.
    """
    run = first_layers(model, layer)
    rows = []
    for tokens in windows:
        length = tokens.shape[1]
        for name, read in READ.items():
            guess, left = reconstruct(run, embedding[tokens], read, steps, lr, seed)
            score = hamming_score(guess, tokens, inverse)
            bits = (1 - score) * length * math.log2(len(embedding))
            numbers = {"hamming": score, "bits": bits, "distance_left": left}
            rows.append({"outputs": name, "layer": layer, "tokens": length, **numbers})
    return rows


# ------------------------------------------------------------------------------------------------------------ input


def cut_windows(stream: np.ndarray, length: int, texts: int) -> Tensor:
    """`texts` windows (texts, length) int64 whose beginnings are spread evenly over the stream."""
    if len(stream) < length:
        raise UserError(
            f"the longest text has {len(stream)} tokens, fewer than --tokens {length}: give a longer text, or fewer"
        )
    starts = np.linspace(0, len(stream) - length, texts).astype(int)
    return torch.from_numpy(
        np.stack([stream[start : start + length].astype(np.int64) for start in starts])
    )


def choose(
    given: list[int] | None, default: list[int], least: int, most: int, what: str
) -> list[int]:
    for value in given or []:
        if not least <= value <= most:
            raise UserError(f"--{what} {value} does not fit the checkpoint: give {least}..{most}")
    return sorted(set(given or default))


def check_numbers(options: argparse.Namespace) -> None:
    for name in ("texts", "steps", "lr"):
        if not getattr(options, name) > 0:
            raise UserError(f"--{name} {getattr(options, name)} is too small: give more than 0")


def random_twin(model, seed: int):
    """The same architecture with random weights, in fp32 and eval mode, on the same device."""
    torch.manual_seed(seed)
    return (
        AutoModelForCausalLM.from_config(model.config, dtype=torch.float32).to(model.device).eval()
    )


def representation(options: argparse.Namespace) -> dict:
    """All numbers of the report; see main for the options.

    Raises UserError for a checkpoint or text that cannot be read, and for layers or tokens that the
    model does not have.
    """
    check_numbers(options)
    source = EvalOptions(checkpoint=options.checkpoint, text=options.text, data=options.data)
    check_options(source)
    model, tokenizer = load_checkpoint(
        Path(options.checkpoint), choose_device(options.device, "fp32")
    )
    context, _ = choose_window(source, model)
    count = len(blocks(model.base_model))
    layers = choose(options.layers, list(range(count + 1)), 0, count, "layers")
    lengths = choose(
        options.tokens, [n for n in TOKENS if n <= context] or [context], 1, context, "tokens"
    )
    text = choose_text(source, context, tokenizer)
    check_tokens(text, model.config.get_text_config().vocab_size)
    stream = max(text.streams, key=len)
    windows = [cut_windows(stream, length, options.texts).to(model.device) for length in lengths]
    rows = []
    for weights, tested in (("trained", model), ("random", random_twin(model, options.seed))):
        tested.requires_grad_(False)
        both = embedding_and_inverse(tested)
        for layer in layers:
            print(f"{weights} weights, layer {layer}", file=sys.stderr, flush=True)
            found = score_layer(
                tested, layer, *both, windows, options.steps, options.lr, options.seed
            )
            rows += [{"weights": weights, **row} for row in found]
    settings = {name: getattr(options, name) for name in ("texts", "steps", "lr", "seed")}
    return {
        **describe_model(Path(options.checkpoint), model, tokenizer),
        "text": text.name,
        **settings,
        "rows": rows,
    }


# ----------------------------------------------------------------------------------------------------------- report


def groups(result: dict) -> dict[tuple[str, str, int], list[dict]]:
    """Rows by (outputs, weights, layer), in ascending order of tokens."""
    found = {}
    for row in result["rows"]:
        found.setdefault((row["outputs"], row["weights"], row["layer"]), []).append(row)
    return dict(
        sorted(found.items(), key=lambda item: (item[0][0], item[0][1] != "trained", item[0][2]))
    )


def report(result: dict) -> str:
    rows = []
    for (outputs, weights, layer), found in groups(result).items():
        rows.append({"outputs read": outputs, "weights": weights, "layer": layer})
        rows[-1] |= {f"Hamming, {row['tokens']} tokens": row["hamming"] for row in found}
        rows[-1] |= {f"bits, {row['tokens']}": round(row["bits"]) for row in found}
    vocabulary = result["vocabulary"]
    notes = (
        f"{result['label']}: {result['architecture']}, {result['parameters']:,} parameters; {result['text']}; a mean over "
        f"{result['texts']} windows for each number of tokens, spread evenly. Hamming score: share of positions whose token is "
        f"not recovered. Bits of context: tokens recovered x log2({vocabulary:,}) = {math.log2(vocabulary):.4g} bits. Read from "
        f"the layer's outputs of all tokens, or of the last alone; layer 0 is the embedding. {result['steps']:,} steps of "
        f"gradient descent on the L1 distance, rate {result['lr']:g} falling to a tenth, from Gaussian noise; at most "
        f"{max(row['distance_left'] for row in result['rows']):.1%} of the noise's distance is left."
    )
    return f"{table(rows)}\n\n{notes}"


def plot(result: dict, output: Path) -> Path:
    """Hamming score by layer, a colour for each number of tokens; the random weights' are dashed,
    with hollow marks.
    """
    from matplotlib.ticker import MaxNLocator

    marks = {"trained": {"marker": "o", "markersize": 4}}
    marks["random"] = {
        "marker": "o",
        "markersize": 9,
        "markerfacecolor": "none",
        "linestyle": "--",
        "linewidth": 0.8,
    }

    figure = new_figure(figsize=(11, 4.6))
    lengths = sorted({row["tokens"] for row in result["rows"]})
    for axes, outputs in zip(figure.subplots(1, 2, sharey=True), READ, strict=True):
        for length, colour in zip(lengths, COLOURS * len(lengths), strict=False):
            for weights, mark in marks.items():
                wanted = {"outputs": outputs, "weights": weights, "tokens": length}
                rows = [row for row in result["rows"] if wanted.items() <= row.items()]
                points = [row["layer"] for row in rows], [row["hamming"] for row in rows]
                axes.plot(
                    *points,
                    color=colour,
                    label=f"{length} tokens, {weights}",
                    clip_on=False,
                    **mark,
                )
        axes.set_title(
            f"Read from the output of {'all tokens' if outputs == 'all' else 'the last token'}"
        )
        axes.set_ylim(-0.03, 1.03)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("layer")
    figure.axes[0].set_ylabel("Hamming score (share not recovered)")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper")
    return save(figure, output)


def asked(result: dict) -> tuple[dict, list[tuple]]:
    """What a test was asked for, of its result."""
    rows = [(row["weights"], row["outputs"], row["layer"], row["tokens"]) for row in result["rows"]]
    return {name: value for name, value in result.items() if name != "rows"}, rows


def write(result: dict, directory: Path) -> Path:
    """representation.json, .md and .png in `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / "representation.json", json.dumps(result, indent=2) + "\n")
    picture = "![Hamming score by layer](representation.png)"
    write_text(
        directory / "representation.md", f"# Representation\n\n{report(result)}\n\n{picture}\n"
    )
    plot(result, directory / "representation.png")
    return directory


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m mixer.representation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--checkpoint",
        required=True,
        metavar="DIR",
        help="a checkpoint, or any causal LM's directory",
    )
    parser.add_argument(
        "--data",
        default="",
        metavar="DIR",
        help="prepared data, its validation split (default: the run's)",
    )
    parser.add_argument(
        "--text",
        nargs="+",
        default=[],
        metavar="FILE",
        help="text files instead, the longest one is taken",
    )
    parser.add_argument(
        "--layers",
        nargs="+",
        type=int,
        metavar="N",
        help="blocks from 1 on; 0: the embedding (default: all)",
    )
    parser.add_argument(
        "--tokens",
        nargs="+",
        type=int,
        metavar="N",
        help=f"lengths (default: those of {TOKENS} that fit)",
    )
    parser.add_argument(
        "--texts", type=int, default=8, metavar="N", help="windows for each length (8)"
    )
    parser.add_argument(
        "--steps", type=int, default=500, metavar="N", help="of gradient descent (500)"
    )
    parser.add_argument(
        "--lr", type=float, default=0.02, metavar="X", help="first step size (0.02)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of the noise and of the random weights (0)",
    )
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="where it goes (default: CHECKPOINT/../representation-<checkpoint>, or -2, -3, ...)",
    )
    options = parser.parse_args(arguments)
    output = Path(options.output or directory_for(Path(options.checkpoint), "representation"))
    check_writable(output)
    result = representation(options)
    output = output if options.output else place_for(result, output, "representation.json", asked)
    print(report(result))
    print(f"\nrepresentation.json, .md and .png are in {write(result, output)}")


if __name__ == "__main__":
    run_command(main)
