"""Train a model:

    python train.py --config configs/demo.yaml [section.key=value ...]
    accelerate launch train.py --config configs/demo.yaml [section.key=value ...]

Outside a checkout, run `python -m mixer.train` instead of train.py.
"""

from mixer.common.errors import UserError, command_parser, run_command
from mixer.distributed.world import follow_launcher
from mixer.training.config import describe_options, load_config
from mixer.training.loop import train


def main() -> None:
    parser = command_parser(None, __doc__, epilog=describe_options())
    parser.add_argument("--config", help="YAML file, such as configs/demo.yaml")
    options, overrides = parser.parse_known_args()
    follow_launcher()
    if options.config is None and not overrides:
        raise UserError("give --config FILE, such as configs/demo.yaml")
    train(load_config(options.config, overrides))


if __name__ == "__main__":
    run_command(main)
