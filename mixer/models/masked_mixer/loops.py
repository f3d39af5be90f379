# Copied beside every saved model: it imports from this package only files that are copied too.
"""What transformers' own loops ask of a model: `generate()` for its cache and the length of a text,
the Trainer for the number of labels that are scored.
"""

import math
from functools import wraps

from torch import Tensor
from transformers import GenerationMixin
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .cache import CACHE, MixingCache
from .configuration import MaskedMixerConfig

# With label smoothing, the Trainer shifts the labels by one token only for the models in this
# table. A model that is not in it would be trained to repeat its input.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(MaskedMixerConfig.model_type, "MaskedMixerForCausalLM")


class InTransformersLoops(GenerationMixin):
    """The Trainer passes num_items_in_batch to each micro-batch of a step: the number of labels in
    the whole step. It ignores attention_mask, so it would also count the first token after padding
    on the left, which nothing predicts.
    """

    config: MaskedMixerConfig

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args):
        if model_kwargs.get(CACHE) is None and generation_config.use_cache is not False:
            static = generation_config.cache_implementation == "static"
            model_kwargs[CACHE] = MixingCache(self.config, static)
        else:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)  # pyright: ignore[reportAttributeAccessIssue]

    def _validate_generated_length(self, generation_config, input_ids_length, *args):
        super()._validate_generated_length(generation_config, input_ids_length, *args)  # pyright: ignore[reportAttributeAccessIssue]
        length = generation_config.max_length
        longest = self.config.longest_text
        if length > longest:
            raise ValueError(
                f"the prompt has {input_ids_length} tokens and {length - input_ids_length} new "
                f"ones were asked for, {length} together; the model's context is {longest}: "
                "shorten the prompt, or give a smaller max_new_tokens"
            )

    def _get_stopping_criteria(self, *args, **kwargs):
        criteria = super()._get_stopping_criteria(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        if math.isinf(self.config.longest_text):
            for criterion in criteria:
                # it warns of texts past the context, which not every mixer minds
                if hasattr(criterion, "max_position_embeddings"):
                    criterion.max_position_embeddings = None
        return criteria

    @staticmethod
    def predicted_labels(labels: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """labels (batch, tokens) with -100 for the first token of each text and for padding.
        attention_mask is as in `forward`.
        """
        mask = labels.new_ones(labels.shape) if attention_mask is None else attention_mask
        is_token = mask.to(labels.device).bool()
        is_first = is_token.cumsum(1) <= 1  # or before the first
        is_scored = (is_token & ~is_first)[:, -labels.shape[1] :]
        return labels.masked_fill(~is_scored, -100)

    @property
    def accepts_loss_kwargs(self) -> bool:
        """Whether the Trainer passes num_items_in_batch. It asks before it counts any labels."""
        from transformers import Trainer  # slow to import, except where there is a Trainer already

        if not hasattr(Trainer._get_num_items_in_batch, "__wrapped__"):
            Trainer._get_num_items_in_batch = _of_predicted(Trainer._get_num_items_in_batch)
        return True


def _of_predicted(count):
    """The Trainer's method that counts labels; for masked mixers, only predicted labels count."""

    @wraps(count)
    def counted(self, batch_samples, device):
        # An adapter or DDP may be around the model.
        modules = self.model.modules()
        mixers = [module for module in modules if hasattr(module, "predicted_labels")]
        if mixers and batch_samples and "labels" in batch_samples[0]:
            predicted_labels = mixers[0].predicted_labels
            batch_samples = [
                dict(batch, labels=predicted_labels(batch["labels"], batch.get("attention_mask")))
                for batch in batch_samples
            ]
        return count(self, batch_samples, device)

    return counted
