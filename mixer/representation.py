"""The representation test of arXiv 2409.01482: how much of a text can be read back from the output
of a layer.

    python -m mixer.representation --checkpoint runs/demo/step-600
    python -m mixer.representation --checkpoint path/to/gpt2 --text book.txt --layers 1 6 12

It works for any causal language model. A guess, at first Gaussian noise in place of the text's
embeddings, is changed by gradient descent until a layer gives for it what it gives for the text.
The pseudo-inverse of the embedding then turns the guess into tokens. The model is tested with the
checkpoint's weights and with random ones. The distance is L1, over the outputs of all tokens or of
the last token alone, which is all that the next token is predicted from.

Hamming score: the share of positions whose token is not the text's; 0 is best. Only the best token
of a position counts. The paper's own script accepts the text's token among the five best, so its
scores are no higher than these. Bits of context: the number of tokens found x log2(vocabulary), a
mean over texts; that many bits name these tokens without a model of language. Both numbers are
lower bounds of what is there: another search might read more.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mixer.analysis.reconstruction import blocks, embedding_and_inverse, random_twin, score_layer
from mixer.checkpoints.pretrained import check_token, load_checkpoint, settled
from mixer.common.errors import UserError, run_command
from mixer.common.files import check_writable, directory_for
from mixer.evaluation.evaluate import (
    EvalOptions,
    check_options,
    choose_text,
    choose_window,
    describe_model,
)
from mixer.evaluation.measure import DEVICES, choose_device
from mixer.reporting.representation import report, write

TOKENS = (16, 32, 64, 128)
# The options that change numbers.
ASKED = ("data", "text", "layers", "tokens", "texts", "steps", "lr", "seed")


def cut_windows(stream: np.ndarray, length: int, texts: int) -> Tensor:
    """Windows (texts, length) int64 of one text, their beginnings spread evenly over it."""
    if len(stream) < length:
        raise UserError(
            f"the longest text has {len(stream)} tokens, fewer than --tokens {length}: give a "
            "longer text, or fewer"
        )
    starts = np.linspace(0, len(stream) - length, texts).astype(int)
    windows = [stream[start : start + length].astype(np.int64) for start in starts]
    return torch.from_numpy(np.stack(windows))


def require(name: str, values: list[float], least: float, most: float) -> None:
    for value in values:
        if not least <= value <= most:
            raise UserError(f"--{name} is {value}; allowed here: {least:g} to {most:g}")


def representation(options: argparse.Namespace) -> dict:
    """All numbers of the report; see main for the options.

    Raises UserError if the checkpoint or the text cannot be read, or if the model does not have the
    layers or tokens that are asked for.
    """
    require("texts", [options.texts], 1, 1e6)
    require("steps", [options.steps], 1, 1e9)
    require("lr", [options.lr], 1e-9, 1e9)
    require("seed", [options.seed], 0, 2**32 - 1)
    source = EvalOptions(checkpoint=str(options.checkpoint), text=options.text, data=options.data)
    check_options(source)
    model, tokenizer = load_checkpoint(options.checkpoint, choose_device(options.device, "fp32"))
    described = describe_model(options.checkpoint, model, tokenizer)
    context, _ = choose_window(source, model)
    count = len(blocks(model.base_model))
    layers = sorted(set(options.layers or range(count + 1)))
    lengths = sorted(set(options.tokens or [n for n in TOKENS if n <= context] or [context]))
    require("layers", layers, 0, count)
    require("tokens", lengths, 1, context)
    text = choose_text(source, context, tokenizer)
    check_token(max(int(tokens.max()) for tokens in text.streams), model, text.name)
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
    return {**described, "text": text.name, **settings, "rows": rows}


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m mixer.representation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, number = parser.add_argument, {"type": int, "metavar": "N"}
    add("--checkpoint", required=True, type=settled, metavar="DIR", help="of a causal model")
    add("--data", default="", metavar="DIR", help="prepared data (default: the run's validation)")
    how = "text files instead; the longest counts"
    add("--text", nargs="+", default=[], metavar="FILE", help=how)
    add("--layers", nargs="+", **number, help="blocks from 1 on; 0: the embedding (default: all)")
    add("--tokens", nargs="+", **number, help=f"lengths (default: those of {TOKENS} that fit)")
    add("--texts", default=8, **number, help="windows for each length (8)")
    add("--steps", default=500, **number, help="of gradient descent (500)")
    add("--lr", type=float, default=0.02, metavar="X", help="first step size (0.02)")
    add("--seed", default=0, **number, help="of the noise and of the random weights (0)")
    add("--device", default="auto", choices=DEVICES)
    where = "where it goes (default: CHECKPOINT/../representation-<checkpoint>, with a hash of "
    add("--output", metavar="DIR", help=where + "other options than the default ones)")
    options = parser.parse_args(arguments)
    given = {name: getattr(options, name) for name in ASKED}
    asked = {name: v for name, v in given.items() if v != parser.get_default(name)}
    where = directory_for(options.checkpoint, "representation", asked=repr(asked) if asked else "")
    output = Path(options.output or where)
    check_writable(output)
    result = representation(options)
    print(report(result))
    print(f"\nrepresentation.json, .md and .png are in {write(result, output)}")


if __name__ == "__main__":
    run_command(main)
