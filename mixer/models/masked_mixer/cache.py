"""The cache of generation: what the token mixings of a model keep of a text, so that a new token
costs one row of each mixing weight instead of the whole triangle.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.cache_utils import Cache

from mixer.ops.plain import write_rows

from .captured_step import Blocks, CapturedStep, can_capture
from .configuration import RECURRENT

Place = tuple[int, int]  # the numbers of a block, and of a module in its mixing


class Past(NamedTuple):  # so accelerate moves its tensor to a block's device
    """The tokens before new ones, of which a cache keeps what each convolution needs, and where the
    new ones stand: `positions` (batch or 1, new) int64. A place is that of a convolution.
    """

    cache: "MixingCache"
    positions: Tensor

    @property
    def is_empty(self) -> bool:
        return self.cache.length == 0

    def update(self, place: Place, new: Tensor) -> Tensor:
        """Keeps the inputs of the new tokens, (batch, heads, new, channels of a head). Returns
        those of all tokens so far, as `extended`.
        """
        batch, heads, tokens, channels = new.shape
        context = self.cache.config.longest_text
        self._allocate(place, (batch, heads, context, channels), new, new.dtype)
        inputs = self.extended(place, tokens)
        write_rows(inputs, new, self.positions)
        return inputs

    def extended(self, place: Place, new: int) -> Tensor:
        """The inputs of all tokens so far, and `new` more for the caller to write: (batch, heads,
        length, channels of a head), where length is the whole context if the cache is static.
        """
        kept = self.cache.kept[place]
        return kept if self.cache.static else kept[:, :, : self.cache.length + new]

    def sums(self, place: Place, x: Tensor) -> Tensor:
        """The running sum of a recurrence, (batch, channels) in fp32 or wider, for the caller to
        add x (batch, new, channels) to in place.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        self._allocate(place, (x.shape[0], x.shape[2]), x, wide)
        return self.cache.kept[place]

    def _allocate(self, place: Place, shape: tuple, x: Tensor, dtype: torch.dtype) -> None:
        """Where a text begins, unless what an earlier one left serves."""
        kept, wanted = self.cache.kept.get(place), (shape, dtype, x.device)
        if self.is_empty and (kept is None or (kept.shape, kept.dtype, kept.device) != wanted):
            self.cache.kept[place] = x.new_zeros(shape, dtype=dtype)


class MixingCache(Cache):
    """What each convolution of a model keeps of a text, by its place: its inputs or their sum. Give
    it to `forward` as past_key_values. `length` counts the columns of the batch with their padding,
    as transformers counts them.

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
        self.kept: dict[Place, Tensor] = {}

    def step(self, blocks: Blocks, input_ids: Tensor, past: Past) -> Tensor:
        """blocks(input_ids, past) for one new token of each text, from a CUDA graph where that is
        possible: `blocks` is a method of the model, which is on one GPU.
        """
        if not self.static or not can_capture(input_ids):
            return blocks(input_ids, past)
        if self.captured is None or not self.captured.fits(blocks, input_ids, past):
            parameters = blocks.__self__.parameters()
            if any(parameter.device != input_ids.device for parameter in parameters):
                return blocks(input_ids, past)  # hooks bring them for each step
            self.captured = CapturedStep(blocks, input_ids, past)
            return self.captured.first
        return self.captured(input_ids, past)

    def reset(self) -> None:
        self.length = 0
        for kept in self.kept.values():
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
        for kept in self.kept.values():
            kept.copy_(kept.index_select(0, beam_idx.to(kept.device)))

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
