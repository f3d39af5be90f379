"""Checks of a checkpoint beside its perplexity: is it causal, and do the mixing backends agree on
its loss?
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from transformers import PreTrainedModel

from mixer.common.errors import UserError
from mixer.evaluation.measure import AUTOCAST_TYPES, Plan, Process, measure
from mixer.models.masked_mixer.convolution import TriangularConv

COMPARED_BACKENDS = ("dense", "cuda")  # the first is what the other is compared with
CHANGED_PLACES = 8
# As a share of the largest logit. A causal model's logits do not move at all, but for libraries
# whose matmuls choose the order of a sum by the data.
TOLERANCE = {"fp32": 1e-5, "fp16": 1e-2, "bf16": 5e-2}


@torch.no_grad()
def check_causality(
    model: PreTrainedModel, tokens: np.ndarray, plan: Plan, process: Process
) -> dict:
    """Changes all tokens from some place on, for several places of one window: no logit before may
    move.

    tokens: (tokens,) integers, 2 or more. Returns the window's length, the places, and how far
    logits moved at most before and at least from the place on. Raises UserError where they moved
    before: such a model sees what it is to predict, and its perplexity means nothing; and where
    they are not finite.
    """
    window = max(plan.window, 2)  # a single token has none before it
    inputs = torch.from_numpy(np.asarray(tokens[:window], dtype=np.int64))
    inputs = inputs[None].to(process.device)  # (1, tokens)
    length, vocab_size = inputs.shape[1], model.config.get_text_config().vocab_size
    places = np.unique(np.linspace(1, length - 1, CHANGED_PLACES).round().astype(int)).tolist()
    logits = window_logits(model, inputs, plan.dtype)
    if not logits.isfinite().all():
        raise UserError(
            f"the logits are not finite in {plan.dtype}: use --dtype fp32; "
            "if it stays, the checkpoint diverged"
        )
    before, after = 0.0, float("inf")
    for first in places:
        changed = inputs.clone()
        changed[:, first:] = (changed[:, first:] + 1) % vocab_size
        moves = (window_logits(model, changed, plan.dtype) - logits).abs().amax(-1)  # (tokens,)
        before = max(before, moves[:first].max().item())
        after = min(after, moves[first:].max().item())
        if not before <= TOLERANCE[plan.dtype] * logits.abs().max().item():
            raise UserError(
                f"the model is not causal: with the tokens from {first} on changed, logits before "
                f"it moved by {before:.3g}; allowed: not at all. It sees what it should predict, "
                "so its perplexity means nothing: give a causal model"
            )
    return {
        "window": length,
        "changed_from": places,
        "largest_move_before": before,
        "smallest_move_after": after,
    }


def window_logits(model: PreTrainedModel, inputs: torch.Tensor, dtype: str) -> torch.Tensor:
    """(1, tokens) -> (tokens, vocab) fp32."""
    with torch.autocast(
        inputs.device.type, dtype=AUTOCAST_TYPES[dtype], enabled=AUTOCAST_TYPES[dtype] is not None
    ):
        return model(input_ids=inputs).logits[0].float()


def compare_backends(
    model: PreTrainedModel, streams: Sequence[np.ndarray], plan: Plan, process: Process
) -> list[dict]:
    """The same weights and text through each mixing backend: loss, its difference to the first
    one's, speed, memory.

    A backend that cannot run here is listed with the reason. "position_difference" is the largest
    difference of the mean loss at any position of the window. All losses are in nats per token.
    """
    rows, first = [], None
    for backend in COMPARED_BACKENDS:
        try:
            with mixing_backend(model, backend):
                scores, cost = measure(model, streams, plan, process)
        except UserError as error:
            rows.append({"backend": backend, "problem": str(error)})
            continue
        first = first or scores
        counts = np.maximum(scores.count_by_position, 1)
        moved = np.abs(scores.nats_by_position - first.nats_by_position) / counts
        difference = {
            "difference": scores.loss - first.loss,
            "position_difference": float(moved.max()),
        }
        rows.append({"backend": backend, "loss": scores.loss, **difference, **cost})
    return rows


@contextmanager
def mixing_backend(model: PreTrainedModel, backend: str) -> Iterator[None]:
    """Runs every triangular convolution of the model by `backend` inside the `with` block."""
    convolutions = [module for module in model.modules() if isinstance(module, TriangularConv)]
    before = [module.backend for module in convolutions]
    try:
        for module in convolutions:
            module.backend = backend
        yield
    finally:
        for module, name in zip(convolutions, before, strict=True):
            module.backend = name
