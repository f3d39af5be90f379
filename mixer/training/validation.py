"""The loss that is trained on, and its mean over the validation split."""

import math

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor

from mixer.data.batches import to_device
from mixer.data.token_file import TokenFile


def token_nats(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of each target in nats, fp32, 0 where the target is -100: (batch, tokens,
    vocab), (batch, tokens) -> (n,).
    """
    return F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none"
    )


@torch.no_grad()
def validation_loss(
    parallel, validation: TokenFile, samples: int, batch_size: int, accelerator: Accelerator
):
    """(mean nats per target token, bits per byte) over so many samples (0: all), shared out among
    the processes.
    """
    samples = min(len(validation), samples or len(validation))
    totals = torch.zeros(2, dtype=torch.float64, device=accelerator.device)  # nats, targets
    model = accelerator.unwrap_model(parallel)  # without DDP, which has nothing to synchronise here
    model.eval()
    for start in range(0, samples, batch_size * accelerator.num_processes):
        # Every process makes as many forward passes, as sharded ones meet in each: one without
        # samples scores nothing.
        own = range(start, min(start + batch_size * accelerator.num_processes, samples))
        own = own[accelerator.process_index :: accelerator.num_processes]
        filled = [
            *own,
            *[0] * (batch_size - len(own)),
        ]  # one shape for all: another would be compiled anew
        inputs, targets = to_device(validation.batch(filled), accelerator.device)
        nats, targets = model(inputs, targets)[: len(own)], targets[: len(own)]
        totals += torch.stack([nats.sum(dtype=torch.float64), (targets != -100).sum()])
    model.train()
    nats, count = accelerator.reduce(totals, "sum").tolist()
    split = validation.manifest.splits["validation"]
    scored_bytes = split.bytes * count / split.tokens  # the share of the split that was scored
    return nats / count, nats / math.log(2) / scored_bytes
