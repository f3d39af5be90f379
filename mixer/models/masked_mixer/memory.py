"""What one triangular convolution keeps while a text is generated: its inputs, or a running sum.

A new token is mixed with all tokens before it, so generation keeps what the convolution was given
for each of them. A new token then costs one row of the mixing weight instead of the whole triangle.
"""

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
        self.made_for = None  # the batch, dtype and device of what is allocated

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Allocates for inputs like these, unless what an earlier text left serves."""
        made_for = (len(key_states), key_states.dtype, key_states.device)
        if made_for != self.made_for:
            self.keys, self.values = self._zeros(key_states), key_states.new_empty(0)
            self.is_initialized, self.made_for = True, made_for

    def _zeros(self, x: Tensor) -> Tensor:
        batch, heads, _, channels = x.shape
        return x.new_zeros(batch, heads, self.context, channels)

    def update(self, new: Tensor, positions: Tensor) -> Tensor:
        """Writes the inputs of new tokens, (batch, heads, new, channels of a head), at `positions`
        (batch or 1, new). Returns those of all tokens so far, as `extend`.
        """
        if self.cumulative_length == 0:
            self.lazy_initialization(new)
        memory = self.extend(new.shape[2])
        write_rows(memory, new, positions)
        return memory

    def extend(self, new: int) -> Tensor:
        """Counts `new` more tokens, and returns the memory for the caller to write their inputs
        into: (batch, heads, length, channels of a head), where length is the whole context if the
        memory is static.
        """
        self.cumulative_length += new
        return self.keys if self.static else self.keys[:, :, : self.cumulative_length]

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last -tokens_to_remove columns. A number above zero is the length to keep, as
        in transformers 5.4.
        """
        length = self.cumulative_length
        kept = tokens_to_remove if tokens_to_remove > 0 else length + tokens_to_remove
        self.cumulative_length = min(kept, length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Text b becomes what text beam_idx[b] was, in place: a captured step writes here."""
        if self.cumulative_length > 0:
            self.keys.copy_(self.keys.index_select(0, beam_idx.to(self.keys.device)))

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_max_length(self) -> int:
        return self.context

    get_max_cache_shape = get_max_length  # the name in transformers 5.4

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cumulative_length + query_length, 0


class MixingState(MixingMemory):
    """The running sum of a recurrent convolution: `keys` is (batch, channels), fp32 or wider."""

    is_croppable = False

    def __init__(self):
        super().__init__(context=-1)  # transformers' word for no limit

    def _zeros(self, x: Tensor) -> Tensor:
        batch, _, channels = x.shape
        return x.new_zeros(batch, channels, dtype=torch.promote_types(x.dtype, torch.float32))

    def extend(self, x: Tensor) -> Tensor:
        """Counts the new tokens of x, (batch, new, channels), and returns the sum of those before,
        (batch, channels), for the caller to add them to in place.
        """
        if self.cumulative_length == 0:
            self.lazy_initialization(x)
        self.cumulative_length += x.shape[1]
        return self.keys

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError(
            "a recurrent mixing weight keeps a sum, which cannot forget tokens: leave out prompt "
            "lookup and assistants"
        )


Memory = MixingMemory | None


def is_first(memory: Memory) -> bool:
    """Whether no tokens stand before the new ones."""
    return memory is None or memory.get_seq_length() == 0
