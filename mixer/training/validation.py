"""The mean loss over the validation split."""

import math

import torch
from accelerate import Accelerator
from torch import nn

from mixer.data.batches import to_device
from mixer.data.token_file import TokenFile


@torch.no_grad()
def validation_loss(
    parallel: nn.Module,
    validation: TokenFile,
    samples: int,
    batch_size: int,
    accelerator: Accelerator,
) -> tuple[float, float]:
    """(mean nats per target token, bits per byte of text) of the first `samples` samples, 0 for
    all. The processes share the samples.
    """
    samples = min(len(validation), samples or len(validation))
    totals = torch.zeros(2, dtype=torch.float64, device=accelerator.device)  # nats, targets
    model = accelerator.unwrap_model(parallel)  # DDP has nothing to synchronise here
    model.eval()
    step = batch_size * accelerator.num_processes
    for start in range(0, samples, step):
        own = range(start, min(start + step, samples))
        own = own[accelerator.process_index :: accelerator.num_processes]
        # Every batch is filled up to one shape, as torch.compile would compile another one anew.
        # A process without samples computes a batch too, as sharded weights need all processes.
        filled = [*own, *[0] * (batch_size - len(own))]
        inputs, targets = to_device(validation.batch(filled), accelerator.device)
        nats, targets = model(inputs, targets)[: len(own)], targets[: len(own)]
        totals += torch.stack([nats.sum(dtype=torch.float64), (targets != -100).sum()])
    model.train()
    nats, count = accelerator.reduce(totals, "sum").tolist()
    split = validation.manifest.splits["validation"]
    scored_bytes = split.bytes * count / split.tokens  # of the tokens that were scored
    return nats / count, nats / math.log(2) / scored_bytes
