"""What generation keeps: the inputs of every token mixing so far, so that a new token needs one row
of the weight alone.

A token keeps the place that it has in its own text, from 0, whatever padding stands around it in
the batch: the mixing weight knows every position, so a padded text must be mixed as if it stood
alone. `Places` says where that is.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from .captured_step import CapturedStep, can_capture
from .plain import write_rows


class MixingMemory(CacheLayerMixin):
    """The inputs of one triangular convolution, as transformers has its cache layers.

    `keys` is (batch, heads, context, channels of a head), allocated once at the first tokens;
    `values`, which a mixer does not have, is empty. The length counts the columns of the batch,
    padding and all, as transformers counts them. A static memory is read whole, so that no shape
    changes from one token to the next.
    """

    is_croppable = True

    def __init__(self, context: int, static: bool = False):
        super().__init__()
        self.context, self.static = context, static
        self.cumulative_length = 0  # transformers' own reset() sets what has this name to 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        batch, heads, _, channels = key_states.shape
        self.dtype, self.device, self.batch_size = key_states.dtype, key_states.device, batch
        self.keys = key_states.new_zeros(batch, heads, self.context, channels)
        self.values = key_states.new_empty(batch, 0)
        self.is_initialized = True

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor | None = None,
        positions: Tensor | None = None,
    ):
        """Writes new inputs (batch, heads, new, channels of a head) at `positions` (batch or 1,
        new), which follow on from each text; returns (all up to now (batch, heads, length, channels
        of a head), None). Raises ValueError beyond the context.
        """
        if not self.is_initialized or (
            self.cumulative_length == 0 and not self._is_for(key_states)
        ):
            self.lazy_initialization(key_states)
        start, new = self.cumulative_length, key_states.shape[2]
        memory = self.extend(new)
        if positions is None or start == 0:
            memory[:, :, start : start + new] = key_states
        else:  # of padded texts behind the columns, of one alone, too
            write_rows(memory, key_states, positions)
        return memory, None

    def _is_for(self, key_states: Tensor) -> bool:
        """Whether these fit what was allocated, perhaps for an earlier text, before a reset."""
        mine = (self.batch_size, self.dtype, self.device)
        return mine == (len(key_states), key_states.dtype, key_states.device)

    def extend(self, new: int) -> Tensor:
        """Counts `new` tokens more, whose inputs the caller writes into what this returns: all up
        to them, of a static memory all there is (batch, heads, length, channels of a head). Raises
        ValueError beyond the context.
        """
        end = self.cumulative_length + new
        if end > self.context:
            raise ValueError(
                f"{end} tokens are more than the cache's {self.context}, the model's context; generate fewer"
            )
        self.cumulative_length = end
        return self.keys if self.static else self.keys[:, :, :end]

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last -tokens_to_remove columns; above zero it is the length to keep, as
        transformers 5.0 gives it.
        """
        kept = (
            tokens_to_remove if tokens_to_remove > 0 else self.cumulative_length + tokens_to_remove
        )
        self.cumulative_length = min(kept, self.cumulative_length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sample b becomes what sample beam_idx[b] was, in place: a captured step knows where the
        memory lies.
        """
        if self.cumulative_length > 0:
            used = self.keys[:, :, : self.cumulative_length]
            used.copy_(used.index_select(0, beam_idx.to(used.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._choose(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._choose(indices)

    def _choose(self, indices: Tensor) -> None:
        if self.is_initialized:
            self.keys, self.values = self.keys[indices], self.values[indices]
            self.batch_size = len(self.keys)

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_max_length(self) -> int:
        return self.context

    get_max_cache_shape = get_max_length  # its name in the first versions of transformers 5

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cumulative_length + query_length, 0


class MixingCache(Cache):
    """A MixingMemory for each convolution of a model, block after block; give it to `forward` as
    past_key_values.

    With `static` the shapes of a decoding step never change, and on one GPU the second such step is
    captured as a CUDA graph, which serves all later ones; `generate(...,
    cache_implementation="static")` makes one. The graph lasts as long as the cache, through
    `reset()` too; where parameters have moved or the batch is another, it is captured anew. Hooks
    on modules do not run in it, and adapters that are put on or merged later need a new cache. With
    `compiled` (`generate` with a compile_config beside it) the step goes through torch.compile
    first, which takes seconds.
    """

    def __init__(self, config, static: bool = False, compiled: bool = False):
        self.static, self.compiled, self.stepped, self.captured = static, compiled, False, None
        count = config.num_hidden_layers * (2 if config.mixer_expansion else 1)
        super().__init__(
            layers=[MixingMemory(config.max_position_embeddings, static) for _ in range(count)]
        )

    def set_length(self, length: int) -> None:
        for layer in self.layers:
            layer.cumulative_length = length

    def step(self, blocks: Callable[..., Tensor], input_ids: Tensor, positions: Tensor) -> Tensor:
        """blocks(input_ids, memories, positions) for one new token of each sample, from a captured
        graph where there may be one; `blocks` is a method of the model.
        """
        if not self.static or not can_capture(input_ids):
            return blocks(input_ids, self.layers, positions)
        if self.captured is None or not self.captured.fits(blocks, self, input_ids, positions):
            if (
                not self.stepped
            ):  # the first builds and loads what it needs; a text of two tokens needs no graph
                self.stepped = True
                return blocks(input_ids, self.layers, positions)
            self.captured = CapturedStep(blocks, self, input_ids, positions)
        return self.captured(self, input_ids, positions)


class Places:
    """Where the tokens of a padded batch stand, each in its own text; from a mask (batch, past +
    new) of 1 and 0.

    The model works on `gather(input_ids)`, each text's new tokens at the front and padding behind,
    where no token can see it; `restore` puts the results back. A padded place gets those of the
    last token before it (of the first, where there is none), so that the last column speaks for
    every text: what `generate` reads, whichever side was padded.
    """

    def __init__(self, mask: Tensor, new: int):
        self.starts = (
            mask[:, :-new].bool().sum(1, keepdim=True)
        )  # (batch, 1): tokens of the text that are in the cache
        if new == 1:  # nothing to reorder: each step of generation comes by here
            self.order, self.index = None, torch.zeros_like(self.starts)
            return
        taken = mask[:, -new:].bool()
        self.order = (
            taken.logical_not().to(torch.uint8).argsort(dim=1, stable=True)
        )  # (batch, new): tokens, then padding
        self.index = (taken.cumsum(1) - 1).clamp(
            min=0
        )  # (batch, new): of each column among the gathered

    def gather(self, input_ids: Tensor) -> Tensor:
        return input_ids if self.order is None else input_ids.gather(1, self.order)

    def restore(self, x: Tensor) -> Tensor:
        """x (batch, new, channels) in the order of the columns again."""
        return x if self.order is None else x.gather(1, self.index[..., None].expand_as(x))

    def unpredicted(self) -> Tensor:
        """(batch, new) bool: columns up to each text's first token, which no earlier token
        predicts.
        """
        return self.starts + self.index == 0
