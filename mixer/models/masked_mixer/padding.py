"""Padded batches: where the tokens of each text stand, and which of their labels are scored. A text
is mixed as if it stood alone, since the mixing weight has a row for each of its positions.
"""

from functools import wraps

import torch
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .configuration import MaskedMixerConfig

# With label smoothing, the Trainer shifts the labels by one token only for the models in this
# table. A model that is not in it would be trained to repeat its input.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(MaskedMixerConfig.model_type, "MaskedMixerForCausalLM")


class Places:
    """Where the new tokens of a batch stand, from an attention mask (batch, past + new) of 1 for a
    token and 0 for padding; None for no padding.

    The model works on `gather(input_ids)`: the tokens of each text at the front, and padding behind
    them, where no token can see it. `restore` puts the results back into the input's columns. A
    padded place gets the result of the last token before it, so that the last column, which
    `generate` reads, has the prediction of every text, whichever side is padded. Before the first
    token stand zeros: a loss over all columns would learn from anything else there.
    """

    def __init__(self, mask: Tensor | None, new: int):
        self.order, self.new, self.is_padded = None, new, mask is not None
        if not self.is_padded:
            return
        taken = mask[:, -new:].bool()
        # (batch, 1): tokens of each text in the cache; (batch, new): new ones up to each column
        self.starts, self.count = mask[:, :-new].bool().sum(1, keepdim=True), taken.cumsum(1)
        if new > 1:  # (batch, new): the columns with tokens, then those with padding
            self.order = taken.logical_not().to(torch.uint8).argsort(dim=1, stable=True)

    def gather(self, input_ids: Tensor) -> Tensor:
        return input_ids if self.order is None else input_ids.gather(1, self.order)

    def positions(self, earlier: int, device: torch.device, mark_padding: bool) -> Tensor:
        """Of the gathered tokens, behind `earlier` columns in the cache: (batch or 1, new) int64.
        Padding stands behind each text, or at -1 if it is to be marked.
        """
        place = torch.arange(self.new, device=device)
        if not self.is_padded:
            return earlier + place[None]
        padding = (place >= self.count[:, -1:]) & mark_padding
        return (self.starts + place).masked_fill(padding, -1)

    def restore(self, x: Tensor) -> Tensor:
        """x (batch, new, channels), back in the order of the input's columns."""
        if self.order is None:
            return x
        column = (self.count - 1).clamp(min=0)[..., None].expand_as(x)
        before = self.starts + self.count == 0  # the first token
        return x.gather(1, column).masked_fill(before[..., None], 0)


class PredictedLabels(nn.Module):
    """Which labels MaskedMixerForCausalLM scores, also where transformers' Trainer counts them.

    The Trainer gives each micro-batch of a step num_items_in_batch, the number of labels in all of
    them. As it ignores attention_mask, it would also count the first token after padding on the
    left, which nothing predicts.
    """

    @staticmethod
    def predicted_labels(labels: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """labels (batch, tokens) with -100 for the first token of each text. attention_mask is that
        of `forward`.
        """
        mask = labels.new_ones(labels.shape) if attention_mask is None else attention_mask
        seen = mask.to(labels.device).bool().cumsum(1)[:, -labels.shape[1] :]
        return labels.masked_fill(seen <= 1, -100)

    @property
    def accepts_loss_kwargs(self) -> bool:
        """Whether the Trainer gives num_items_in_batch. It asks this before it counts anything."""
        from transformers import Trainer  # slow to import, except where there is a Trainer already

        if not hasattr(Trainer._get_num_items_in_batch, "__wrapped__"):
            Trainer._get_num_items_in_batch = _of_predicted(Trainer._get_num_items_in_batch)
        return True


def _of_predicted(count):
    """The Trainer's method that counts labels, but of masked mixers the predicted ones alone."""

    @wraps(count)
    def counted(trainer, batches, device):
        parts = trainer.model.modules()  # an adapter or DDP may be around the model
        scored = next((p.predicted_labels for p in parts if hasattr(p, "predicted_labels")), None)
        if scored and batches and "labels" in batches[0]:
            batches = [
                dict(batch, labels=scored(batch["labels"], batch.get("attention_mask")))
                for batch in batches
            ]
        return count(trainer, batches, device)

    return counted
