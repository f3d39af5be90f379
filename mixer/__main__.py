"""The commands of the package: `mixer COMMAND ...`, or `python -m mixer COMMAND ...`.

Only the chosen one is imported.
"""

import runpy
import sys

from mixer.common.errors import UserError, run_command

SUMMARIES = {  # of the modules of mixer/commands
    "train": "train a model, or go on with a run",
    "eval": "perplexity, loss by position, speed and memory of checkpoints",
    "generate": "continue texts with a checkpoint",
    "compare": "train mixers and transformers side by side, and compare them",
    "curves": "plot the losses of runs",
    "inspect": "draw the mixing matrices of a checkpoint",
    "representation": "how well the states of each layer give back the text",
    "convert": "from and to the author's format; weights by lag and full ones",
    "export": "turn a checkpoint into a directory to publish",
    "doctor": "whether the CUDA kernels work here, and what to do if not",
}


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name not in SUMMARIES:
        return run_command(lambda: answer(name))
    del sys.argv[1]
    # As `python -m` does, so that processes that it starts find it as their main module.
    runpy.run_module(f"mixer.commands.{name}", run_name="__main__", alter_sys=True)


def answer(name: str) -> None:
    """Prints the help. Raises UserError for what is no command."""
    if name not in ("-h", "--help"):
        raise UserError(f"the command is {name!r}; allowed: {', '.join(SUMMARIES)}")
    width = max(map(len, SUMMARIES))
    print("usage: mixer COMMAND [options]    or: python -m mixer COMMAND [options]\n")
    for name, summary in SUMMARIES.items():
        print(f"  {name:{width}}  {summary}")
    print("\n`mixer COMMAND --help` lists the options of a command.")


if __name__ == "__main__":
    main()
