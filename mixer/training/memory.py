"""What to lower where a training step does not fit into memory."""

import torch

from mixer.common.errors import UserError
from mixer.common.memory import out_of_memory
from mixer.training.config import RunConfig


def step_too_large(run: RunConfig, device: torch.device, error: BaseException) -> UserError:
    """The error of a run that is out of memory on this process's device: names its sizes, and the
    settings that would need less.
    """
    train, model = run.train, run.model
    sizes = {
        "train.batch_size": train.batch_size,
        "train.gradient_accumulation_steps": train.gradient_accumulation_steps,
        "train.recompute": train.recompute,
        "train.mixed_precision": train.mixed_precision,
        "model.max_position_embeddings": model.max_position_embeddings,
        "model.hidden_size": model.hidden_size,
        "model.num_hidden_layers": model.num_hidden_layers,
    }
    ways = []
    if train.batch_size > 1:
        ways.append(
            "lower train.batch_size and raise train.gradient_accumulation_steps by the same factor "
            "(the losses stay the same)"
        )
    if train.recompute != "block":
        ways.append(f"set train.recompute={'activation or ' * (train.recompute == 'none')}block")
    if train.mixed_precision == "no":
        ways.append("set train.mixed_precision=bf16")
    ways.append("choose a smaller model")
    listed = ", ".join(f"{name} = {value}" for name, value in sizes.items())
    remedy = f"To need less: {'; or '.join(ways)}. Then give the same command again"
    return out_of_memory(error, device, f"training {run.directory}", listed, remedy)
