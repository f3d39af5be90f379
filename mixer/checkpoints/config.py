"""The settings of a run's checkpoints."""

from dataclasses import dataclass

from mixer.common.options import option


@dataclass
class CheckpointConfig:
    save_every: int = option(
        1000, "steps between checkpoints; 0 for one at the end alone", at_least=0
    )
    save_last: bool = option(True, "a checkpoint at the end; false for a run that is only timed")
    keep: int = option(2, "newest checkpoints to keep; the best one is kept too", at_least=2)
    keep_every: int = option(
        0, "also keep a checkpoint where this divides its step; 0 for none", at_least=0
    )
    resume: str = option(
        "auto", "auto (the run's newest complete checkpoint), never, or a directory to begin from"
    )
    allow_other_data: bool = option(
        False, "resume though the data or its tokenizer are not those of the checkpoint"
    )
