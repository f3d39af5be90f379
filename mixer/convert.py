"""Convert checkpoints from and to the reference implementation of masked mixers, with the same
logits, or between full mixing weights and weights by lag.

    python -m mixer.convert SOURCE.safetensors --output DIR [--tokenizer NAME] [--mixing KIND]
    python -m mixer.convert DIR --output FILE.safetensors --back
    python -m mixer.convert DIR --output DIR --mixing-weight lags

The first line reads the weights of a LanguageMixer or of a structured mixer, Toeplitz or recurrent.
The second writes such weights. The third stores one number per lag, the mean of each diagonal, and
prints how much the weights changed. `full` converts back without a change.

A LanguageMixer's file does not say whether the mixing has a softmax, which is not supported here:
the command assumes none, and says so. A structured mixer's file does not say how its heads mix:
give --mixing. See mixer/checkpoints/reference_format.py.
"""

import sys
from pathlib import Path

from safetensors.torch import save_file

from mixer.checkpoints import pretrained
from mixer.checkpoints.reference_format import ASSUMED, from_reference, read_weights, to_reference
from mixer.common.errors import UserError, command_parser, run_command
from mixer.common.files import as_path, check_new, check_writable, whole_file
from mixer.data.tokenizer import existing_tokenizer
from mixer.models.masked_mixer.configuration import RECURRENT
from mixer.models.masked_mixer.convolution import TriangularConv


def convert(
    source: Path, output: Path, tokenizer_name: str | None, mixing: str | None = None
) -> None:
    """Writes a checkpoint directory, with a tokenizer if one is named (directory or hub name)."""
    check_new(output)
    model = from_reference(read_weights(source), mixing)
    pretrained.check_finite(source, model)
    tokenizer = None
    if tokenizer_name:
        tokenizer = existing_tokenizer(tokenizer_name)
        title = f"tokenizer {tokenizer_name!r}"
        pretrained.check_vocabulary(tokenizer, model.config.vocab_size, title)
        model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    pretrained.write_new(output, model, tokenizer)
    if not mixing:
        assumed = f"ASSUMED: {ASSUMED}. If {source} is one, the logits of {output} are wrong."
        print(assumed, file=sys.stderr)


def convert_back(source: Path, output: Path) -> None:
    """Writes the weights of a checkpoint directory as a file for the reference implementation."""
    _check_new_file(output)
    check_writable(output.parent)
    weights = to_reference(pretrained.load_masked_mixer(source))
    with whole_file(output) as stage:
        _check_new_file(output)  # another process may have written it
        save_file(weights, stage, metadata={"format": "pt"})
    print(f"wrote {output}")


def _check_new_file(output: Path) -> None:
    if output.exists() or output.suffix != ".safetensors":
        raise UserError(
            f"--output is {output}; with --back give a .safetensors file that does not exist yet"
        )


def convert_mixing(source: Path, output: Path, form: str) -> None:
    """Writes the model and tokenizer of a checkpoint with mixing weights of another form, full or
    lags.
    """
    check_new(output)
    model = pretrained.load_masked_mixer(source)
    config_values = model.config.to_dict() | {"mixing_weight": form, "mixing_decay": False}
    if model.config.mixer_key_size:
        config_values["mixing_init"] = "shift"  # where the lags of keyed mixing count from
    config = type(model.config).from_dict(config_values)
    converted = type(model)(config)
    converted.load_state_dict(model.state_dict(), strict=False)  # mixing weights have other names
    changes = []  # of each mixing weight, as a share of its norm
    for conv, converted_conv in zip(model.modules(), converted.modules(), strict=True):
        if isinstance(conv, TriangularConv):
            weight = conv.mixing_weight().detach().tril()
            converted_conv.set_mixing_weight(weight)
            change = converted_conv.mixing_weight().detach().tril() - weight
            changes.append(float(change.norm() / weight.norm().clamp(min=1e-30)))
    has_tokenizer = (source / "tokenizer_config.json").exists()
    tokenizer = existing_tokenizer(str(source)) if has_tokenizer else None
    pretrained.write_new(output, converted, tokenizer, source)
    mean = sum(changes) / max(1, len(changes))
    most = max(changes, default=0.0)
    summary = f"mixing weights changed by {mean:.2%} of their norm on average, at most {most:.2%}"
    if most > 0.1:
        summary += "; this is now a different model: train it further"
    print(summary)


def main() -> None:
    parser = command_parser("mixer.convert", __doc__)
    add = parser.add_argument
    one = parser.add_mutually_exclusive_group()
    add("source", type=pretrained.settled, help="the author's .safetensors file, or a checkpoint")
    add("--output", type=as_path, required=True, help="a new directory; a new file with --back")
    one.add_argument("--tokenizer", metavar="NAME", help="directory or hub name; saved too")
    one.add_argument("--back", action="store_true", help="write a file for the author's code")
    one.add_argument("--mixing-weight", choices=["full", "lags"], help="write weights of this form")
    add("--mixing", choices=("lags", *RECURRENT), help="how the heads of a structured mixer mix")
    options = parser.parse_args()
    if options.mixing and (options.back or options.mixing_weight):
        parser.error("--mixing is for the author's files: leave out --back and --mixing-weight")
    if options.mixing_weight:
        convert_mixing(options.source, options.output, options.mixing_weight)
    elif options.back:
        convert_back(options.source, options.output)
    else:
        convert(options.source, options.output, options.tokenizer, options.mixing)


if __name__ == "__main__":
    run_command(main)
