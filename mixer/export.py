"""Make a directory to publish from a checkpoint.

    python -m mixer.export runs/v100/best --output my-mixer --license apache-2.0
    hf upload NAME my-mixer

The directory holds what `from_pretrained` needs, the model's code for machines without this
package, and a model card with the run's settings and last losses. It does not hold the optimizer's
state.
"""

import argparse
from pathlib import Path

import torch

from mixer.checkpoints.pretrained import (
    check_finite,
    load_checkpoint,
    require_masked_mixer,
    settled,
)
from mixer.checkpoints.writer import MODULES_FILE, write_modules
from mixer.common.errors import run_command
from mixer.common.files import check_new, whole_directory
from mixer.evaluation.model_card import model_card

WEIGHT_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export(checkpoint: Path, output: Path, license: str, dtype: str = "fp32") -> None:
    """Writes the checkpoint, its tokenizer, code and model card into `output`, a new directory.

    Raises UserError where `output` is not new, where `checkpoint` is no masked mixer's, and where a
    weight is not finite, in fp32 or in `dtype`.
    """
    check_new(output)
    model, tokenizer = load_checkpoint(checkpoint, torch.device("cpu"))
    require_masked_mixer(checkpoint, model)
    model.config.mixing_backend = "auto"
    model.to(WEIGHT_TYPES[dtype])
    check_finite(checkpoint, model, f"{dtype} does not reach that far: give --dtype fp32")
    tokenizer.model_max_length = model.config.max_position_embeddings
    card = model_card(model, checkpoint, output.resolve().name, license)
    with whole_directory(output) as stage:
        check_new(output)  # another process may have written there
        model.save_pretrained(stage)
        tokenizer.save_pretrained(stage)
        if (checkpoint / MODULES_FILE).is_file():
            write_modules(stage, model.config.hidden_size)
        (stage / "README.md").write_text(card, encoding="utf-8")
    print(f"wrote {output}; read its README.md, then: hf upload NAME {output}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m mixer.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("checkpoint", type=settled, metavar="DIR", help="a checkpoint of a masked mixer")
    add(
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="a new directory, named as the model",
    )
    add("--license", required=True, metavar="NAME", help="the model's license, for the card")
    add("--dtype", choices=WEIGHT_TYPES, default="fp32", help="of the weights (fp32)")
    options = parser.parse_args()
    export(options.checkpoint, options.output, options.license, options.dtype)


if __name__ == "__main__":
    run_command(main)
