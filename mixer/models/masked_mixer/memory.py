"""What one triangular convolution keeps while a text is generated: its inputs, or a running sum.

A new token is mixed with all tokens before it, so generation keeps what the convolution was given
for each of them. A new token then costs one row of the mixing weight instead of the whole triangle.
"""

import math

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from .plain import write_rows


class MixingMemory(CacheLayerMixin):
    """The inputs of one triangular convolution, in the form of a cache layer of transformers.

    `keys` is (batch, heads, context, channels of a head), allocated at the first tokens. `values`
    is empty, because a mixer has none. The length counts the columns of the batch with their
    padding, as transformers counts them.

    static: always read the whole memory, so that no shape changes from one token to the next.
    """

    is_croppable = True

    def __init__(self, context: int, static: bool = False):
        super().__init__()
        self.context, self.static = context, static
        self.cumulative_length = 0  # the name that transformers' own reset() sets to 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size = len(key_states)
        self.keys = self._allocated(key_states)
        self.values = key_states.new_empty(self.batch_size, 0)
        self.is_initialized = True

    def _allocated(self, x: Tensor) -> Tensor:
        batch, heads, _, channels = x.shape
        return x.new_zeros(batch, heads, self.context, channels)

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor | None = None,
        positions: Tensor | None = None,
    ):
        """Writes the inputs of new tokens, (batch, heads, new, channels of a head), at `positions`
        (batch or 1, new), which follow each text.

        Returns the inputs of all tokens so far, (batch, heads, length, channels of a head), and
        None for the values. Raises ValueError beyond the context.
        """
        empty = self.cumulative_length == 0
        if not self.is_initialized or (empty and not self._fits(key_states)):
            self.lazy_initialization(key_states)
        start, new = self.cumulative_length, key_states.shape[2]
        memory = self.extend(new)
        if positions is None or start == 0:
            memory[:, :, start : start + new] = key_states
        else:  # the positions of a padded text are not the columns of the batch
            write_rows(memory, key_states, positions)
        return memory, None

    def _fits(self, key_states: Tensor) -> bool:
        """Whether what was allocated for an earlier text, before a reset, serves these inputs."""
        mine = (self.batch_size, self.dtype, self.device)
        return mine == (len(key_states), key_states.dtype, key_states.device)

    def extend(self, new: int) -> Tensor:
        """Counts `new` more tokens, and returns the memory for the caller to write their inputs
        into: (batch, heads, length, channels of a head), where length is the whole context if the
        memory is static. Raises ValueError beyond the context.
        """
        end = self.cumulative_length + new
        if end > self.context:
            raise ValueError(
                f"{end} tokens are more than the cache's {self.context}, the model's context; "
                "generate fewer"
            )
        self.cumulative_length = end
        return self.keys if self.static else self.keys[:, :, :end]

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last -tokens_to_remove columns. A number above zero is the length to keep, as
        in transformers 5.0.
        """
        length = self.cumulative_length
        kept = tokens_to_remove if tokens_to_remove > 0 else length + tokens_to_remove
        self.cumulative_length = min(kept, length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Text b becomes what text beam_idx[b] was. This is done in place, because a captured step
        writes to this memory.
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

    get_max_cache_shape = get_max_length  # the name in the first versions of transformers 5

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cumulative_length + query_length, 0


class MixingState(MixingMemory):
    """The running sum of a recurrent convolution, in the form of a cache layer of transformers:
    `keys` is (batch, channels), fp32 or wider. Tokens in a sum cannot be taken out again.
    """

    is_croppable = False

    def __init__(self):
        super().__init__(context=math.inf)

    def _allocated(self, x: Tensor) -> Tensor:
        batch, _, channels = x.shape
        return x.new_zeros(batch, channels, dtype=torch.promote_types(x.dtype, torch.float32))

    def extend(self, x: Tensor) -> Tensor:
        """Counts the new tokens of x, (batch, new, channels), and returns the sum of those before,
        (batch, channels), for the caller to add them to in place.
        """
        if not self.is_initialized or (self.cumulative_length == 0 and not self._fits(x)):
            self.lazy_initialization(x)
        self.cumulative_length += x.shape[1]
        return self.keys

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.cumulative_length > 0:
            self.keys.copy_(self.keys.index_select(0, beam_idx.to(self.keys.device)))

    def get_max_length(self) -> int:
        return -1  # transformers' word for none

    get_max_cache_shape = get_max_length


# What a convolution keeps of earlier tokens: nothing, a MixingMemory that counts its tokens, or the
# bare tensor of one whose tokens are counted elsewhere (in a captured decoding step).
Memory = MixingMemory | Tensor | None


def is_first(memory: Memory) -> bool:
    """Whether no tokens stand before the new ones."""
    return memory is None or not isinstance(memory, Tensor) and memory.get_seq_length() == 0


def remember(memory: MixingMemory | Tensor, new: Tensor, positions: Tensor | None) -> Tensor:
    """Writes the inputs of new tokens, (batch, heads, new, channels of a head), into a memory;
    returns those of all tokens so far, (batch, heads, length, channels of a head).
    """
    if isinstance(memory, MixingMemory):
        return memory.update(new, positions=positions)[0]
    write_rows(memory, new, positions)
    return memory
