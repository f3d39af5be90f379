"""The cache of generation: what the token mixings keep of a text, for all blocks of a model.

A token keeps the position that it has in its own text, counted from 0, whatever padding surrounds
it in the batch. The mixing weight has a row for every position, so a padded text must be mixed as
if it stood alone. `Places` computes these positions from the attention mask.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from .captured_step import CapturedStep, can_capture
from .configuration import RECURRENT
from .memory import MixingMemory, MixingState


class MixingCache(Cache):
    """A MixingMemory for each convolution of a model, block after block. Give it to `forward` as
    past_key_values.

    static: no shape changes from one decoding step to the next. On one GPU, the first such step is
    captured as a CUDA graph, which is replayed for all later ones. `generate(...,
    cache_implementation="static")` makes such a cache. The graph stays with the cache, also after
    `reset()`; it is captured again if the parameters have moved or the batch has another size.
    Hooks on modules do not run in it. Adapters that are added or merged later, and parameters that
    are replaced by others (load_state_dict with assign=True), need a new cache.
    """

    def __init__(self, config, static: bool = False):
        super().__init__(layers=[])
        self.config, self.static, self.captured = config, static, None

    def memories(self, count: int) -> list[MixingMemory]:
        """A memory for each of `count` convolutions, made at the first call."""
        recurrent, context = self.config.mixing_weight in RECURRENT, self.config.longest_text
        while len(self.layers) < count:
            self.layers.append(MixingState() if recurrent else MixingMemory(context, self.static))
        return self.layers

    def set_length(self, length: int) -> None:
        for layer in self.layers:
            layer.cumulative_length = length

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
        return self.captured(self, input_ids, positions)


class Places:
    """Where the tokens of a padded batch stand, each in its own text. Made from an attention mask
    (batch, past + new) of 1 for a token and 0 for padding.

    The model works on `gather(input_ids)`: the new tokens of each text at the front, and padding
    behind them, where no token can see it. `restore` puts the results back into the columns of the
    input. A padded place gets the result of the last token before it, so the last column holds the
    prediction of every text, whichever side is padded. That column is what `generate` reads. Before
    the first token stand zeros: a loss over all columns would learn from anything else there.
    """

    def __init__(self, mask: Tensor, new: int):
        taken = mask[:, -new:].bool()
        # (batch, 1): how many tokens of each text are in the cache
        self.starts = mask[:, :-new].bool().sum(1, keepdim=True)
        self.count = taken.cumsum(1)  # (batch, new): new tokens up to each column
        # (batch, new): for each column, its place among the gathered ones
        self.index = (self.count - 1).clamp(min=0)
        # (batch, new): the columns with tokens, then those with padding. Of one there is no order.
        padding = taken.logical_not().to(torch.uint8)
        self.order = padding.argsort(dim=1, stable=True) if new > 1 else None

    def gather(self, input_ids: Tensor) -> Tensor:
        return input_ids if self.order is None else input_ids.gather(1, self.order)

    def positions(self, mark_padding: bool) -> Tensor:
        """Where the gathered tokens stand, (batch, new) int64. Padding stands behind each text, or
        at -1 if it is to be marked.
        """
        place = torch.arange(self.count.shape[1], device=self.count.device)
        padding = (place >= self.count[:, -1:]) & mark_padding
        return (self.starts + place).masked_fill(padding, -1)

    def restore(self, x: Tensor) -> Tensor:
        """x (batch, new, channels), back in the order of the input's columns."""
        if self.order is None:
            return x
        before = self.starts + self.count == 0  # the first token of all
        return x.gather(1, self.index[..., None].expand_as(x)).masked_fill(before[..., None], 0)

    def unpredicted(self) -> Tensor:
        """(batch, new) bool: the columns up to the first token of each text, which nothing
        predicts.
        """
        return self.starts + self.index == 0
