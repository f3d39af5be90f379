"""A decoding step as a CUDA graph: captured once, then replayed for each later token.

A step consists of many small kernels, and the host may need longer to launch them than the GPU to
run them. A replay launches all of them at once.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# (input_ids, past) -> (batch, 1, channels); see MaskedMixerModel and Past in cache.py.
Blocks = Callable[[Tensor, Any], Tensor]
# For each device, the streams whose graph has been deleted. torch keeps a cuBLAS workspace for each
# stream that was used for a product, so streams are used again. Newer versions free the workspace
# with any graph that was captured on the stream, so two living graphs never share a stream.
FREE_STREAMS: dict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)


class CapturedStep:
    """The work of a model's blocks on one new token of each text, as a graph.

    The inputs of a step, input_ids (batch, 1) and positions (batch or 1, 1), both int64, are copied
    into tensors of the graph. The graph reads the parameters and the cache where they are, so it
    sees when training changes the parameters.
    """

    def __init__(self, blocks: Blocks, input_ids: Tensor, past):
        """Runs the first step, whose result is `first`, and captures it for later ones. `blocks` is
        a method of the model.
        """
        self.blocks = blocks
        self.addresses = [
            (parameter, parameter.data_ptr()) for parameter in blocks.__self__.parameters()
        ]
        self.input_ids, self.positions = input_ids.clone(), past.positions.clone()
        # A reference keeps these tensors alive: the graph writes to their memory.
        self.kept = list(past.cache.kept.values())
        device, self.graph = input_ids.device, torch.cuda.CUDAGraph()
        free, current = FREE_STREAMS[device], torch.cuda.current_stream(device)
        stream = free.pop() if free else torch.cuda.Stream(device)
        step = (self.input_ids, past._replace(positions=self.positions))
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self.first = blocks(*step)  # sets up what kernels and libraries need, too
        current.wait_stream(stream)
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            self.x = blocks(*step)  # (batch, 1, channels); recorded, not computed
        weakref.finalize(self, free.append, stream)

    def fits(self, blocks: Blocks, input_ids: Tensor, past) -> bool:
        """Whether this graph is of this model, this cache and these shapes, and all tensors are
        where they were.
        """
        shapes = (input_ids.shape, past.positions.shape)
        if blocks != self.blocks or shapes != (self.input_ids.shape, self.positions.shape):
            return False
        if list(map(id, past.cache.kept.values())) != list(map(id, self.kept)):
            return False
        return all(parameter.data_ptr() == address for parameter, address in self.addresses)

    def __deepcopy__(self, memo: dict) -> None:
        """A copy is None: a copied cache has its own memories, and captures a step on them."""

    def __call__(self, input_ids: Tensor, past) -> Tensor:
        self.input_ids.copy_(input_ids)
        self.positions.copy_(past.positions)
        self.graph.replay()
        return self.x.clone()  # because the next replay overwrites x


def can_capture(input_ids: Tensor) -> bool:
    """Whether a step on these tokens can be captured: on a GPU, without gradients or autocast, and
    not inside another capture or a compiled function.
    """
    return (
        input_ids.is_cuda
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cuda")
        and not torch.compiler.is_compiling()
        and not torch.cuda.is_current_stream_capturing()
    )
