"""Evaluate checkpoints: perplexity per token, word and byte, bits per byte, loss by position, speed
and memory.

python eval.py --checkpoint runs/demo/step-600                         # the validation split of the run's own data
python eval.py --checkpoint runs/demo/step-600 gpt2 --text book.txt    # any UTF-8 text, any causal LM's directory beside
python eval.py --checkpoint runs/demo/step-600 --hub Salesforce/wikitext --subset wikitext-103-raw-v1
accelerate launch --multi_gpu eval.py --checkpoint runs/v100/step-200000    # the windows shared out among the GPUs
python eval.py ... --first-token eos --last-window full                # the conventions of lm-evaluation-harness
"""

import argparse
from dataclasses import fields
from pathlib import Path

from mixer.common.errors import run_command


def parse(arguments=None) -> argparse.Namespace:
    from mixer.evaluation.evaluate import FIRST_TOKEN, LAST_WINDOW, EvalOptions
    from mixer.evaluation.measure import DTYPES
    from mixer.ops import BACKENDS

    choices = {"device": ("auto", "cpu", "cuda"), "dtype": DTYPES, "backend": BACKENDS}
    choices |= {"first_token": FIRST_TOKEN, "last_window": LAST_WINDOW}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option in fields(EvalOptions):
        flag, how = "--" + option.name.replace("_", "-"), {"help": option.metadata["help"]}
        if option.name == "checkpoint":
            how |= {"nargs": "+", "required": True, "metavar": "DIR"}
        elif option.name == "text":
            how |= {"nargs": "+", "default": [], "metavar": "FILE"}
        elif option.default is False:
            how |= {"action": "store_true"}
        else:
            how |= {"default": option.default}
            how |= (
                {"choices": list(choices[option.name])}
                if option.name in choices
                else {"metavar": "NAME"}
            )
            how |= {} if isinstance(option.default, str) else {"type": int, "metavar": "N"}
        parser.add_argument(flag, **how)
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="where the report goes (default: CHECKPOINT/../eval-<checkpoint>, "
        "or beside another evaluation's report there eval-<checkpoint>-2, -3, ...)",
    )
    return parser.parse_args(arguments)


def main(arguments=None) -> None:
    options = parse(arguments)
    from mixer.common.files import check_writable, directory_for, place_for
    from mixer.distributed.launch import start_asked_for_processes
    from mixer.evaluation.evaluate import EvalOptions, check_options, evaluate_checkpoint
    from mixer.evaluation.measure import end_processes, is_first_process
    from mixer.evaluation.report import asked, evaluation_report, tell_apart, write_evaluation

    start_asked_for_processes()
    settings = {
        key: value for key, value in vars(options).items() if key not in ("checkpoint", "output")
    }
    evaluations = [EvalOptions(checkpoint=path, **settings) for path in options.checkpoint]
    for evaluation in evaluations:
        check_options(evaluation)
    output = Path(options.output or directory_for(Path(options.checkpoint[0]), "eval"))
    if is_first_process():
        check_writable(output)
    results = tell_apart([evaluate_checkpoint(evaluation) for evaluation in evaluations])
    if is_first_process():
        output = output if options.output else place_for(results, output, "report.json", asked)
        print(evaluation_report(results))
        print(
            f"\nreport.json, report.md and loss_by_position.png are in {write_evaluation(results, output)}"
        )
    end_processes()


if __name__ == "__main__":
    run_command(main)
