"""The model with its loss as one module: what is compiled, wrapped by DDP or FSDP, trained, and
evaluated on a sample of the validation split.
"""

import math

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from transformers import PreTrainedModel

from mixer.data.config import TASKS
from mixer.data.prepare import Data
from mixer.data.samples import to_device
from mixer.distributed.world import World
from mixer.models.retrieval import MOST_PAIRS, info_nce, pair_vectors, text_vectors, top1
from mixer.training.config import RunConfig

Group = dist.ProcessGroup | None  # None for one process


def token_nats(logits: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of each target in nats, fp32; 0 where the target is -100.

    logits: (batch, tokens, vocab); targets: (batch, tokens) int64. Returns (batch, tokens).
    """
    if torch.compiler.is_compiling() and logits.is_cuda:
        return short_token_nats(logits, targets)
    flat = F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none"
    )
    return flat.view_as(targets)


def short_token_nats(logits: Tensor, targets: Tensor) -> Tensor:
    """`token_nats` in fewer operations, only for compiled code, where they become few kernels.

    A power of two is one instruction of a GPU, an exponential nine. And the largest logit of a row
    is found before the sum begins: the compiler's softmax goes on with both at once, by two
    exponentials for each logit.
    """
    wide = logits.float()
    largest = wide.detach().amax(-1, keepdim=True)
    sums = torch.exp2((wide - largest) * (1 / math.log(2))).sum(-1)
    classes = torch.arange(wide.shape[-1], device=wide.device)
    chosen = torch.where(classes == targets[..., None], wide, 0).sum(-1)
    # in brackets: the difference of two large logits is exact, or nearly so
    return torch.where(targets == -100, 0, sums.log() + (largest[..., 0] - chosen))


class Objective(nn.Module):
    """Inputs and targets, each (batch, tokens) int64, -> the nats of each target, (batch, tokens)
    fp32; 0 where the target is -100. In eval mode also whether the target is the likeliest token,
    (batch, tokens) bool; False where the target is -100.

    The logits stay inside the module. When it is compiled, they are kept in the autocast type, and
    converted to fp32 where the loss sums over them.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        # accelerate reads this: the class of the blocks, which FSDP shards one by one.
        self._no_split_modules = model._no_split_modules

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return self.score(self.model(inputs, use_cache=False).logits, targets)

    def score(self, logits: Tensor, targets: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        nats = token_nats(logits, targets)
        return nats if self.training else (nats, logits.argmax(-1) == targets)

    # accelerate calls these two: FSDP shards the embeddings apart from the blocks.

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.model.get_output_embeddings()


class Contrastive(Objective):
    """Queries and targets, (batch, tokens) int64 each with -100 behind the end of a text, -> the
    InfoNCE of each query among the targets of all processes, (batch,) fp32 nats, times the tokens
    of a pair, because the loop divides by tokens. In eval mode -> their vectors (2, batch, hidden).
    """

    def __init__(self, model: PreTrainedModel, temperature: float, processes: Group = None):
        super().__init__(model)
        self.temperature, self.processes = temperature, processes
        if not model.config.tie_word_embeddings:  # without a gradient, for which DDP would wait
            model.get_output_embeddings().requires_grad_(False)

    def forward(self, queries: Tensor, targets: Tensor) -> Tensor:
        tokens, first = 2 * queries.shape[1], 0
        queries, targets = text_vectors(self.model, torch.cat([queries, targets])).chunk(2)
        if not self.training:
            return torch.stack([queries, targets])
        if self.processes is not None:  # targets get gradients from the losses of all processes
            first = len(queries) * dist.get_rank(self.processes)
            targets = torch.cat(all_gather(targets, self.processes))
        return tokens * info_nce(queries, targets, first, self.temperature)


def build_objective(model: PreTrainedModel, run: RunConfig, processes: Group = None) -> Objective:
    """What a run trains; `processes` train it together."""
    if run.is_contrastive:
        return Contrastive(model, run.train.temperature, processes)
    return Objective(model)


def useful_flops(model: PreTrainedModel, run: RunConfig) -> float:
    """Of a training step per token; without an output layer where nothing reads its logits."""
    unread = model.get_output_embeddings().weight.numel() * run.is_contrastive
    return model.flops_per_token()["useful"] - 6.0 * unread


def validate(parallel: nn.Module, data: Data, run: RunConfig, world: World) -> tuple[dict, str]:
    """The entries of metrics.jsonl, and in words what they say beside the loss."""
    samples, batch_size = run.train.eval_samples, run.train.batch_size
    if run.is_contrastive:
        count = min(len(data.validation), samples or MOST_PAIRS, MOST_PAIRS)
        model = world.accelerator.unwrap_model(parallel).eval()  # it gives vectors
        place = world.device, world.rank, world.size
        vectors = world.sum(pair_vectors(model, data.validation, count, batch_size, place))
        model.train()
        loss = info_nce(*vectors, 0, run.train.temperature).mean().item()
        shares = top1(*vectors)
        said = "".join(f"{name.replace('_', ' ')} {share:.1%}, " for name, share in shares.items())
        said += f"{count:,} of {len(data.validation):,} pairs"
        return {"validation_loss": loss, "validation_pairs": count} | shares, said
    found = token_scores(parallel, data, samples, batch_size, world)
    said = f"{found['validation_bits_per_byte']:.4f} bits per byte"
    if run.data.source in TASKS:
        said = f"{found['validation_accuracy']:.2%} right"
    of = data.manifest.splits["validation"].tokens
    return found, f"{said} ({found['validation_tokens']:,} of {of:,} tokens)"


@torch.no_grad()
def token_scores(
    parallel: nn.Module, data: Data, samples: int, batch_size: int, world: World
) -> dict[str, float]:
    """What a line of metrics has of `samples` samples spread evenly over the validation split, 0
    for all: mean nats per target token, bits per byte of their text, the share of targets that are
    the likeliest token, and the number of targets. The processes share the samples.
    """
    validation = data.validation
    samples = min(len(validation), samples or len(validation))
    # nats, right ones, targets, bytes
    totals = torch.zeros(4, dtype=torch.float64, device=world.device)
    model = world.accelerator.unwrap_model(parallel)  # DDP has nothing to synchronise here
    model.eval()
    step = batch_size * world.size
    for start in range(0, samples, step):
        own = range(start, min(start + step, samples))[world.rank :: world.size]
        # Every batch is filled up to one shape, as torch.compile would compile another one anew.
        # A process without samples computes a batch too, as sharded weights need all processes.
        filled = [*own, *[0] * (batch_size - len(own))]
        batch = validation.batch(np.array(filled) * len(validation) // samples)
        scored = batch[1][: len(own)]
        scored = scored[scored != -100]
        nats, right = model(*to_device(batch, world.device))
        totals[0] += nats[: len(own)].sum(dtype=torch.float64)
        totals[1] += right[: len(own)].sum()
        totals[2] += len(scored)
        totals[3] += int(data.token_bytes[scored.numpy()].sum())
    model.train()
    nats, right, count, size = world.sum(totals).tolist()
    return {
        "validation_loss": nats / count,
        "validation_bits_per_byte": nats / math.log(2) / max(size, 1),
        "validation_accuracy": right / count,
        "validation_tokens": int(count),
    }
