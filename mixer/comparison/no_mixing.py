"""Training without token mixing, to time a step as if mixing were free:

    python -m mixer.comparison.no_mixing ARGUMENTS, the same as those of train.py

`python -m mixer.compare` does this. The model sees no other tokens, so it is of no other use, and
no checkpoints are written.
"""

import argparse

from torch import Tensor

from mixer.common.errors import run_command
from mixer.models.masked_mixer.mixing import VARIANTS, TokenMixing
from mixer.models.masked_mixer.modeling import in_autocast_type
from mixer.training.config import load_config
from mixer.training.loop import train


class NoMixing(TokenMixing):
    """x + LN(x): the norm and the residual remain, and nothing is mixed."""

    convolutions = 0

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
    VARIANTS.insert(0, (lambda config: True, NoMixing))
    overrides += ["checkpoint.save_every=0", "checkpoint.save_last=false"]
    train(load_config(options.config, overrides))


if __name__ == "__main__":
    run_command(main)
