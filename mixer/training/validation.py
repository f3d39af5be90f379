"""The mean loss and the accuracy on a sample of the validation split."""

import math

import numpy as np
import torch
from torch import nn

from mixer.data.batches import to_device
from mixer.data.run_data import Samples
from mixer.distributed.world import World


@torch.no_grad()
def validate(
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
