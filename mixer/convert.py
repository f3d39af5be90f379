"""Checkpoints converted: from and to the reference implementation of masked mixers, and between the
two forms of a mixing weight.

    python -m mixer.convert SOURCE.safetensors --output DIR [--tokenizer NAME] [--mixing KIND]
    python -m mixer.convert DIR --output FILE.safetensors --back
    python -m mixer.convert DIR --output DIR --mixing-weight lags

The first line takes the weights of a LanguageMixer or of a structured recurrent mixer, and the
second writes such weights. The third gives each mixing weight one number for each distance of
tokens, the mean of its diagonal, and says how far the weights were from having one; `full` is the
way back, which changes nothing. The logits of the first two are the reference's.

A LanguageMixer's file does not say whether a softmax belongs to the mixing, which has no
counterpart here: without --mixing plain the command says that it assumes none. A recurrent mixer's
file does not say which heads mix by row: it needs --mixing rows, columns or mixed. See
mixer/checkpoints/reference_format.py and recurrent_format.py.
"""

import argparse
import sys
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from mixer.checkpoints.pretrained import check_finite, check_vocabulary, load_masked_mixer, settled
from mixer.checkpoints.recurrent_format import from_recurrent, is_recurrent_format, to_recurrent
from mixer.checkpoints.reference_format import (
    ASSUMED,
    HEADS_UNDER,
    from_reference,
    to_reference,
    with_aliases,
)
from mixer.common.errors import UserError, run_command
from mixer.common.files import check_new, check_writable, whole_directory, whole_file
from mixer.data.tokenizer import existing_tokenizer
from mixer.models.masked_mixer.configuration import RECURRENT, MaskedMixerConfig
from mixer.models.masked_mixer.convolution import TriangularConv
from mixer.models.masked_mixer.modeling import MaskedMixerForCausalLM


def convert(
    source: Path, output: Path, tokenizer_name: str | None, mixing: str | None = None
) -> None:
    """Writes a checkpoint directory, with a tokenizer if one is named (directory or hub name).

    mixing: "plain" for a LanguageMixer, which None assumes, and says so; for a recurrent mixer its
    mixing_weight.
    """
    check_new(output)
    if source.suffix != ".safetensors":
        raise UserError(
            f"{source} is not a .safetensors file; write the state dict with "
            "safetensors.torch.save_file first"
        )
    weights = _read(source)
    if wrong := [name for name, value in weights.items() if not value.is_floating_point()]:
        raise UserError(
            f"{source} has {wrong[0]} of type {weights[wrong[0]].dtype}; allowed: floating-point "
            "numbers: give the weights of a LanguageMixer"
        )
    recurrent = is_recurrent_format(weights)
    if not recurrent and mixing in RECURRENT:
        raise UserError(
            f"--mixing {mixing} is for recurrent mixers, and {source} is none; leave it out"
        )
    model = from_recurrent(weights, mixing) if recurrent else from_reference(weights)
    check_finite(source, model)
    tokenizer = None
    if tokenizer_name:
        tokenizer = existing_tokenizer(tokenizer_name)
        what, remedy = f"tokenizer {tokenizer_name!r}", "give the one it was trained with"
        check_vocabulary(tokenizer, model.config.vocab_size, what, remedy)
        model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
        tokenizer.model_max_length = model.config.max_position_embeddings
    disable_progress_bar()  # of transformers: writing takes no time
    with whole_directory(output, new=True) as stage:
        model.save_pretrained(stage)
        if tokenizer is not None:
            tokenizer.save_pretrained(stage)
    note = "" if tokenizer_name else ", without a tokenizer (--tokenizer adds one)"
    print(f"wrote {output}:\n{_describe(model)}{note}")
    if mixing is None and not recurrent:
        print(
            f"ASSUMED: {ASSUMED}. If {source} is one, the logits of {output} are wrong. Give "
            "--mixing plain where you know that it is not.",
            file=sys.stderr,
        )


def convert_back(source: Path, output: Path, heads_under: str) -> None:
    """Writes the weights of a checkpoint directory as a file for the reference implementation."""
    if output.exists() or output.suffix != ".safetensors":
        raise UserError(
            f"--output is {output}; with --back give a .safetensors file that does not exist yet"
        )
    check_writable(output.parent)
    model = load_masked_mixer(source, "which the reference implementation does not have")
    recurrent = model.config.mixing_weight in RECURRENT
    weights = to_recurrent(model) if recurrent else to_reference(model, heads_under)
    with whole_file(output) as stage:
        save_file(weights, stage, metadata={"format": "pt"})
    print(f"wrote {output}:\n{_describe(model)}")


