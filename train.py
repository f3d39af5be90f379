"""Train a model: accelerate launch train.py --config configs/demo.yaml [section.key=value ...]"""

from mixer.commands.train import main
from mixer.common.errors import run_command

if __name__ == "__main__":
    run_command(main)
