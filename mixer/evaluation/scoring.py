"""How a model is scored on token streams: by which processes, in which windows, and whether it is
causal, as its scores take it to be.

A window is at most `context` tokens long, windows begin `stride` tokens apart, and each counts the
targets that no earlier one has scored: every token but the first of a stream, once. A stride below
the context gives all targets after the first window at least `context - stride + 1` tokens to look
back on. A stream's last window is shorter than the others ("short"), or begins earlier to be as
long ("full", as in lm-evaluation-harness).
"""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from mixer.common.errors import UserError
from mixer.common.hardware import lacks_bf16, sees_gpu
from mixer.common.ranks import processes
from mixer.data.samples import Batch
from mixer.distributed.world import Process
from mixer.models.architecture import CAUSAL_TOLERANCE, logits_before


def choose_device(name: str, dtype: str) -> torch.device:
    """The device of a name in config.DEVICES. Raises UserError where it is not there, or lacks
    `dtype`."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda, but PyTorch sees no GPU: use cpu, or ask `mixer doctor`")
    device = torch.device("cuda" if name != "cpu" and sees_gpu() else "cpu")
    if dtype == "bf16" and (gpu := lacks_bf16(device)):
        raise UserError(f"{gpu} has no bf16 arithmetic: use --dtype fp16 or --dtype fp32")
    return device


def devices_in_words(device: torch.device) -> str:
    """What the processes of this launch compute on, such as "2 x cpu"; `device`: this one's."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return f"{processes()} x {name}" if processes() > 1 else name


def join_processes(device: torch.device) -> Process:
    """Joins this process's launch (`accelerate launch`, torchrun), if there is one."""
    if processes() == 1:
        return Process(device)
    state = PartialState(cpu=device.type == "cpu")
    assert state.device is not None
    return Process(state.device, state.process_index, state.num_processes)


def context_of(model: PreTrainedModel) -> int | None:
    """The tokens that a model was made for; None where its configuration does not say, as with the
    -1 of models without an end.
    """
    length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return length if isinstance(length, int) and length > 0 else None


def check_length(tokens: int, model: PreTrainedModel, checkpoint: str | Path, request: str) -> None:
    """Raises UserError if a model reads fewer tokens. Its message begins with the `request`, such
    as "--window is 512".
    """
    context = context_of(model) or tokens
    if tokens > getattr(model.config, "longest_text", context):
        problem = f"{request}, but the context of {checkpoint} is {context}: ask for fewer tokens"
        if hasattr(model.config, "mixing_weight"):
            problem += ", or convert to weights by lag, which changes a model with full weights: "
            problem += f"mixer convert {checkpoint} --output DIR --mixing-weight lags"
        raise UserError(problem)


def window_batches(
    streams: Iterable[np.ndarray], context: int, stride: int, size: int, last_window: str
) -> Iterator[Batch]:
    """Batches of `size` windows: inputs and targets, (batch, longest window) int64; targets that do
    not count are -100. Padding is on the right: it changes no logit of a causal model.
    """

    def windows() -> Iterator[tuple[Tensor, int]]:
        """The tokens of a window with its last target, and the first position that counts."""
        for tokens in streams:
            targets = len(tokens) - 1
            scored = 0
            for begin in range(0, targets, stride):
                end = min(begin + context, targets)
                start = max(0, end - context) if last_window == "full" else begin
                if scored < end:
                    window = tokens[start : end + 1].astype(np.int64)
                    yield torch.from_numpy(window), scored - start
                    scored = end

    remaining = windows()
    while batch := list(itertools.islice(remaining, size)):
        inputs = pad_sequence([window[:-1] for window, _ in batch], batch_first=True)
        targets = [window[1:] for window, _ in batch]
        targets = pad_sequence(targets, batch_first=True, padding_value=-100)
        first = torch.tensor([first for _, first in batch])[:, None]
        yield inputs, targets.masked_fill(torch.arange(targets.shape[1]) < first, -100)


def check_vectors(numbers: Tensor | float) -> None:
    """Raises UserError where the vectors of texts, or a loss of them, are not finite."""
    if not torch.as_tensor(numbers).isfinite().all():
        raise UserError("the vectors are not finite: use --dtype fp32")


def check_causality(model: PreTrainedModel, tokens: np.ndarray, dtype: str) -> None:
    """Raises UserError where logits move before the first of several changed tokens.

    tokens: (tokens,) integers, 2 or more, no longer than the model reads. dtype: that of a name in
    CAUSAL_TOLERANCE.
    """
    ids = torch.from_numpy(tokens.astype(np.int64)).to(model.device)
    before, after = logits_before(model, ids)
    moved = (after - before).abs().max().item()
    if moved > CAUSAL_TOLERANCE[dtype] * before.abs().max().item():
        raise UserError(
            f"the model is not causal: changing the tokens from {len(before)} on moved earlier "
            f"logits by {moved:.3g}; give a causal model"
        )