def convert_mixing(source: Path, output: Path, form: str) -> None:
    """Writes the model and tokenizer of a checkpoint with mixing weights of another form, full or
    lags.
    """
    check_new(output)
    model = load_masked_mixer(source, "which has no mixing weights")
    about = model.config.to_dict() | {"mixing_weight": form, "mixing_decay": False}
    if model.config.mixer_key_size:
        about["mixing_init"] = "shift"  # where the lags of keyed mixing count from
    other = MaskedMixerForCausalLM(MaskedMixerConfig(**about))
    given, taken = (
        {name: part for name, part in of.named_modules() if isinstance(part, TriangularConv)}
        for of in (model, other)
    )
    kept = {n: x for n, x in model.state_dict().items() if n.rpartition(".")[0] not in given}
    other.load_state_dict(kept, strict=False)
    distances = []
    for name, conv in given.items():
        weight = conv.mixing_weight().detach().tril()
        taken[name].set_mixing_weight(weight)
        taken[name].bias.data.copy_(conv.bias)
        change = taken[name].mixing_weight().detach().tril() - weight
        distances.append(float(change.norm() / weight.norm().clamp(min=1e-30)))
    disable_progress_bar()
    with whole_directory(output, new=True) as stage:
        other.save_pretrained(stage)
        if (source / "tokenizer_config.json").exists():
            existing_tokenizer(str(source)).save_pretrained(stage)
    mean, largest = sum(distances) / max(1, len(distances)), max(distances, default=0.0)
    print(
        f"wrote {output}:\n{_describe(other)}\nmixing weights changed by {mean:.2%} of their "
        f"norm in the mean, at most {largest:.2%}"
    )


def _read(source: Path) -> dict[str, Tensor]:
    try:
        with safe_open(source, "pt") as file:
            return with_aliases(
                {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
            )
    except (OSError, SafetensorError) as error:
        raise UserError(f"{source} cannot be read ({error}); give a .safetensors file") from None


def _describe(model: MaskedMixerForCausalLM) -> str:
    config = model.config
    kind = "expanded" if config.mixer_expansion else "flat"
    if config.num_mixer_heads > 1:
        kind = f"{config.num_mixer_heads} heads"
    return (
        f"{kind}, kernel size {config.mixer_kernel_size}, {config.num_hidden_layers} layers, "
        f"hidden size {config.hidden_size}, context {config.max_position_embeddings}, "
        f"vocabulary {config.vocab_size}, {model.num_parameters():,} parameters"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m mixer.convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "source",
        type=settled,
        help="a .safetensors file of a LanguageMixer; with --back a checkpoint directory",
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="a new directory; with --back a new .safetensors file",
    )
    parser.add_argument("--tokenizer", help="a directory or hub name, to be saved with the model")
    parser.add_argument(
        "--back", action="store_true", help="from a checkpoint here to the reference's weights"
    )
    parser.add_argument(
        "--heads-under",
        choices=HEADS_UNDER,
        default="mixerhead",
        help="with --back: the name of a block's heads",
    )
    parser.add_argument(
        "--mixing",
        choices=["plain", *RECURRENT],
        help="of a LanguageMixer: plain, it has no softmax in its mixing (default: assumed, and "
        "said); of a recurrent mixer: how its heads mix",
    )
    parser.add_argument(
        "--mixing-weight",
        choices=["full", "lags"],
        help="from a checkpoint here to one with mixing weights of this form",
    )
    options = parser.parse_args()
    if options.mixing_weight:
        if options.back or options.tokenizer or options.mixing:
            raise UserError("--mixing-weight goes with --output alone; leave out the other options")
        convert_mixing(options.source, options.output, options.mixing_weight)
    elif options.back:
        if options.tokenizer or options.mixing:
            raise UserError(
                "--tokenizer and --mixing are for the reference's weights on their way here; leave "
                "them out with --back, which writes weights alone"
            )
        convert_back(options.source, options.output, options.heads_under)
    else:
        convert(options.source, options.output, options.tokenizer, options.mixing)


if __name__ == "__main__":
    run_command(main)
