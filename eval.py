"""Evaluate checkpoints: python eval.py --checkpoint runs/demo/step-600 (see --help)"""

from mixer.commands.eval import main
from mixer.common.errors import run_command

if __name__ == "__main__":
    run_command(main)
