"""Whether a model is causal, without which its perplexity means nothing."""

import numpy as np
import torch
from transformers import PreTrainedModel

from mixer.common.errors import UserError
from mixer.evaluation.measure import AUTOCAST_TYPES
from mixer.evaluation.scoring import logits_of

CHANGED_PLACES = 8
# As a share of the largest logit. A causal model's logits do not move at all, except with libraries
# whose matmuls choose the order of a sum by the data.
TOLERANCE = {"fp32": 1e-5, "fp16": 1e-2, "bf16": 5e-2}


@torch.no_grad()
def check_causality(model: PreTrainedModel, tokens: np.ndarray, window: int, dtype: str) -> dict:
    """Changes all tokens from some place on, for several places of one window: no logit before may
    move.

    tokens: (tokens,) integers, 2 or more. dtype: a name in AUTOCAST_TYPES. Returns the window's
    length, and how far logits moved at most before the place and at least after it. Raises
    UserError where they moved before, as such a model sees what it should predict, and where they
    are not finite.
    """
    window = max(window, 2)  # a single token has none before it
    inputs = torch.from_numpy(np.asarray(tokens[:window], dtype=np.int64))[None].to(model.device)
    length, vocab_size = inputs.shape[1], model.config.get_text_config().vocab_size
    places = np.unique(np.linspace(1, length - 1, CHANGED_PLACES).round().astype(int)).tolist()
    logits = logits_of(model, inputs, AUTOCAST_TYPES[dtype])[0]  # (tokens, vocab)
    if not logits.isfinite().all():
        raise UserError(
            f"the logits are not finite in {dtype}: use --dtype fp32; "
            "if it stays, the checkpoint diverged"
        )
    before, after = 0.0, float("inf")
    for first in places:
        changed = inputs.clone()
        changed[:, first:] = (changed[:, first:] + 1) % vocab_size
        moves = (logits_of(model, changed, AUTOCAST_TYPES[dtype])[0] - logits).abs().amax(-1)
        before = max(before, moves[:first].max().item())
        after = min(after, moves[first:].max().item())
        if not before <= TOLERANCE[dtype] * logits.abs().max().item():
            raise UserError(
                f"the model is not causal: with the tokens from {first} on changed, logits before "
                f"it moved by {before:.3g}; allowed: not at all. It sees what it should predict, "
                "so its perplexity means nothing: give a causal model"
            )
    return {"window": length, "largest_move_before": before, "smallest_move_after": after}
