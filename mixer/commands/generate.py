"""Continue texts with a checkpoint. They appear as they are written.

    mixer generate --checkpoint runs/demo/step-600 --prompt "def read(self, "
    mixer generate --checkpoint runs/demo/step-600

The second line, in a terminal, asks for prompts.
"""

import argparse
import math
import sys
from contextlib import suppress

from mixer.checkpoints.model_files import existing
from mixer.common.errors import UserError, command_parser, run_command, say_on_stderr
from mixer.common.options import is_plain_text
from mixer.common.terminal import escaped

SEEDS = 2**32


def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("mixer generate", __doc__)
    add = parser.add_argument
    top_k_help = "sample from the N likeliest tokens; default: 50; 0: all"
    top_p_help = "and from the likeliest with probability X together; default: 1"
    prompt_help = "to continue; default: ask for them"
    add("--checkpoint", required=True, type=existing, metavar="DIR", help="any causal model")
    add("--prompt", dest="prompts", nargs="+", metavar="TEXT", help=prompt_help)
    add("--new-tokens", type=int, metavar="N", default=80, help="at most this many; default: 80")
    add("--temperature", type=float, default=0.7, metavar="X", help="default: 0.7; 0: greedy")
    add("--top-k", type=int, default=50, metavar="N", help=top_k_help)
    add("--top-p", type=float, default=1.0, metavar="X", help=top_p_help)
    add("--seed", type=int, metavar="N", default=0, help="default: 0")
    options = parser.parse_args(arguments)
    check(options)
    if options.prompts is None and not (sys.stdin and sys.stdin.isatty()):
        raise UserError("stdin is no terminal to ask for prompts in: give --prompt TEXT")
    # Only now, as this takes seconds.
    from mixer.evaluation.generate import Sampling, Writer

    sampling = Sampling(
        new_tokens=options.new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
    )
    writer = Writer(options.checkpoint, sampling)
    if options.prompts is None:
        return ask_for_prompts(writer, options.seed)
    rows = [writer.tokens(prompt) for prompt in options.prompts]  # all are checked before the first
    for number, row in enumerate(rows):
        if number:
            print()
        writer.write(row, show, options.seed)
        print()


def show(text: str) -> None:
    """Prints a part of a text: as it is, but in a terminal with its control characters escaped."""
    print(escaped(text) if sys.stdout.isatty() else text, end="", flush=True)


def ask_for_prompts(writer, seed: int) -> None:
    """Continues each line that is typed, until Ctrl-D. A line that is typed again is continued in
    another way: each has a seed of its own, from `seed` on.
    """
    with suppress(ImportError):  # some Pythons are built without it
        import readline  # noqa: F401  # lets input() recall and edit lines

    say_on_stderr("Type the beginning of a text. Ctrl-D ends.")
    while True:
        try:
            prompt = input("> ")
        except EOFError:
            return print()
        if not prompt:
            continue
        try:
            check_prompt(prompt)
            writer.write(writer.tokens(prompt), show, seed)
            print("\n")
        except UserError as error:
            say_on_stderr(f"error: {error}")
        seed = (seed + 1) % SEEDS


def check(options: argparse.Namespace) -> None:
    top_p = options.top_p
    temperature = options.temperature
    for option, value, is_allowed, allowed in (
        ("new-tokens", options.new_tokens, options.new_tokens > 0, "1 or more"),
        ("temperature", temperature, 0 <= temperature < math.inf, "0 or more"),
        ("top-k", options.top_k, options.top_k >= 0, "0 or more; 0: all tokens"),
        ("top-p", top_p, 0 < top_p <= 1, "above 0, at most 1"),
        ("seed", options.seed, 0 <= options.seed < SEEDS, "0 to 2**32 - 1"),
    ):
        if not is_allowed:
            raise UserError(f"--{option} {value}; allowed: {allowed}")
    for prompt in options.prompts or ():
        check_prompt(prompt)


def check_prompt(prompt: str) -> None:
    if not (prompt and is_plain_text(prompt)):
        raise UserError(f"a prompt is {prompt[:50]!r}; allowed: a token or more of UTF-8 text")


if __name__ == "__main__":
    run_command(main)
