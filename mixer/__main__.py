"""The commands of the package: `mixer COMMAND ...`, or `python -m mixer COMMAND ...`.

Each command is a module that `python -m` runs, too. Only the chosen one is imported, as PyTorch
takes seconds.
"""

import runpy
import sys
from dataclasses import dataclass

from mixer.common.errors import UserError, run_command


@dataclass(frozen=True)
class Command:
    module: str
    summary: str


COMMANDS = {
    "train": Command("mixer.train", "train a model, or go on with a run"),
    "eval": Command("mixer.eval", "perplexity, loss by position, speed and memory of checkpoints"),
    "generate": Command("mixer.generate", "continue texts with a checkpoint"),
    "compare": Command("mixer.compare", "train backends and transformers side by side"),
    "curves": Command("mixer.report", "plot the losses of runs"),
    "inspect": Command("mixer.inspect", "draw the mixing matrices of a checkpoint"),
    "representation": Command("mixer.representation", "how much of a text each layer keeps"),
    "convert": Command("mixer.convert", "checkpoints from and to the reference implementation"),
    "export": Command("mixer.export", "turn a checkpoint into a directory to publish"),
    "doctor": Command("mixer.doctor", "whether the CUDA kernels work here, and what to do if not"),
}


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name not in COMMANDS:
        return run_command(lambda: answer(name))
    del sys.argv[1]
    # As `python -m` does, so that the command has its own name in its usage, and processes that it
    # starts find it as their main module.
    runpy.run_module(COMMANDS[name].module, run_name="__main__", alter_sys=True)


def answer(name: str) -> None:
    """Prints the help. Raises UserError for what is no command."""
    if name not in ("-h", "--help"):
        raise UserError(f"the command is {name!r}; allowed: {', '.join(COMMANDS)}")
    width = max(map(len, COMMANDS))
    print("usage: mixer COMMAND [options]    or: python -m mixer COMMAND [options]\n")
    for name, command in COMMANDS.items():
        print(f"  {name:{width}}  {command.summary}")
    print("\n`mixer COMMAND --help` lists the options of a command.")


if __name__ == "__main__":
    main()
