"""Continue texts with a checkpoint.

mixer generate --checkpoint runs/demo/step-600 --prompt "def read(self, "
"""

import argparse
import math

from mixer.checkpoints.model_files import existing
from mixer.common.errors import UserError, command_parser, run_command
from mixer.common.options import is_plain_text


def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("mixer generate", __doc__)
    add = parser.add_argument
    add("--checkpoint", required=True, type=existing, metavar="DIR", help="any causal model")
    add("--prompt", dest="prompts", required=True, nargs="+", metavar="TEXT", help="to continue")
    add("--new-tokens", type=int, metavar="N", default=80, help="at most this many; default: 80")
    add("--temperature", type=float, default=0.7, metavar="X", help="default: 0.7; 0: greedy")
    add("--seed", type=int, metavar="N", default=0, help="default: 0")
    options = parser.parse_args(arguments)
    check(options)
    # Only now, as this takes seconds.
    from mixer.evaluation.generate import continuations

    texts = continuations(
        options.checkpoint,
        options.prompts,
        options.new_tokens,
        options.temperature,
        options.seed,
    )
    print("\n\n".join(texts))


def check(options: argparse.Namespace) -> None:
    new_tokens = options.new_tokens
    temperature = options.temperature
    seed = options.seed
    if not (new_tokens > 0 and 0 <= temperature < math.inf and 0 <= seed < 2**32):
        problem = f"--new-tokens {new_tokens} --temperature {temperature:g} --seed {seed}"
        raise UserError(f"{problem}; allowed, in this order: 1 or more, 0 or more, 0 to 2**32 - 1")
    for prompt in options.prompts:
        if not (prompt and is_plain_text(prompt)):
            raise UserError(f"a prompt is {prompt[:50]!r}; allowed: a token or more of UTF-8 text")


if __name__ == "__main__":
    run_command(main)
