"""Checkpoints of the reference implementation of masked mixers, read and written.

    python -m mixer.convert SOURCE.safetensors --output DIR [--tokenizer NAME]     a LanguageMixer's weights -> a checkpoint
    python -m mixer.convert DIR --output FILE.safetensors --back                   and back

Logits are those of the reference. Its convolution weights are masked here, as it masks them itself
in each forward. What a state dict cannot tell is taken as the paper has it: a model whose weight
goes through a softmax, or whose expanded convolution is not masked, has the same keys and other
logits.
"""

import argparse
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mixer.checkpoints.pretrained import LARGEST_PADDING, load_masked_mixer
from mixer.common.errors import UserError, run_command
from mixer.common.files import check_writable
from mixer.data.tokenizer import existing_tokenizer, vocabulary_size
from mixer.models.masked_mixer.configuration import MaskedMixerConfig
from mixer.models.masked_mixer.modeling import MaskedMixerForCausalLM

LAYERS = {  # the reference's names of what every block has, and ours
    "seq_layernorm": "mixing_norm",
    "patch_layernorm": "mlp_norm",
    "patch_ff.0": "mlp.up_proj",
    "patch_ff.2": "mlp.down_proj",
}
PREFIXES = r"(?:(?:model|module|_orig_mod)\.)*"  # what wrappers put before every key
HEADS_UNDER = ("mixerhead", "conv")  # names that the reference has had for a block's heads


def from_reference(source: Mapping[str, Tensor]) -> MaskedMixerForCausalLM:
    """The model of a LanguageMixer's state dict, in fp32 and eval mode.

    Raises UserError naming every key that is unknown or missing, and every tensor whose shape does
    not fit the others.
    """
    source = _without_prefix(source)
    heads_under = "mixerhead" if any(".mixerhead." in key for key in source) else "conv"
    config = _config(source, heads_under)
    model = MaskedMixerForCausalLM(config).eval()
    state = model.state_dict()  # the parameters themselves: writing here sets them
    pieces = {
        key: _as_reference(state[ours], ours, part)
        for key, ours, part in _names(config, heads_under)
    }
    _compare(source, pieces)
    for key, piece in pieces.items():
        piece.copy_(source[key])
    for name, tensor in state.items():
        if name.endswith("conv.weight"):
            tensor.tril_()
    return model


def to_reference(
    model: MaskedMixerForCausalLM, heads_under: str = "mixerhead"
) -> dict[str, Tensor]:
    """The state dict of a LanguageMixer with the model's logits, in the model's dtype;
    `heads_under` names a block's heads.

    Raises UserError for what the reference implementation does not have.
    """
    config = model.config
    absent = []
    if config.final_norm:
        absent.append("a final norm (final_norm: true)")
    if config.mixer_expansion and config.num_mixer_heads > 1:
        absent.append(
            f"expansion with heads (mixer_expansion: true, num_mixer_heads: {config.num_mixer_heads})"
        )
    if absent:
        raise UserError(
            f"the reference implementation does not have {' nor '.join(absent)}; this model cannot go back to it"
        )
    state = model.state_dict()
    views = {
        key: _as_reference(state[ours], ours, part)
        for key, ours, part in _names(config, heads_under)
    }
    return {key: view.clone(memory_format=torch.contiguous_format) for key, view in views.items()}


def _names(config: MaskedMixerConfig, heads_under: str) -> Iterator[tuple[str, str, int | slice]]:
    """(the reference's key, ours, which part of our tensor) for every tensor of the reference."""
    whole = slice(None)
    yield "wte.weight", "model.embed_tokens.weight", whole
    yield "lm_head.weight", "lm_head.weight", whole
    for number in range(config.num_hidden_layers):
        block, mixing = f"mixerblocks.{number}.", f"model.layers.{number}.mixing."
        for kind in ("weight", "bias"):
            for theirs, ours in LAYERS.items():
                yield f"{block}{theirs}.{kind}", f"model.layers.{number}.{ours}.{kind}", whole
            if config.num_mixer_heads > 1:
                yield f"{block}{heads_under}.out_proj.{kind}", f"{mixing}out_proj.{kind}", whole
                width = config.hidden_size // config.num_mixer_heads
                for head in range(config.num_mixer_heads):
                    rows = slice(head * width, (head + 1) * width)
                    yield (
                        f"{block}{heads_under}.proj_head.{head}.{kind}",
                        f"{mixing}in_proj.{kind}",
                        rows,
                    )
                    yield f"{block}{heads_under}.convs.{head}.{kind}", f"{mixing}conv.{kind}", head
            elif config.mixer_expansion:
                yield f"{block}conv.0.{kind}", f"{mixing}conv.{kind}", 0
                yield f"{block}conv.2.{kind}", f"{mixing}second_conv.{kind}", 0
            else:
                yield f"{block}conv.{kind}", f"{mixing}conv.{kind}", 0


def _as_reference(tensor: Tensor, name: str, part: int | slice) -> Tensor:
    """A view of our tensor's part as the reference holds it: a convolution's (taps, out, in) is its
    (out, in, taps).
    """
    return tensor[part].permute(1, 2, 0) if name.endswith("conv.weight") else tensor[part]


def _without_prefix(source: Mapping[str, Tensor]) -> dict[str, Tensor]:
    prefixes = {
        match.group(1)
        for key in source
        if (match := re.fullmatch(rf"({PREFIXES})wte\.weight", key))
    }
    if len(prefixes) != 1:
        raise UserError(
            f"these are not the weights of a LanguageMixer: {len(prefixes)} keys are wte.weight, behind nothing or model. or "
            f"module.; the first keys are {', '.join(sorted(source)[:4])}"
        )
    return {key.removeprefix(*prefixes): tensor for key, tensor in source.items()}


