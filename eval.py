"""Evaluate checkpoints: python eval.py --checkpoint runs/demo/step-600 (see --help)"""

from mixer.common.errors import run_command
from mixer.eval import main

if __name__ == "__main__":
    run_command(main)
