"""Weights in the format of the reference implementation of masked mixers, read and written.

The reference implementation calls its model LanguageMixer. Its state dict holds the same numbers as
ours under other names, with the axes of a convolution in another order, and with one tensor for
each head where ours has one for all heads.

The reference masks its convolution weights in each forward, so their upper triangles may hold
anything; here they become zero. Other forms of it have the same logits and are read too: without
biases in the convolutions; with Linear layers in place of convolutions of kernel size 1
(torch_compile=True); with heads under the name `conv`; and with a tied weight saved once
(safetensors.torch.save_model).

A state dict does not say everything about a model, and what it does not say is assumed to be as in
the paper; ASSUMED says what. No look at the weights could tell.
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mixer.common.errors import UserError, first_line
from mixer.models.masked_mixer.configuration import NAMES as OPTIONS
from mixer.models.masked_mixer.configuration import MaskedMixerConfig
from mixer.models.masked_mixer.convolution import TriangularConv
from mixer.models.masked_mixer.modeling import MaskedMixerForCausalLM

NAME = "a LanguageMixer"
NAMES = {  # ours, and the reference's
    "model.embed_tokens": "wte",
    "model.layers": "mixerblocks",
    "mixing_norm": "seq_layernorm",
    "mlp_norm": "patch_layernorm",
    "mlp.up_proj": "patch_ff.0",
    "mlp.down_proj": "patch_ff.2",
}
# A convolution's weight: of a head, of one of two (expanded), or of the only one (flat).
CONVOLUTION = re.compile(r"(mixerblocks\.\d+\.(?:mixerhead\.convs\.\d+|conv\.[02]|conv)\.)weight")
ASSUMED = (
    "plain mixing: masked convolutions, and no softmax over their weights or outputs. The file "
    "does not say so: a softmax mixer has the same keys and shapes"
)
# The options of a model here that the reference has too, or that do not change what it computes.
SHARED = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"),
    *("intermediate_size", "num_mixer_heads", "mixer_kernel_size", "mixer_expansion"),
    *("tie_word_embeddings", "mixing_weight", "mixing_init", "zero_init", "mixing_backend"),
)


def read_weights(file: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file, with those that safetensors.torch.save_model has left out
    because they are the same as others: the metadata has the name of the other under theirs.
    """
    try:
        with safe_open(file, "pt") as opened:
            weights = {name: opened.get_tensor(name) for name in opened.keys()}
            names = (opened.metadata() or {}).items()
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} cannot be read ({error}); give a .safetensors file") from None
    if wrong := [name for name, value in weights.items() if not value.is_floating_point()]:
        raise UserError(
            f"{file} has {wrong[0]} of type {weights[wrong[0]].dtype}; allowed: floating-point "
            "numbers: give the weights of a LanguageMixer"
        )
    return {name: weights[other] for name, other in names if other in weights} | weights


@torch.no_grad()
def from_reference(source: Mapping[str, Tensor]) -> MaskedMixerForCausalLM:
    """The model of a LanguageMixer's state dict, in fp32 and eval mode, as ASSUMED.

    Raises UserError naming every key that is unknown or missing, and every tensor whose shape does
    not fit the others.
    """
    source = _in_one_form(source)
    model = MaskedMixerForCausalLM(_config(source)).eval()
    fill(dict(_pieces(model.state_dict(), model.config)), source)
    for module in model.modules():
        if isinstance(module, TriangularConv):
            module.weight.tril_()
    return model


def to_reference(model: MaskedMixerForCausalLM) -> dict[str, Tensor]:
    """The state dict of a LanguageMixer with the model's logits, in the model's dtype.

    Raises UserError for a model that the reference implementation does not have.
    """
    config, plain = model.config, MaskedMixerConfig()
    absent = [
        f"{name} = {getattr(config, name)}"
        for name in OPTIONS
        if name not in SHARED and getattr(config, name) != getattr(plain, name)
    ]
    if config.mixer_expansion and config.num_mixer_heads > 1:
        absent.append(f"mixer_expansion with num_mixer_heads = {config.num_mixer_heads}")
    if absent:
        raise UserError(
            f"the reference implementation does not have {', '.join(absent)}; this model cannot be "
            "converted to its format"
        )
    tensors = {name: x for name, x in model.state_dict().items() if not name.endswith(".lags")}
    for name, module in model.named_modules():
        if isinstance(module, TriangularConv):
            tensors[f"{name}.weight"] = module.mixing_weight().detach().tril()
    pieces = _pieces(tensors, config)
    return {key: piece.clone(memory_format=torch.contiguous_format) for key, piece in pieces}


