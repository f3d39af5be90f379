"""Train a model:

    mixer train --config FILE [section.key=value ...]
    accelerate launch train.py --config FILE [section.key=value ...]

Outside a checkout, launch `-m mixer train` instead of train.py.
"""

from mixer.common.errors import UserError, command_parser, run_command
from mixer.common.files import check_writable
from mixer.common.ranks import rank
from mixer.data.sources import check_data
from mixer.distributed.launcher import follow_launcher
from mixer.training.config import describe_options, load_config


def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("mixer train", __doc__, epilog=describe_options())
    parser.add_argument("--config", help="YAML file, such as configs/demo.yaml")
    options, overrides = parser.parse_known_args(arguments)
    follow_launcher()
    if options.config is None and not overrides:
        raise UserError("give --config FILE, such as configs/demo.yaml")
    run = load_config(options.config, overrides)
    if rank() == 0:  # another machine may have no text, but use the data that this one prepares
        check_writable(run.directory, "output_dir")
        check_data(run.data)
    # Only now, as this takes seconds.
    from mixer.training.loop import train

    train(run)


if __name__ == "__main__":
    run_command(main)
