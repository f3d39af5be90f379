"""What all objectives have in common: the loss as a module, the questions that the rest of the
package asks an objective, how processes share what validation scores, and which one a run has.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from mixer.common.errors import Say
from mixer.data.config import DataConfig
from mixer.data.prepare import Data, open_data
from mixer.data.samples import Batch, Samples
from mixer.distributed.world import Group, Process
from mixer.objectives.config import ObjectiveConfig, traits_of


class Loss(nn.Module):
    """A model with its loss as one module, which DDP or FSDP wrap.

    `forward` takes the two tensors of a batch, each (batch, tokens) int64, and returns losses in
    fp32 nats. Training minimizes their sum, divided by the step's tokens (see
    Objective.counts_targets). In eval mode it returns what the objective's validation scores.

    Attributes:
        compiled_methods: what torch.compile compiles beside the model's blocks.
    """

    compiled_methods: tuple[str, ...] = ()

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model


class Objective(ABC):
    """What a run learns. A subclass has a `loss` and a `validate`, and whatever differs below.

    Attributes:
        traits: what is known of it without its class.
        reads_logits: whether the loss reads the logits of the model's output layer.
        writes_text: whether `mixer generate` writes what was learned.
        sample_tokens: how many tokens a sample has, padding included.
    """

    reads_logits = True
    writes_text = True

    def __init__(self, train: ObjectiveConfig, data: DataConfig, context: int):
        self.train = train
        self.data = data
        self.context = context
        self.traits = traits_of(train, data)
        self.sample_tokens = context

    def open_data(self, say: Say = print) -> Data:
        """Both splits as samples of `context` tokens, prepared at first. Raises UserError for data
        that nothing can be learned from.
        """
        return open_data(self.data, self.context, say=say)

    def counts_targets(self, data: Data) -> bool:
        """What the loss of a step is divided by, and metrics count as its tokens. True: its targets
        other than -100, which are counted on the device. False: `sample_tokens` for each sample,
        which is known without counting. A loss that is a mean over something else, such as pairs,
        is multiplied by `sample_tokens` first, see PairLoss.
        """
        return True

    @abstractmethod
    def loss(self, model: PreTrainedModel, group: Group = None) -> Loss:
        """The model with its loss, which the processes of `group` train together."""

    @abstractmethod
    def validate(self, loss: Loss, data: Data, process: Process) -> tuple[dict[str, float], str]:
        """The entries of metrics.jsonl, of all processes together, and in words what they say
        beside `validation_loss`.

        loss: of this process, in eval mode. All processes must call it equally often.
        """

    def write_beside(self, directory: Path, config: PreTrainedConfig) -> None:
        """Writes what a saved model of this configuration gets, beside its weights and tokenizer,
        into its directory.
        """
        return  # most need nothing more

    def eval_arguments(self) -> list[str]:
        """The options of `mixer eval` that measure what was learned."""
        return []


def spread_batches(
    samples: Samples, count: int, batch_size: int, process: Process
) -> Iterator[Batch]:
    """This process's share of `count` samples, spread evenly over a split.

    Every batch is filled up to one shape, as torch.compile would compile another one anew, by
    samples whose targets are -100. A process without samples gets a batch too, as sharded weights
    need all processes.
    """
    step = batch_size * process.size
    for start in range(0, count, step):
        numbers = range(start, min(start + step, count))[process.rank :: process.size]
        filled = [*numbers, *[0] * (batch_size - len(numbers))]
        inputs, targets = samples.batch(np.array(filled) * len(samples) // count)
        targets[len(numbers) :] = -100
        yield inputs, targets


def objective_of(train: ObjectiveConfig, data: DataConfig, context: int) -> Objective:
    """The objective of a run."""
    return resolve_name(traits_of(train, data).path)(train, data, context)
