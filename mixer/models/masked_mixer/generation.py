"""What `generate()` of transformers needs from the model: its kind of cache, and a clear error for
prompts that cannot be continued.
"""

from transformers import GenerationMixin

from .cache import MixingCache


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
            model_kwargs["past_key_values"] = MixingCache(self.config, static)

    def _validate_generated_length(self, generation_config, input_ids_length, *args):
        super()._validate_generated_length(generation_config, input_ids_length, *args)
        asked, context = generation_config.max_length, self.config.longest_text
        if asked > context:
            by_lag = self.config.mixing_weight == "lags"
            longer = f", or call model.extend_context({asked})" if by_lag else ""
            raise ValueError(
                f"the prompt has {input_ids_length} tokens and {asked - input_ids_length} new ones "
                f"were asked for, {asked} together; the model's context is {context}: shorten the "
                f"prompt, or give a smaller max_new_tokens{longer}"
            )
