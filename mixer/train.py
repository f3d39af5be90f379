"""Train a model:

    python train.py --config configs/demo.yaml [section.key=value ...]
    accelerate launch train.py --config configs/demo.yaml [section.key=value ...]

Outside a checkout, run `python -m mixer.train` instead of train.py.
"""

from mixer.common.errors import UserError, command_parser, run_command
from mixer.distributed.launcher import follow_launcher
from mixer.training.config import describe_options, load_config


def main() -> None:
    parser = command_parser(None, __doc__, epilog=describe_options())
    parser.add_argument("--config", help="YAML file, such as configs/demo.yaml")
    options, overrides = parser.parse_known_args()
    follow_launcher()
    if options.config is None and not overrides:
        raise UserError("give --config FILE, such as configs/demo.yaml")
    run = load_config(options.config, overrides)
    # Only now, as this takes seconds, and a wrong option is refused at once.
    from mixer.training.loop import train

    train(run)


if __name__ == "__main__":
    run_command(main)
