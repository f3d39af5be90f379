"""The cache of generation: what the token mixings of a model keep of a text, so that a new token
costs one row of each mixing weight instead of the whole triangle.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.cache_utils import Cache

from mixer.ops.plain import write_rows

from .captured_step import CapturedStep, can_capture
from .configuration import RECURRENT


class Memory:
    """What one convolution keeps, in `kept`: the inputs of the tokens in a cache, (batch, heads,
    context, channels of a head), or a running sum of them, (batch, channels).
    """

    def __init__(self, cache: "MixingCache"):
        self.cache, self.kept = cache, None

    @property
    def is_empty(self) -> bool:
        """Whether no tokens stand before the new ones."""
        return self.cache.length == 0

    def update(self, new: Tensor, positions: Tensor) -> Tensor:
        """Writes the inputs of new tokens, (batch, heads, new, channels of a head), at `positions`
        (batch or 1, new). Returns those of all tokens so far, as `extended`.
        """
        batch, heads, tokens, channels = new.shape
        self._allocate((batch, heads, self.cache.config.longest_text, channels), new, new.dtype)
        inputs = self.extended(tokens)
        write_rows(inputs, new, positions)
        return inputs

    def extended(self, new: int) -> Tensor:
        """The inputs of all tokens so far, and `new` more for the caller to write: (batch, heads,
        length, channels of a head), where length is the whole context if the cache is static.
        """
        return self.kept if self.cache.static else self.kept[:, :, : self.cache.length + new]

    def sums(self, x: Tensor) -> Tensor:
        """The sums, fp32 or wider, for the caller to add x (batch, new, channels) to in place."""
        wide = torch.promote_types(x.dtype, torch.float32)
        self._allocate((x.shape[0], x.shape[2]), x, wide)
        return self.kept

    def _allocate(self, shape: tuple[int, ...], x: Tensor, dtype: torch.dtype) -> None:
        """Where a text begins, unless what an earlier one left serves."""
        kept, wanted = self.kept, (shape, dtype, x.device)
        if self.is_empty and (kept is None or (kept.shape, kept.dtype, kept.device) != wanted):
            self.kept = x.new_zeros(shape, dtype=dtype)


class MixingCache(Cache):
    """A Memory for each convolution of a model, block after block. Give it to `forward` as
    past_key_values. `length` counts the columns of the batch with their padding, as transformers
    counts them.

    static: no shape changes from one decoding step to the next. On one GPU, the first such step is
    captured as a CUDA graph, which is replayed for all later ones. `generate(...,
    cache_implementation="static")` makes such a cache. The graph stays with the cache, also after
    `reset()`; it is captured again if the parameters have moved or the batch has another size.
    Hooks on modules do not run in it. Adapters that are added or merged later, and parameters that
    are replaced by others (load_state_dict with assign=True), need a new cache.
    """

    is_compileable = False  # by transformers, which captures nothing here

    def __init__(self, config, static: bool = False):
        super().__init__(layers=[])
        self.config, self.static, self.length, self.captured = config, static, 0, None

    def memories(self, count: int) -> list[Memory]:
        """A memory for each of `count` convolutions, made at the first call."""
        self.layers = self.layers or [Memory(self) for _ in range(count)]
        return self.layers

    def step(self, blocks: Callable[..., Tensor], input_ids: Tensor, positions: Tensor) -> Tensor:
        """blocks(input_ids, memories, positions) for one new token of each text, from a CUDA graph
        where that is possible: `blocks` is a method of the model, which is on one GPU.
        """
        if not self.static or not can_capture(input_ids):
            return blocks(input_ids, self.layers, positions)
        if self.captured is None or not self.captured.fits(blocks, self, input_ids, positions):
            parameters = blocks.__self__.parameters()
            if any(parameter.device != input_ids.device for parameter in parameters):
                return blocks(input_ids, self.layers, positions)  # hooks bring them for each step
            self.captured = CapturedStep(blocks, self, input_ids, positions)
            return self.captured.first
        return self.captured(input_ids, positions)

    def reset(self) -> None:
        self.length = 0
        for kept in self._kept():
            kept.zero_()

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last -tokens_to_remove columns. A number above zero is the length to keep, as
        in transformers 5.4.
        """
        if not self.is_croppable:
            raise ValueError(
                "a recurrent mixing weight keeps a sum, which cannot forget tokens: leave out "
                "prompt lookup and assistants"
            )
        kept = tokens_to_remove if tokens_to_remove > 0 else self.length + tokens_to_remove
        self.length = min(kept, self.length)

    @property
    def is_croppable(self) -> bool:
        return self.config.mixing_weight not in RECURRENT

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Text b becomes what text beam_idx[b] was, in place: a captured step writes here."""
        for kept in self._kept():
            kept.copy_(kept.index_select(0, beam_idx.to(kept.device)))

    def _kept(self) -> list[Tensor]:
        return [memory.kept for memory in self.layers if memory.kept is not None]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.config.longest_text if self.is_croppable else -1  # -1: no limit

    get_max_cache_shape = get_max_length  # the name in transformers 5.4


class Generation(GenerationMixin):
    """The part of MaskedMixerForCausalLM that changes how `generate()` prepares and checks its
    work.
    """

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args):
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            static = generation_config.cache_implementation == "static"
            model_kwargs["past_key_values"] = MixingCache(self.config, static)
        else:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)

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