def _config(source: Mapping[str, Tensor], heads_under: str) -> MaskedMixerConfig:
    """The sizes, as the tensors of the first block have them; whether the others agree is seen
    later.
    """
    first, under = "mixerblocks.0.", f"mixerblocks.0.{heads_under}."
    heads = sum(
        re.fullmatch(rf"{re.escape(under)}convs\.\d+\.weight", key) is not None for key in source
    )
    expansion = f"{first}conv.0.weight" in source
    conv = (
        f"{under}convs.0.weight"
        if heads
        else f"{first}conv.0.weight"
        if expansion
        else f"{first}conv.weight"
    )
    for key, dimensions in (("wte.weight", 2), (conv, 3), (f"{first}patch_ff.0.weight", 2)):
        if key not in source:
            raise UserError(
                f"the weights lack {key}, which tells the model's sizes; give the whole state dict of a LanguageMixer"
            )
        if source[key].dim() != dimensions:
            raise UserError(
                f"{key} has shape {tuple(source[key].shape)}; a LanguageMixer's has {dimensions} dimensions"
            )
    if heads == 1:
        raise UserError(
            f"{under}convs has one head, with projections around it; the model here has these for 2 heads or more"
        )
    vocabulary, hidden = source["wte.weight"].shape
    context, _, taps = source[conv].shape
    blocks = [
        int(match.group(1)) for key in source if (match := re.match(r"mixerblocks\.(\d+)\.", key))
    ]
    try:
        return MaskedMixerConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            num_hidden_layers=max(blocks) + 1,
            max_position_embeddings=context,
            intermediate_size=source[f"{first}patch_ff.0.weight"].shape[0],
            num_mixer_heads=max(heads, 1),
            mixer_kernel_size=taps,
            mixer_expansion=expansion,
        )
    except ValueError as error:
        raise UserError(f"the weights are of no masked mixer: {error}") from None


def _compare(source: Mapping[str, Tensor], pieces: Mapping[str, Tensor]) -> None:
    problems = [
        f"unknown: {key} {tuple(source[key].shape)}" for key in sorted(set(source) - set(pieces))
    ]
    problems += [
        f"missing: {key} {tuple(pieces[key].shape)}" for key in sorted(set(pieces) - set(source))
    ]
    problems += [
        f"{key} has shape {tuple(source[key].shape)}, expected {tuple(piece.shape)}"
        for key, piece in pieces.items()
        if key in source and source[key].shape != piece.shape
    ]
    if problems:
        listing = "\n  ".join(problems)
        raise UserError(
            f"the weights are not those of a LanguageMixer that can be converted; nothing is guessed:\n  {listing}"
        )


def convert(source: Path, output: Path, tokenizer_name: str | None) -> None:
    """Writes a checkpoint directory, with the tokenizer where one is named."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} exists already; choose another --output, or delete it")
    if source.suffix != ".safetensors":
        raise UserError(
            f"{source} is not a .safetensors file; write the state dict with safetensors.torch.save_file first"
        )
    check_writable(output)
    model = from_reference(_read(source))
    if tokenizer_name:
        tokenizer = existing_tokenizer(tokenizer_name)
        ids, embeddings = vocabulary_size(tokenizer), model.config.vocab_size
        if not ids <= embeddings <= ids + LARGEST_PADDING:
            raise UserError(
                f"tokenizer {tokenizer_name!r} has {ids} ids, the model {embeddings} embeddings; allowed: as many, or up to "
                f"{LARGEST_PADDING} more in the model: give the tokenizer that the model was trained with"
            )
        model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
        tokenizer.model_max_length = model.config.max_position_embeddings
        tokenizer.save_pretrained(output)
    model.save_pretrained(output)
    print(
        f"wrote {output}: {_describe(model)}"
        + ("" if tokenizer_name else ", without a tokenizer (--tokenizer adds one)")
    )


def convert_back(source: Path, output: Path, heads_under: str) -> None:
    """Writes a file of the reference's weights."""
    if output.exists() or output.suffix != ".safetensors":
        raise UserError(
            f"--output is {output}; with --back give a .safetensors file that does not exist yet"
        )
    check_writable(output.parent)
    model = load_masked_mixer(source, "which the reference implementation does not have")
    output.parent.mkdir(parents=True, exist_ok=True)
    save_file(to_reference(model, heads_under), output, metadata={"format": "pt"})
    print(f"wrote {output}: {_describe(model)}")


def _read(source: Path) -> dict[str, Tensor]:
    try:
        return load_file(source)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{source} cannot be read ({error}); give a .safetensors file") from None


def _describe(model: MaskedMixerForCausalLM) -> str:
    config = model.config
    kind = (
        f"{config.num_mixer_heads} heads"
        if config.num_mixer_heads > 1
        else "expanded"
        if config.mixer_expansion
        else "flat"
    )
    return (
        f"{kind}, kernel size {config.mixer_kernel_size}, {config.num_hidden_layers} layers, hidden size {config.hidden_size}, "
        f"context {config.max_position_embeddings}, vocabulary {config.vocab_size}, {model.num_parameters():,} parameters"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "source",
        type=Path,
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
    options = parser.parse_args()
    if options.back:
        convert_back(options.source, options.output, options.heads_under)
    else:
        convert(options.source, options.output, options.tokenizer)


if __name__ == "__main__":
    run_command(main)
