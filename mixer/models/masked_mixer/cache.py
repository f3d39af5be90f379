# Copied beside every saved model: it imports from this package only files that are copied too.
"""Generation: what token mixing keeps of earlier tokens, so that a new one costs one row of each
mixing weight, not the triangle; and a decoding step as a CUDA graph.
"""

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import MethodType

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

from mixer.ops.plain import is_seen, last_rows, write_rows

from .configuration import RECURRENT

# What transformers calls a cache among a model's arguments and outputs: `cache` from 5.24 on.
FIELDS = BaseModelOutputWithPast.__dataclass_fields__
CACHE = "cache" if "cache" in FIELDS else "past_key_values"
ModuleId = tuple[int, int]  # the numbers of a block, and of a module in its mixing
Blocks = MethodType  # MaskedMixerModel._blocks
# Columns of a ring beside those that a token reads: so many tokens can be read at once, or dropped.
SPARE = 64
# The streams of deleted graphs, to be used again: torch keeps a cuBLAS workspace for each stream
# that had a product. Newer versions free it with any of the stream's graphs, so a stream has one.
FREE_STREAMS: dict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)


class MixingCache(Cache):
    """What each convolution keeps of a text, by its ModuleId: its last inputs or their sum. Pass
    the cache to `forward` as past_key_values. `length` counts columns of the batch including
    padding, as transformers does; `positions` (batch or 1, new) int64 are those of the new tokens,
    -1 for padding, of which there is some if `has_padding`.

    Inputs are kept in a ring: the token at position p in column p % columns. There are as many
    columns as a token reads, and SPARE, so memory and time of a token do not grow with the text.

    static: shapes do not change between decoding steps. On one GPU, the first step is captured as a
    CUDA graph and replayed for later steps, even after `reset()`, until the parameters move or the
    batch size changes. Module hooks do not run in the graph. After adding or merging an adapter, or
    replacing parameters by load_state_dict with assign=True, create a new cache.

    room: the most tokens of a text, for less memory where that is less than a token reads; by
    default there is no such limit.
    """

    positions: Tensor  # set by the model before its blocks read tokens

    def __init__(self, config, static: bool = False, room: int = 0):
        super().__init__(layers=[])
        self.config = config
        self.static = static
        self.room = room or math.inf
        self.length = 0
        self.longest = 0  # length that this text has had, before tokens were dropped
        self.memories: dict[ModuleId, Tensor] = {}
        # The model's result of each text's last token, (batch, channels), which padding repeats;
        # None where there is none, or that token was dropped.
        self.last: Tensor | None = None
        # How many tokens each text has, (batch, 1), or an int where those are all columns; None
        # where it is not known, after padding was dropped.
        self.tokens: Tensor | int | None = 0
        self.has_padding = False
        self.captured: CapturedStep | None = None
        # What follows from the new tokens' positions alone, and so is the same for many modules.
        self.of_step: dict[tuple, Tensor] = {}

    @property
    def is_empty(self) -> bool:
        return self.length == 0

    @property
    def longest_text(self) -> float:
        """The most tokens that the cache takes."""
        return self.room if self.is_croppable else math.inf

    def memory(self, module_id: ModuleId, shape: tuple, x: Tensor, dtype: torch.dtype) -> Tensor:
        """A module's memory: zeros for a new text, or what an earlier text left."""
        if self.is_empty:
            memory = self.memories.get(module_id)
            fits = (
                memory is not None
                and memory.shape == shape
                and memory.dtype == dtype
                and memory.device == x.device
            )
            if not fits:
                self.memories[module_id] = x.new_zeros(shape, dtype=dtype)
        return self.memory_in(module_id, dtype)

    def memory_in(self, module_id: ModuleId, dtype: torch.dtype) -> Tensor:
        """A module's memory, from now on in this dtype: a text that began under autocast may go on
        without it, or the other way round.
        """
        memory = self.memories[module_id]
        if memory.dtype != dtype:
            memory = memory.to(dtype)
            self.memories[module_id] = memory
        return memory

    def append(self, module_id: ModuleId, new: Tensor, reach: int) -> Tensor:
        """Keeps inputs (batch, heads, new, channels of a head) of which a token reads the last
        `reach`; returns the columns so far (`extended`).
        """
        batch, heads, tokens, channels = new.shape
        columns = int(min(reach + SPARE, self.room, self.config.longest_text))
        memory = self.memory(module_id, (batch, heads, columns, channels), new, new.dtype)
        if self.is_empty:
            memory[:, :, :tokens].copy_(last_rows(new, self.positions, columns))
        else:
            is_token = self.positions >= 0 if self.has_padding else None
            write_rows(memory, new, self._columns_of_new(columns), is_token)
        return self.extended(memory, tokens)

    def extended(self, memory: Tensor, new: int) -> Tensor:
        """A memory's columns of the tokens so far, and of `new` more: (batch, heads, columns,
        channels of a head); all columns if the cache is static.
        """
        return memory if self.static else memory[:, :, : self.length + new]

    def forget_step(self) -> None:
        """Before the blocks read new tokens, and after it."""
        self.of_step = {}

    def _once(self, name: str, numbers: tuple[int, ...], compute: Callable[[], Tensor]) -> Tensor:
        """What `compute` returns, once a step for all modules on a device with the same numbers.
        These must not change from step to step, or compiled code would be compiled anew for each.
        """
        key = (name, numbers, self.positions.device)
        if key not in self.of_step:
            self.of_step[key] = compute()
        return self.of_step[key]

    def _columns_of_new(self, columns: int) -> Tensor:
        """The new tokens' columns of a ring, (batch or 1, new): each has its own, padding too."""

        def compute() -> Tensor:
            number = torch.arange(self.positions.shape[1], device=self.positions.device)
            return (self.positions[:, :1] + number) % columns

        return self._once("columns", (columns,), compute)

    def lags(self, module_id: ModuleId, inputs: Tensor) -> Tensor:
        """How far before each new token the token of a column stands, of inputs that `extended` has
        returned: (batch or 1, new, columns) int64; -1 if the column has no token of this text.
        """
        columns = self.memories[module_id].shape[2]
        extent = inputs.shape[2]

        def compute() -> Tensor:
            position = self.positions.clamp(min=0)[..., None]
            lag = (position - torch.arange(extent, device=position.device)) % columns
            return lag.where(lag <= position, -1)

        return self._once("lags", (columns,), compute)

    def seen(self, module_id: ModuleId, inputs: Tensor, context: int) -> Tensor:
        """Which columns of inputs that `extended` has returned have one of the last `context`
        tokens up to each new one: (batch or 1, 1, new, columns) bool.
        """
        numbers = (self.memories[module_id].shape[2], context)
        return self._once("seen", numbers, lambda: is_seen(self.lags(module_id, inputs), context))

    def previous(self, module_id: ModuleId) -> Tensor:
        """What the token before each new one has in a memory of one head: (batch, new, channels);
        zeros for the first token.
        """
        memory = self.memories[module_id][:, 0]  # (batch, columns, channels)
        columns = memory.shape[1]
        column = self._once("previous", (columns,), lambda: (self.positions - 1) % columns)
        values = memory.gather(1, column[..., None].expand(len(memory), -1, memory.shape[2]))
        return values.masked_fill(self.positions[..., None] <= 0, 0)

    def clamped(self, last: int) -> Tensor:
        """The new tokens' positions, those past `last` as `last` and padding as 0."""
        return self._once("clamped", (last,), lambda: self.positions.clamp(0, last))

    def last_of_texts(self, x: Tensor, earlier: Tensor) -> Tensor:
        """Of x (batch, new, channels), what each text's last new token has, or `earlier` (batch,
        channels) where all are padding, which stands behind the tokens.
        """
        if not self.has_padding:
            return x[:, -1]
        count = self._once("count", (), lambda: (self.positions >= 0).sum(1)[:, None])
        number = self._once("last", (), lambda: (count - 1).clamp(min=0)[..., None])
        last = x.gather(1, number.expand(len(x), 1, x.shape[2]))[:, 0]
        return last.where(count > 0, earlier)

    def in_order(self, module_id: ModuleId, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs that `append` has returned, from the earliest token that has a column on, and that
        token's position: (batch, heads, columns, channels of a head), (batch or 1, 1).
        """
        columns = self.memories[module_id].shape[2]
        last = self.positions.amax(1, keepdim=True)
        first = (last + 1 - columns).clamp(min=0)
        column = torch.arange(inputs.shape[2], device=inputs.device)
        source = ((first + column) % columns)[:, None, :, None]
        return inputs.gather(2, source.expand_as(inputs)), first

    def run(self, blocks: Blocks, input_ids: Tensor, states: list[Tensor] | None) -> Tensor:
        """blocks(input_ids, self, states), from a CUDA graph where that is possible. More tokens
        than a ring has columns to spare are read in chunks.
        """
        if self.is_empty or input_ids.shape[1] <= SPARE:
            return self._run_chunk(blocks, input_ids, states)
        outputs = []
        states_of_chunks = []
        ids_and_positions = zip(
            input_ids.split(SPARE, 1), self.positions.split(SPARE, 1), strict=True
        )
        for chunk_ids, chunk_positions in ids_and_positions:
            self.positions = chunk_positions
            chunk_states = None if states is None else []
            outputs.append(self._run_chunk(blocks, chunk_ids, chunk_states))
            states_of_chunks.append(chunk_states)
        if states is not None:
            for states_of_block in zip(*states_of_chunks, strict=True):
                states.append(torch.cat(states_of_block, 1))
        return torch.cat(outputs, 1)

    def _run_chunk(self, blocks: Blocks, input_ids: Tensor, states: list[Tensor] | None) -> Tensor:
        if self.static and not self.is_empty and states is None and can_capture(input_ids):
            x = self._captured(blocks, input_ids)
        else:
            x = blocks(input_ids, self, states)
        self.length += input_ids.shape[1]
        self.longest = max(self.longest, self.length)
        return x

    def _captured(self, blocks: Blocks, input_ids: Tensor) -> Tensor:
        if self.captured is not None and self.captured.fits(blocks, input_ids, self):
            return self.captured(input_ids, self.positions)
        if any(p.device != input_ids.device for p in parameters_of(blocks)):
            return blocks(input_ids, self)  # hooks bring them for each step
        self.captured = CapturedStep(blocks, input_ids, self)
        return self.captured.first

    def reset(self) -> None:
        self.length = self.longest = self.tokens = 0
        self.last = None
        for memory in self.memories.values():
            memory.zero_()

    @property
    def is_linear(self) -> list[bool]:
        """What transformers asks of each layer: of linear ones, it would not cut the input."""
        return [False]

    @property
    def is_croppable(self) -> bool:
        return self.config.mixing_weight not in RECURRENT

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last -tokens_to_remove columns; transformers 5.4 passes the length to keep."""
        if not self.is_croppable:
            raise ValueError(
                "a recurrent mixing weight keeps a sum, which cannot forget tokens: leave out "
                "prompt lookup and assistants"
            )
        remaining = tokens_to_remove if tokens_to_remove > 0 else self.length + tokens_to_remove
        if remaining < 0:
            raise ValueError(
                f"the last {-tokens_to_remove} tokens were to be dropped, and the cache has "
                f"{self.length}: give at most as many"
            )
        columns = min((memory.shape[2] for memory in self.memories.values()), default=math.inf)
        if self.longest > columns and self.longest - remaining > SPARE:
            dropped = self.longest - remaining
            raise ValueError(
                f"the last {dropped} of {self.longest} tokens were to be dropped; allowed: {SPARE} "
                "at most, because more have overwritten what the others need. Let no more be "
                "guessed: set prompt_lookup_num_tokens, or the assistant's generation_config."
                "num_assistant_tokens with num_assistant_tokens_schedule='constant'. Or call "
                "reset() and give the text anew"
            )
        if remaining < self.length:
            self.length = remaining
            self.last = None
            self.tokens = remaining if isinstance(self.tokens, int) else None

    @property
    def batch(self) -> int:
        """How many texts there are; 0 before the first token."""
        return 0 if self.is_empty else len(next(iter(self.memories.values())))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each text, such as a prompt that several texts continue."""
        self.batch_select_indices(torch.arange(self.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.memories = {
            module_id: memory[indices.to(memory.device)]
            for module_id, memory in self.memories.items()
        }
        self._select_rows(indices)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Text b becomes what text beam_idx[b] was, in place: a captured step writes here."""
        for memory in self.memories.values():
            memory.copy_(memory.index_select(0, beam_idx.to(memory.device)))
        self._select_rows(beam_idx)

    def _select_rows(self, indices: Tensor) -> None:
        if self.last is not None:
            self.last = self.last[indices.to(self.last.device)]
        if isinstance(self.tokens, Tensor):
            self.tokens = self.tokens[indices.to(self.tokens.device)]

    def may_have(self, tokens: Tensor | int) -> bool:
        """Whether the texts may have so many tokens, (batch, 1), or each so many."""
        is_equal = self.tokens is None or tokens == self.tokens
        return is_equal if isinstance(is_equal, bool) else bool(is_equal.all())

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length


class CapturedStep:
    """The blocks' work on one new token of each text as a graph: a replay launches all kernels at
    once, for which the host would need longer than the GPU. A step's inputs are copied into tensors
    of the graph. Parameters and cache are read where they are, also after training changes them.
    """

    def __init__(self, blocks: Blocks, input_ids: Tensor, cache: MixingCache):
        """Runs the first step, whose result is `first`, and captures it for later ones."""
        self.blocks = blocks
        self.addresses = [(p, p.data_ptr()) for p in parameters_of(blocks)]
        self.input_ids = input_ids.clone()
        self.positions = cache.positions.clone()
        cache.positions = self.positions
        self.has_padding = cache.has_padding  # without it, the graph writes each token
        self.graph = torch.cuda.CUDAGraph()
        device = input_ids.device
        current = torch.cuda.current_stream(device)
        free = FREE_STREAMS[device]
        stream = free.pop() if free else torch.cuda.Stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self.first = blocks(self.input_ids, cache)  # sets up what kernels and libraries need
        current.wait_stream(stream)
        # A reference keeps these tensors alive: the graph writes to their memory.
        self.memories = list(cache.memories.values())
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            self.x = blocks(self.input_ids, cache)  # (batch, 1, channels); recorded, not computed
        weakref.finalize(self, free.append, stream)

    def fits(self, blocks: Blocks, input_ids: Tensor, cache: MixingCache) -> bool:
        """Whether model, cache, shapes and padding are this graph's, and all tensors where they
        were.
        """
        shapes = (input_ids.shape, cache.positions.shape)
        return (
            blocks == self.blocks
            and cache.has_padding == self.has_padding
            and shapes == (self.input_ids.shape, self.positions.shape)
            and list(map(id, cache.memories.values())) == list(map(id, self.memories))
            and all(parameter.data_ptr() == address for parameter, address in self.addresses)
        )

    def __deepcopy__(self, memo: dict) -> None:
        """A copy is None: a copied cache has its own memories, and captures a step on them."""

    def __call__(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        self.input_ids.copy_(input_ids)
        self.positions.copy_(positions)
        self.graph.replay()
        return self.x.clone()  # because the next replay overwrites x


def parameters_of(blocks: Blocks) -> Iterator[nn.Parameter]:
    model = blocks.__self__
    assert isinstance(model, nn.Module)
    return model.parameters()


def can_capture(input_ids: Tensor) -> bool:
    """One token of each text on a GPU, without gradients, autocast, compiler or another capture."""
    return (input_ids.is_cuda and input_ids.shape[1] == 1) and not (
        torch.is_grad_enabled()
        or torch.is_autocast_enabled("cuda")
        or torch.compiler.is_compiling()
        or torch.cuda.is_current_stream_capturing()
    )
