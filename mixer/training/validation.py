"""What is measured on a sample of the validation split."""

import math

import numpy as np
import torch
from torch import nn

from mixer.data.batches import to_device
from mixer.data.config import TASKS
from mixer.data.run_data import Data, Samples
from mixer.distributed.world import World
from mixer.models.retrieval import MOST_PAIRS, info_nce, pair_vectors, top1
from mixer.training.config import RunConfig


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
    scored = data.validation, data.token_bytes, samples, batch_size
    found = token_scores(parallel, *scored, world)
    said = f"{found['validation_bits_per_byte']:.4f} bits per byte"
    if run.data.source in TASKS:
        said = f"{found['validation_accuracy']:.2%} right"
    of = data.manifest.splits["validation"].tokens
    return found, f"{said} ({found['validation_tokens']:,} of {of:,} tokens)"


@torch.no_grad()
def token_scores(
    parallel: nn.Module,
    validation: Samples,
    token_bytes: np.ndarray,
    samples: int,
    batch_size: int,
    world: World,
) -> dict[str, float]:
    """What a line of metrics has of `samples` samples spread evenly over the split, 0 for all: mean
    nats per target token, bits per byte of their text, the share of targets that are the likeliest
    token, and the number of targets. The processes share the samples.

    token_bytes: (vocabulary,), how many bytes of text each token stands for.
    """
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
        totals[3] += int(token_bytes[scored.numpy()].sum())
    model.train()
    nats, right, count, size = world.sum(totals).tolist()
    return {
        "validation_loss": nats / count,
        "validation_bits_per_byte": nats / math.log(2) / max(size, 1),
        "validation_accuracy": right / count,
        "validation_tokens": int(count),
    }
