"""Which objectives there are, and what of a run's configuration they read: a part of its section
`train`. Importing it takes no time.
"""

from dataclasses import dataclass

from mixer.common.options import option

# By the value of train.objective, where its classes are; they differ in the values of data.source
# that they learn from. Only the one of a run is imported.
OBJECTIVES = {
    "language": ("mixer.objectives.language:Language", "mixer.objectives.tasks:Tasks"),
    "contrastive": ("mixer.objectives.retrieval:Retrieval",),
}


@dataclass
class ObjectiveConfig:
    """The part of the section `train` that objectives read."""

    objective: str = option(
        "language",
        "language: predict the next token; contrastive: find a text's partner (docs/retrieval.md)",
        choices=OBJECTIVES,
    )
    temperature: float = option(0.02, "contrastive: divides the cosine similarities", above=0)
    batch_size: int = option(32, "samples per process and micro-batch", at_least=1, at_most=2**20)
    gradient_accumulation_steps: int = option(
        1, "micro-batches per optimizer step", at_least=1, at_most=2**20
    )
    eval_samples: int = option(
        2048, "samples to score, spread over the validation split; 0: all", at_least=0
    )
