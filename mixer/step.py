"""A decoding step as a CUDA graph: captured once, then replayed for each later token without the host's part of it.

It goes with every saved model (mixer/carried.py), so it imports nothing of the package.
"""

from collections.abc import Callable

import torch
from torch import Tensor


class CapturedStep:
    """The work of a model's blocks on one new token of each sample, on memories that stay where they are.

    What changes from token to token, input_ids (batch, 1) and positions (batch or 1, 1), both int64, is copied into the
    graph's own tensors. The graph reads the model's parameters in place: they may change, but not move.
    """

    def __init__(self, blocks: Callable[[Tensor, object, Tensor], Tensor], cache, input_ids: Tensor, positions: Tensor):
        self.input_ids, self.positions = input_ids.clone(), positions.clone()
        self.memories = [layer.keys for layer in cache.layers]  # held: the graph writes to where they are
        self.graph = torch.cuda.CUDAGraph()
        length, stream = cache.get_seq_length(), torch.cuda.Stream(input_ids.device)
        stream.wait_stream(torch.cuda.current_stream(input_ids.device))
        with torch.cuda.stream(stream):
            blocks(self.input_ids, cache, self.positions)  # what libraries set up on first use must not be in the graph
        torch.cuda.current_stream(input_ids.device).wait_stream(stream)
        cache.set_length(length)  # the step writes the same rows each time it is done
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            self.x = blocks(self.input_ids, cache, self.positions)  # (batch, 1, channels)
        cache.set_length(length)

    def fits(self, cache, input_ids: Tensor, positions: Tensor) -> bool:
        """Whether this graph does the step that is asked for: the same memories and shapes."""
        same = (layer.keys is memory for layer, memory in zip(cache.layers, self.memories, strict=True))
        return input_ids.shape == self.input_ids.shape and positions.shape == self.positions.shape and all(same)

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