def _pieces(
    tensors: Mapping[str, Tensor], config: MaskedMixerConfig
) -> Iterator[tuple[str, Tensor]]:
    """Views of the model's tensors, under the reference's names and with its axes."""
    several = config.num_mixer_heads > 1
    layers = {"conv": "conv.0" if config.mixer_expansion else "conv", "second_conv": "conv.2"}
    for name, tensor in tensors.items():
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        block, is_mixing, part = name.partition("mixing.")
        layer, _, kind = part.partition(".")
        if layer in layers:  # (heads, taps, out, in) -> (heads, out, in, taps)
            tensor = tensor.permute(0, 2, 3, 1) if kind == "weight" else tensor
        if not is_mixing:
            yield name, tensor
        elif not several:
            yield f"{block}{layers[layer]}.{kind}", tensor[0]
        elif layer == "out_proj":
            yield f"{block}mixerhead.out_proj.{kind}", tensor
        else:
            parts = tensor if layer == "conv" else tensor.chunk(config.num_mixer_heads)
            theirs = {"conv": "convs", "in_proj": "proj_head"}[layer]
            for head, piece in enumerate(parts):
                yield f"{block}mixerhead.{theirs}.{head}.{kind}", piece


def without_prefix(
    source: Mapping[str, Tensor], embedding: str = "wte", model: str = NAME
) -> dict[str, Tensor]:
    """The state dict without what wrappers put before every key, known by that of the embedding.
    model: names it in an error.
    """
    pattern = re.compile(rf"((?:(?:model|module|_orig_mod)\.)*){embedding}\.weight")
    prefixes = {match.group(1) for key in source if (match := pattern.fullmatch(key))}
    if len(prefixes) != 1:
        raise UserError(
            f"these are not the weights of {model}: {len(prefixes)} keys are {embedding}.weight, "
            "with nothing or model. or module. before it; the first keys are "
            f"{', '.join(sorted(source)[:4])}"
        )
    return {key.removeprefix(*prefixes): tensor for key, tensor in source.items()}


def _in_one_form(source: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict without a prefix, with heads under the name `mixerhead`, Linear layers (out,
    in) as convolutions (out, in, 1), and biases of zero if no convolution has any.
    """
    source = {
        re.sub(r"\.conv\.(convs|proj_head|out_proj)\.", r".mixerhead.\1.", key): tensor
        for key, tensor in without_prefix(source).items()
    }
    layers = [match.group(1) for key in source if (match := CONVOLUTION.fullmatch(key))]
    no_biases = not any(f"{layer}bias" in source for layer in layers)
    for layer in layers:
        weight = source[f"{layer}weight"]
        if weight.dim() == 2:
            source[f"{layer}weight"] = weight[..., None]
        if no_biases:
            source[f"{layer}bias"] = weight.new_zeros(weight.shape[:1])
    return source


def _config(source: Mapping[str, Tensor]) -> MaskedMixerConfig:
    """The sizes of the model, from the tensors of the first block. `fill` checks later whether the
    other blocks agree.
    """
    first = "mixerblocks.0."
    of_heads = re.compile(r"mixerblocks\.0\.mixerhead\.convs\.\d+\.weight")
    heads = sum(of_heads.fullmatch(key) is not None for key in source)
    is_expanded = f"{first}conv.0.weight" in source
    conv = "mixerhead.convs.0" if heads else "conv.0" if is_expanded else "conv"
    try:
        vocabulary, hidden = source["wte.weight"].shape
        context, _, taps = source[f"{first}{conv}.weight"].shape
        width, _ = source[f"{first}patch_ff.0.weight"].shape
        return MaskedMixerConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            num_hidden_layers=count_blocks(source, "mixerblocks"),
            max_position_embeddings=context,
            intermediate_size=width,
            num_mixer_heads=max(heads, 1),
            mixer_kernel_size=taps,
            mixer_expansion=is_expanded,
        )
    except (KeyError, ValueError) as error:
        raise UserError(
            f"the weights do not tell the sizes of a LanguageMixer ({first_line(error)}); give its "
            "whole state dict"
        ) from None


def count_blocks(source: Mapping[str, Tensor], prefix: str) -> int:
    """How many blocks there are without a gap. A block behind one is an unknown key."""
    numbers = {key.split(".")[1] for key in source if key.startswith(f"{prefix}.")}
    return next(number for number in itertools.count() if str(number) not in numbers)


def fill(pieces: Mapping[str, Tensor], source: Mapping[str, Tensor], model: str = NAME) -> None:
    """Copies `source` into tensors under the same keys. Raises UserError, naming the model, unless
    it has just their keys and shapes.
    """
    shapes, wanted = ({key: tuple(of[key].shape) for key in of} for of in (source, pieces))
    problems = [f"unknown: {key} {shapes[key]}" for key in sorted(shapes.keys() - wanted)]
    problems += [f"missing: {key} {wanted[key]}" for key in sorted(wanted.keys() - shapes)]
    problems += [
        f"{key} has shape {shapes[key]}, expected {shape}"
        for key, shape in wanted.items()
        if shapes.get(key, shape) != shape
    ]
    if problems:
        listing = "\n  ".join(problems)
        raise UserError(
            f"the weights are not those of {model} that can be converted; nothing is "
            f"guessed:\n  {listing}"
        )
    for key, piece in pieces.items():
        piece.copy_(source[key])
