"""The mean loss over a sample of the validation split."""

import math

import numpy as np
import torch
from torch import nn

from mixer.data.batches import to_device
from mixer.data.token_file import TokenFile
from mixer.distributed.world import World


@torch.no_grad()
def validation_loss(
    parallel: nn.Module,
    validation: TokenFile,
    token_bytes: np.ndarray,
    samples: int,
    batch_size: int,
    world: World,
) -> tuple[float, float, int]:
    """(mean nats per target token, bits per byte of their text, target tokens) of `samples` samples
    spread evenly over the split, 0 for all. The processes share the samples.

    token_bytes: (vocabulary,), how many bytes of text each token stands for.
    """
    samples = min(len(validation), samples or len(validation))
    # nats, targets, bytes
    totals = torch.zeros(3, dtype=torch.float64, device=world.device)
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
        nats = model(*to_device(batch, world.device))[: len(own)].sum(dtype=torch.float64)
        totals[0] += nats
        totals[1] += len(scored)
        totals[2] += int(token_bytes[scored.numpy()].sum())
    model.train()
    nats, count, size = world.sum(totals).tolist()
    return nats / count, nats / math.log(2) / max(size, 1), int(count)
