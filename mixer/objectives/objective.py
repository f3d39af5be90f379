"""What all objectives have in common: the loss as a module, the questions that the rest of the
package asks an objective, and which one a run has.
"""

from pathlib import Path
from pkgutil import resolve_name

import torch.distributed as dist
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from mixer.common.errors import Say, processes
from mixer.data.config import TEXTS, DataConfig
from mixer.data.prepare import Data, open_data
from mixer.distributed.world import Process
from mixer.models.architecture import blocks_of
from mixer.objectives.config import OBJECTIVES, ObjectiveConfig

Group = dist.ProcessGroup | None  # None for one process


class Loss(nn.Module):
    """A model with its loss as one module, which DDP or FSDP wrap.

    `forward` takes the two tensors of a batch, each (batch, tokens) int64, and returns losses in
    fp32 nats. Training minimizes their sum, divided by the tokens that the step counts. In eval
    mode it returns what the objective's validation scores.

    Attributes:
        compiled_methods: what torch.compile compiles beside the model's blocks.
    """

    compiled_methods: tuple[str, ...] = ()

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    # accelerate asks for these three: FSDP shards the embeddings and each of the blocks apart.

    @property
    def _no_split_modules(self) -> list[str]:
        return sorted({type(block).__name__ for block in blocks_of(self.model)})

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.model.get_output_embeddings()


class Objective:
    """What a run learns. A subclass has a `loss` and a `validate`, and whatever differs below.

    Attributes:
        sources: the values of data.source that it learns from.
        makes_samples: whether its samples are made on demand, so that no data is prepared.
        compares_samples: whether the loss of a sample depends on the others of its batch, those of
            other processes among them.
        reads_logits: whether the loss reads the logits of the model's output layer.
        sample_tokens: how many tokens a sample has.
    """

    sources: tuple[str, ...] = TEXTS
    makes_samples = False
    compares_samples = False
    reads_logits = True

    def __init__(self, train: ObjectiveConfig, data: DataConfig, context: int):
        self.train = train
        self.data = data
        self.context = context
        self.sample_tokens = context

    def problems(self) -> list[str]:
        """One line for each option that the objective cannot have."""
        train = self.train
        name = f"train.objective = {train.objective}"
        problems = []
        if self.data.source not in self.sources:
            problems.append(
                f"data.source = {self.data.source!r} with {name}, which does not learn from it; "
                f"allowed: {', '.join(self.sources)}"
            )
        if self.compares_samples and train.gradient_accumulation_steps > 1:
            problems.append(
                f"train.gradient_accumulation_steps above 1 with {name}, where micro-batches would "
                "not see each other; allowed: 1"
            )
        if self.compares_samples and train.batch_size * processes() == 1:
            problems.append(
                f"train.batch_size = 1 with {name} in one process, where a sample would have no "
                "other to be told from; allowed: 2 or more"
            )
        return problems

    def open_data(self, say: Say = print) -> Data:
        """Both splits as samples of `context` tokens, prepared at first. Raises UserError for data
        that nothing can be learned from.
        """
        return open_data(self.data, self.context, say=say)

    def counts_targets(self, data: Data) -> bool:
        """Whether a step counts its targets, but for those that are -100; otherwise each token of a
        sample counts.
        """
        return True

    def loss(self, model: PreTrainedModel, group: Group = None) -> Loss:
        """The model with its loss, which the processes of `group` train together."""
        raise NotImplementedError

    def validate(self, loss: Loss, data: Data, process: Process) -> tuple[dict[str, float], str]:
        """The entries of metrics.jsonl, of all processes together, and in words what they say
        beside `validation_loss`.

        loss: of this process, in eval mode. All processes must call it as often.
        """
        raise NotImplementedError

    def write_beside(self, directory: Path, config: PreTrainedConfig) -> None:
        """Writes what a saved model of this configuration gets, beside its weights and tokenizer,
        into its directory.
        """

    def eval_arguments(self) -> list[str]:
        """The options of eval.py that measure what was learned."""
        return []


def objective_of(train: ObjectiveConfig, data: DataConfig, context: int) -> Objective:
    """The objective of a run: of those with its name, the one that learns from its data; the first
    one, if none does, for its `problems`.
    """
    classes = [resolve_name(name) for name in OBJECTIVES[train.objective]]
    suitable = [candidate for candidate in classes if data.source in candidate.sources]
    chosen, *_ = suitable or classes
    return chosen(train, data, context)
