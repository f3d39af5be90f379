"""Train a model: accelerate launch train.py --config configs/demo.yaml [section.key=value ...]"""

from mixer.common.errors import run_command
from mixer.train import main

if __name__ == "__main__":
    run_command(main)
