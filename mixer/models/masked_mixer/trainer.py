"""What transformers' Trainer needs of the model: a shifted loss, and the labels that count."""

from functools import wraps

import torch
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .cache import Places
from .configuration import MaskedMixerConfig

# With label smoothing, the Trainer shifts the labels by one token only for the models in this
# table. A model that is not in it would be trained to repeat its input.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(MaskedMixerConfig.model_type, "MaskedMixerForCausalLM")


class Training(nn.Module):
    """The part of MaskedMixerForCausalLM that makes the Trainer divide by the right number.

    It counts the labels of all micro-batches of a step and gives each the sum, num_items_in_batch.
    As it ignores attention_mask, it would also count the first token after padding on the left.
    """

    @property
    def accepts_loss_kwargs(self) -> bool:
        """Whether the Trainer gives num_items_in_batch. It asks this before it counts anything."""
        from transformers import Trainer  # slow to import, except where there is a Trainer already

        if not hasattr(Trainer._get_num_items_in_batch, "__wrapped__"):
            Trainer._get_num_items_in_batch = count_predicted(Trainer._get_num_items_in_batch)
        return True

    @staticmethod
    def predicted_labels(labels: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """labels (batch, tokens) with -100 for the first token of each text, which nothing
        predicts. attention_mask is that of `forward`.
        """
        if attention_mask is None:
            first = torch.arange(labels.shape[1], device=labels.device) == 0
        else:
            first = Places(attention_mask, labels.shape[1]).unpredicted().to(labels.device)
        return labels.masked_fill(first, -100)


def count_predicted(count):
    """The Trainer's method that counts labels, but of masked mixers the predicted ones alone."""

    @wraps(count)
    def counted(trainer, batches, device):
        parts = trainer.model.modules()  # an adapter or DDP may be around the model
        model = next((part for part in parts if hasattr(part, "predicted_labels")), None)
        if model is not None and batches and "labels" in batches[0]:
            masked = (model.predicted_labels(b["labels"], b.get("attention_mask")) for b in batches)
            pairs = zip(batches, masked, strict=True)
            batches = [dict(batch) | {"labels": labels} for batch, labels in pairs]
        return count(trainer, batches, device)

    return counted
