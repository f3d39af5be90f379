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

from mixer.analysis.reconstruction import blocks, random_twin, score_layer
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


def require(name: str, values: list[int], least: int, most: int) -> None:
    for value in values:
        if not least <= value <= most:
            raise UserError(f"--{name} is {value}; allowed here: {least} to {most}")


def representation(options: argparse.Namespace) -> dict:
    """All numbers of the report; see main for the options.

    Raises UserError if the checkpoint or the text cannot be read, or if the model does not have the
    layers or tokens that are asked for.
    """
    require("texts", [options.texts], 1, 10**6)
    require("steps", [options.steps], 1, 10**9)
    source = EvalOptions(checkpoint=str(options.checkpoint), text=options.text, data=options.data)
    check_options(source)
    model, tokenizer = load_checkpoint(options.checkpoint, choose_device(options.device, "fp32"))
    context, _ = choose_window(source, model)
    count = len(blocks(model.base_model))
    layers = options.layers or list(range(count + 1))
    lengths = options.tokens or [n for n in TOKENS if n <= context] or [context]
    require("layers", layers, 0, count)
    require("tokens", lengths, 1, context)
    text = choose_text(source, context, tokenizer)
    check_token(max(int(tokens.max()) for tokens in text.streams), model, text.name)
    stream = max(text.streams, key=len)
    windows = [cut_windows(stream, length, options.texts).to(model.device) for length in lengths]
    rows = []
    for weights, tested in (("trained", model), ("random", random_twin(model))):
        tested.requires_grad_(False)
        inverse = torch.linalg.pinv(tested.get_input_embeddings().weight)
        for layer in layers:
            print(f"{weights} weights, layer {layer}", file=sys.stderr, flush=True)
            found = score_layer(tested, layer, inverse, windows, options.steps)
            rows += [{"weights": weights, **row} for row in found]
    described = describe_model(options.checkpoint, model, tokenizer)
    about = {"text": text.name, "texts": options.texts, "steps": options.steps}
    return {**described, **about, "rows": rows}


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
    add("--device", default="auto", choices=DEVICES)
    where = "where the report goes (default: CHECKPOINT/../representation-<checkpoint>)"
    add("--output", metavar="DIR", help=where)
    options = parser.parse_args(arguments)
    output = Path(options.output or directory_for(options.checkpoint, "representation"))
    check_writable(output)
    result = representation(options)
    print(report(result))
    write(result, output)
    print(f"\nrepresentation.json, .md and .png are in {output}")


if __name__ == "__main__":
    run_command(main)
