"""Whether a model is causal, without which its perplexity means nothing."""

import numpy as np
import torch
from transformers import PreTrainedModel

from mixer.common.errors import UserError
from mixer.evaluation.measure import AUTOCAST_TYPES, Plan, Process

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
