"""Scores a text or pairs of texts with all processes of a launch, and measures time and memory."""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import PreTrainedModel

from mixer.common.errors import UserError, is_launched
from mixer.common.hardware import lacks_bf16, peak_memory_gb
from mixer.data.batches import Batch
from mixer.data.prepared import PairFile
from mixer.evaluation.scoring import TokenScores, evaluate_batches
from mixer.models.retrieval import MOST_PAIRS, pair_vectors, text_vectors, top1

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Process:
    """Where this process computes, and which one of how many it is."""

    device: torch.device
    index: int = 0
    count: int = 1

    def __str__(self) -> str:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        return name if self.count == 1 else f"{self.count} x {name}"


def choose_device(name: str, dtype: str) -> torch.device:
    """The device of a name in DEVICES. Raises UserError where it is not there, or lacks `dtype`."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "device cuda was asked for and PyTorch sees no CUDA device: "
            "use --device cpu, or install a CUDA build"
        )
    device = torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
    if dtype == "bf16" and (name := lacks_bf16(device)):
        raise UserError(f"{name} has no bf16 arithmetic: use --dtype fp16 or --dtype fp32")
    return device


def join_processes(device: torch.device) -> Process:
    """This process's place in its launch (`accelerate launch`, torchrun), if there is one."""
    if not is_launched() or os.environ["WORLD_SIZE"] == "1":
        return Process(device)
    state = PartialState(cpu=device.type == "cpu")
    return Process(state.device, state.process_index, state.num_processes)


def reads(model: PreTrainedModel, tokens: int) -> bool:
    """Whether a model reads so many tokens; one with mixing weights by lag is extended to."""
    context = model.config.get_text_config().max_position_embeddings
    by_lag = getattr(model.config, "mixing_weight", None) == "lags"
    if tokens > context and by_lag:
        model.extend_context(tokens)
    return by_lag or tokens <= getattr(model.config, "longest_text", context)


def measure(
    model: nn.Module,
    batches: Iterable[Batch],
    context: int,
    dtype: torch.dtype | None,
    process: Process,
) -> tuple[TokenScores, dict]:
    """The scores of all processes together, with their throughput and the most memory of any.

    The arguments are those of `evaluate_batches`.
    """
    if process.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(process.device)
    start, share = time.perf_counter(), (process.index, process.count)
    scores = evaluate_batches(model, batches, context, process.device, dtype, share)
    found = [(scores, peak_memory_gb(process.device))]
    scores, memories = zip(*(gather_object(found) if process.count > 1 else found), strict=True)
    scores = TokenScores.total(scores)
    speed = scores.tokens / (time.perf_counter() - start)
    return scores, {"tokens_per_second": speed, "peak_memory_gb": max(memories)}


def find_partners(
    model: PreTrainedModel,
    pairs: PairFile,
    batch_size: int,
    dtype: torch.dtype | None,
    process: Process,
) -> dict:
    """The number of pairs and their `top1`. The processes share the pairs."""

    def embed(*sides: Tensor) -> Tensor:
        with torch.autocast(process.device.type, dtype=dtype, enabled=dtype is not None):
            return torch.stack([text_vectors(model, texts) for texts in sides])

    count, place = min(len(pairs), MOST_PAIRS), (process.device, process.index, process.count)
    vectors = pair_vectors(embed, pairs, count, batch_size, place)
    if process.count > 1:
        torch.distributed.all_reduce(vectors)
    if not vectors.isfinite().all():
        raise UserError(f"the vectors are not finite in {dtype or 'fp32'}: use --dtype fp32")
    return {"pairs": count} | top1(*vectors)
