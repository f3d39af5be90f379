"""What `generate()` of transformers needs from the model: its kind of cache, and clear errors for
prompts that cannot be continued.
"""

import torch
from torch import Tensor
from transformers import GenerationMixin

from .cache import MixingCache
from .configuration import RECURRENT

GIVE_A_TOKEN = (
    "give at least one token, such as the tokenizer's end of text, which stands before every "
    "document"
)


class Generation(GenerationMixin):
    """The part of MaskedMixerForCausalLM that changes how `generate()` prepares and checks its
    work.
    """

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # transformers' default cache is for the keys and values of attention

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args):
        given = model_kwargs.get("past_key_values") is not None
        static = generation_config.cache_implementation == "static"
        if given or not static:  # transformers checks these settings
            super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)
        if generation_config.use_cache is not False and not given:
            # A graph needs all parameters in their place, on one device. Those that a hook brings
            # there for each step are on "meta" before.
            devices = {parameter.device for parameter in self.parameters()}
            in_place = len(devices) == 1 and torch.device("meta") not in devices
            static = static and in_place
            compiled = (
                static
                and self.device.type == "cuda"
                and generation_config.compile_config is not None
            )
            model_kwargs["past_key_values"] = MixingCache(self.config, static, compiled)

    def _get_candidate_generator(self, *args, **kwargs):
        """Limits guesses to the context: prompt lookup may guess beyond max_length."""
        if self.config.mixing_weight in RECURRENT:
            raise ValueError(
                f"guesses ahead with mixing_weight {self.config.mixing_weight}, whose cache cannot "
                "forget the wrong ones; leave out prompt lookup and assistants"
            )
        generator = super()._get_candidate_generator(*args, **kwargs)
        if getattr(generator, "eos_token_id", self) is None:  # transformers 5.0 needs a tensor
            generator.eos_token_id = torch.empty(0, dtype=torch.long, device=self.device)
        guess = generator.get_candidates

        def get_candidates(input_ids: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor | None]:
            guessed, logits = guess(input_ids, *args, **kwargs)
            context = self.config.max_position_embeddings
            if logits is not None:
                logits = logits[:, : context - input_ids.shape[1]]
            return guessed[:, :context], logits

        generator.get_candidates = get_candidates
        return generator

    def _valid_auto_compile_criteria(self, model_kwargs, generation_config) -> bool:
        if getattr(model_kwargs.get("past_key_values"), "compiled", False):
            # The cache compiles its step itself; transformers would compile the whole forward.
            return False
        return super()._valid_auto_compile_criteria(model_kwargs, generation_config)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, *args, attention_mask: Tensor | None = None, **kwargs
    ) -> dict:
        cache = kwargs.get("past_key_values")
        # Only before the first step, because reading the mask waits for the GPU. generate() gives
        # no mask if nothing is padded.
        if attention_mask is not None and (cache is None or cache.get_seq_length() == 0):
            empty = attention_mask.sum(1).eq(0).nonzero().flatten().tolist()
            if empty:
                raise ValueError(
                    f"the prompts of samples {empty} are empty, all padding; {GIVE_A_TOKEN}"
                )
        return super().prepare_inputs_for_generation(
            input_ids, *args, attention_mask=attention_mask, **kwargs
        )

    def _maybe_initialize_input_ids_for_generation(self, inputs, bos_token_id, model_kwargs):
        if inputs is None and bos_token_id is None:
            raise ValueError(f"the prompt is empty; {GIVE_A_TOKEN}")
        return super()._maybe_initialize_input_ids_for_generation(
            inputs, bos_token_id, model_kwargs
        )

    def _validate_generated_length(
        self, generation_config, input_ids_length, has_default_max_length
    ):
        super()._validate_generated_length(
            generation_config, input_ids_length, has_default_max_length
        )
        context = self.config.longest_text
        if input_ids_length == 0:
            raise ValueError(f"the prompt is empty; {GIVE_A_TOKEN}")
        if generation_config.max_length > context:
            asked, room = generation_config.max_length, context - input_ids_length
            remedy = f" or give max_new_tokens={room} or less" if room > 0 else ""
            if self.config.mixing_weight == "lags":
                remedy += f", or call model.extend_context({asked}) first"
            raise ValueError(
                f"the prompt has {input_ids_length} tokens and {asked - input_ids_length} new ones "
                f"were asked for, {asked} together; the model's context is {context}: shorten the "
                f"prompt{remedy}"
            )
