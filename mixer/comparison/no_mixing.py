"""Training without token mixing: python -m mixer.comparison.no_mixing ARGUMENTS, as train.py. What
a step would take if mixing were free.

The model learns nothing of other tokens: it is there to be timed (`python -m mixer.compare` does),
and has no checkpoints.
"""

import argparse

from torch import Tensor, nn

from mixer.common.errors import run_command
from mixer.models.llama import in_autocast_type
from mixer.models.masked_mixer import modeling
from mixer.training.config import load_config
from mixer.training.loop import train


class NoMixing(nn.Module):
    """In place of TokenMixing: x + LN(x), so that the norm and the residual remain."""

    def __init__(self, config):
        super().__init__()

    def forward(self, x: Tensor, residual: Tensor, *_) -> Tensor:
        return in_autocast_type(residual) + in_autocast_type(x)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", help="YAML file, see configs/")
    options, overrides = parser.parse_known_args()
    modeling.TokenMixing = NoMixing
    train(
        load_config(
            options.config, [*overrides, "checkpoint.save_every=0", "checkpoint.save_last=false"]
        )
    )


if __name__ == "__main__":
    run_command(main)
