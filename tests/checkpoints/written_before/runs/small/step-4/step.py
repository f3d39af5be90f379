"""A decoding step as a CUDA graph: captured once, then replayed for each later token without the host's part of it.

It goes with every saved model (mixer/carried.py), so it imports nothing of the package.
"""

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers.utils import logging

logger = logging.get_logger(__name__)

# (input_ids, memories, positions) -> (batch, 1, channels); see MaskedMixerModel.
Blocks = Callable[[Tensor, Sequence[Tensor], Tensor], Tensor]
CAPTURING = threading.Lock()  # torch allows one capture at a time in a process
# By device, streams whose graph is gone. torch keeps a workspace of cuBLAS for each stream that has multiplied, so streams are
# used again; newer versions drop it with any graph captured there, so no two graphs that live share one.
FREE_STREAMS: dict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)


class CapturedStep:
    """The work of a model's blocks on one new token of each sample, on memories that stay where they are.

    What changes from token to token, input_ids (batch, 1) and positions (batch or 1, 1), both int64, is copied into the
    graph's own tensors. The graph reads the model's parameters in place: training may change them.
    """

    def __init__(self, blocks: Blocks, cache, input_ids: Tensor, positions: Tensor):
        """`blocks` is a method of the model."""
        self.blocks = blocks
        self.addresses = [(parameter, parameter.data_ptr()) for parameter in blocks.__self__.parameters()]
        self.input_ids, self.positions = input_ids.clone(), positions.clone()
        self.memories = [layer.keys for layer in cache.layers]  # held: the graph writes to where they are
        self.graph = torch.cuda.CUDAGraph()
        free = FREE_STREAMS[input_ids.device]
        with CAPTURING:
            stream = free.pop() if free else torch.cuda.Stream(input_ids.device)
            self._capture(stream, cache.compiled)
        weakref.finalize(self, free.append, stream)

    def _capture(self, stream: torch.cuda.Stream, compiled: bool) -> None:
        step, current = self.blocks, torch.cuda.current_stream(stream.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            if compiled:
                step = self._compile()
            step(self.input_ids, self.memories, self.positions)  # what libraries set up on first use must not be in the graph
        current.wait_stream(stream)
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            self.x = step(self.input_ids, self.memories, self.positions)  # (batch, 1, channels)

    def _compile(self) -> Blocks:
        """The blocks compiled, tuned for single tokens; as they are where the compiler fails, which it then says."""
        from torch._inductor import config

        options = {"coordinate_descent_tuning": True}
        if hasattr(config.triton, "enable_pdl"):  # on Hopper: a kernel is started while the one before it ends
            options["triton.enable_pdl"] = True
        compiled = torch.compile(self.blocks, fullgraph=True, dynamic=False, options=options)
        try:
            compiled(self.input_ids, self.memories, self.positions)
            return compiled
        except Exception as error:  # whatever it is: if it is not the compiler's, the step without it meets it again
            reason = str(error).strip().partition("\n")[0]
            logger.warning_once(
                f"compile_config: a decoding step could not be compiled, it runs without ({type(error).__name__}: {reason}); "
                "torch.compile needs Triton and a C compiler"
            )
            return self.blocks

    def fits(self, blocks: Blocks, cache, input_ids: Tensor, positions: Tensor) -> bool:
        """Whether this graph does the step that is asked for: the same model, memories and shapes, all where they were."""
        if blocks != self.blocks or input_ids.shape != self.input_ids.shape or positions.shape != self.positions.shape:
            return False
        if any(layer.keys is not memory for layer, memory in zip(cache.layers, self.memories, strict=True)):
            return False
        return all(parameter.data_ptr() == address for parameter, address in self.addresses)

    def __deepcopy__(self, memo: dict) -> None:
        """A copied cache has memories of its own, and captures a step on them."""

    def __call__(self, cache, input_ids: Tensor, positions: Tensor) -> Tensor:
        self.input_ids.copy_(input_ids)
        self.positions.copy_(positions)
        self.graph.replay()
        cache.set_length(cache.get_seq_length() + 1)
        return self.x.clone()  # the next replay overwrites x


def can_capture(input_ids: Tensor) -> bool:
    """Whether a step on this token can be captured here: on a GPU, without gradients, autocast or a capture around it."""
    return (
        input_ids.is_cuda
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cuda")
        and not torch.compiler.is_compiling()
        and not torch.cuda.is_current_stream_capturing()
    )
