"""Which objectives there are, what is known of them before their classes are imported, and their
options: a part of the section `train`. Importing this file takes no time.
"""

from dataclasses import dataclass

from mixer.common.options import option
from mixer.common.ranks import processes
from mixer.data.config import TASKS, TEXTS, DataConfig

# Among how many texts a text's partner is looked for, where retrieval is measured.
CANDIDATES = (32, 1024, 8192)


@dataclass(frozen=True)
class Traits:
    """What options and commands ask of an objective, whose class takes seconds to import.

    Attributes:
        path: where its class is; only the one of a run is imported.
        sources: the values of data.source that it learns from.
        makes_samples: whether its samples are made on demand, so that no data is prepared.
        compares_samples: whether the loss of a sample depends on the others of its batch, those of
            other processes among them.
    """

    path: str
    sources: tuple[str, ...] = TEXTS
    makes_samples: bool = False
    compares_samples: bool = False


# By the value of train.objective; those of one name differ in their sources.
OBJECTIVES = {
    "language": (
        Traits("mixer.objectives.language:Language"),
        Traits("mixer.objectives.tasks:Tasks", sources=TASKS, makes_samples=True),
    ),
    "contrastive": (Traits("mixer.objectives.retrieval:Retrieval", compares_samples=True),),
}


@dataclass
class ObjectiveConfig:
    """The part of the section `train` that objectives read, as validation and what
    `objective_problems` refuses depend on it; TrainConfig of mixer/training/config.py has the rest.
    """

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


def traits_of(train: ObjectiveConfig, data: DataConfig) -> Traits:
    """Of the objectives of train.objective, those of the one that learns from data.source; of the
    first one if none does, which `objective_problems` then refuses.
    """
    named = OBJECTIVES[train.objective]
    return next((traits for traits in named if data.source in traits.sources), named[0])


def objective_problems(train: ObjectiveConfig, data: DataConfig) -> list[str]:
    """One line for each option that the run's objective cannot have."""
    traits = traits_of(train, data)
    name = f"train.objective = {train.objective}"
    problems = []
    if data.source not in traits.sources:
        problems.append(
            f"data.source = {data.source!r} with {name}, which does not learn from it; "
            f"allowed: {', '.join(traits.sources)}"
        )
    if traits.compares_samples and train.gradient_accumulation_steps > 1:
        problems.append(
            f"train.gradient_accumulation_steps above 1 with {name}, where micro-batches would not "
            "see each other; allowed: 1"
        )
    if traits.compares_samples and train.batch_size * processes() == 1:
        problems.append(
            f"train.batch_size = 1 with {name} in one process, where a sample would have no other "
            "to be told from; allowed: 2 or more"
        )
    return problems
