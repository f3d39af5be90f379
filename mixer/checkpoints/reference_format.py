"""Weights in the format of the reference implementation of masked mixers, read and written.

The reference implementation calls its model LanguageMixer. Its state dict holds the same numbers as
ours under other names, with the axes of a convolution in another order, and with one tensor for
each head where ours has one for all heads.

The reference masks its convolution weights in each forward, so their upper triangles may hold
anything; here they become zero. Three forms of it have the same logits and are read too: without
biases in the convolutions; with Linear layers in place of convolutions of kernel size 1
(torch_compile=True); and with a tied weight saved once (safetensors.torch.save_model).

A state dict does not say everything about a model, and what it does not say is assumed to be as in
the paper; ASSUMED says what. No look at the weights could tell.
"""

import itertools
import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from mixer.common.errors import UserError
from mixer.models.masked_mixer.configuration import MaskedMixerConfig
from mixer.models.masked_mixer.convolution import TriangularConv
from mixer.models.masked_mixer.modeling import MaskedMixerForCausalLM

NAME = "a LanguageMixer"
LAYERS = {  # the reference's names of what every block has, and ours
    "seq_layernorm": "mixing_norm",
    "patch_layernorm": "mlp_norm",
    "patch_ff.0": "mlp.up_proj",
    "patch_ff.2": "mlp.down_proj",
}
PREFIXES = r"(?:(?:model|module|_orig_mod)\.)*"  # what wrappers put before every key
HEADS_UNDER = ("mixerhead", "conv")  # names that the reference has had for a block's heads
CONVOLUTION = re.compile(  # the weight of one, in a block with heads, an expanded or a flat one
    r"(mixerblocks\.\d+\.(?:(?:mixerhead|conv)\.convs\.\d+|conv\.[02]|conv))\.weight"
)
ASSUMED = (
    "plain mixing: masked convolutions, and no softmax over their weights or outputs. The file "
    "does not say so: a softmax mixer has the same keys and shapes"
)


def from_reference(source: Mapping[str, Tensor]) -> MaskedMixerForCausalLM:
    """The model of a LanguageMixer's state dict, in fp32 and eval mode, as ASSUMED.

    Raises UserError naming every key that is unknown or missing, and every tensor whose shape does
    not fit the others.
    """
    source = _with_convolutions(without_prefix(source))
    heads_under = "mixerhead" if any(".mixerhead." in key for key in source) else "conv"
    config = _config(source, heads_under)
    model = MaskedMixerForCausalLM(config).eval()
    tensors = _tensors(model)
    pieces = {
        key: _as_reference(tensors[ours], ours, part)
        for key, ours, part in _names(config, heads_under)
    }
    compare(source, pieces)
    for key, piece in pieces.items():
        piece.copy_(source[key])
    for name, conv in _convolutions(model):
        conv.set_mixing_weight(tensors[f"{name}.weight"])
    return model


def to_reference(
    model: MaskedMixerForCausalLM, heads_under: str = "mixerhead"
) -> dict[str, Tensor]:
    """The state dict of a LanguageMixer with the model's logits, in the model's dtype.

    heads_under: the reference's name for the heads of a block, one of HEADS_UNDER.
    Raises UserError for a model that the reference implementation does not have.
    """
    config, heads = model.config, model.config.num_mixer_heads
    absent = {
        "a final norm (final_norm: true)": config.final_norm,
        "linear layers without biases (linear_bias: false)": not config.linear_bias,
        f"the MLP's nonlinearity (hidden_act: {config.hidden_act})": config.hidden_act != "gelu",
        f"expansion with heads (mixer_expansion: true, num_mixer_heads: {heads})": (
            config.mixer_expansion and heads > 1
        ),
        "an MLP before the mixing (mlp_first: true)": config.mlp_first,
        "gated mixing (mixer_gate: true)": config.mixer_gate,
        f"keyed mixing (mixer_key_size: {config.mixer_key_size})": config.mixer_key_size,
        "heads without projections (mixer_projections: false)": (
            heads > 1 and not config.mixer_projections
        ),
    }
    if any(absent.values()):
        parts = " nor ".join(part for part, is_there in absent.items() if is_there)
        raise UserError(
            f"the reference implementation does not have {parts}; this model cannot be converted "
            "to its format"
        )
    tensors = _tensors(model)
    views = {
        key: _as_reference(tensors[ours], ours, part)
        for key, ours, part in _names(config, heads_under)
    }
    return {key: view.clone(memory_format=torch.contiguous_format) for key, view in views.items()}


def _convolutions(model: MaskedMixerForCausalLM) -> Iterator[tuple[str, TriangularConv]]:
    for name, module in model.named_modules():
        if isinstance(module, TriangularConv):
            yield name, module


def _tensors(model: MaskedMixerForCausalLM) -> dict[str, Tensor]:
    """The model's parameters by name, which may be written to, but for the weights of convolutions:
    there, copies of the weights that tokens are mixed with.
    """
    tensors = model.state_dict()
    for name, conv in _convolutions(model):
        tensors[f"{name}.weight"] = conv.mixing_weight().detach().tril()
    return tensors


def _names(config: MaskedMixerConfig, heads_under: str) -> Iterator[tuple[str, str, int | slice]]:
    """(the reference's key, ours, which part of our tensor) for every tensor of the reference."""
    whole = slice(None)
    yield "wte.weight", "model.embed_tokens.weight", whole
    yield "lm_head.weight", "lm_head.weight", whole
    for number in range(config.num_hidden_layers):
        block, ours = f"mixerblocks.{number}.", f"model.layers.{number}."
        for kind in ("weight", "bias"):
            for name, our_name in LAYERS.items():
                yield f"{block}{name}.{kind}", f"{ours}{our_name}.{kind}", whole
            yield from _mixing_names(
                config, f"{block}{heads_under}.", block, f"{ours}mixing.", kind
            )


def _mixing_names(
    config: MaskedMixerConfig, heads: str, block: str, mixing: str, kind: str
) -> Iterator[tuple[str, str, int | slice]]:
    """As `_names`, for the weights or biases (`kind`) of one block's token mixing.

    heads, block and mixing: what stands before the reference's keys of heads, before all its keys,
    and before our keys.
    """
    if config.num_mixer_heads > 1:
        yield f"{heads}out_proj.{kind}", f"{mixing}out_proj.{kind}", slice(None)
        width = config.hidden_size // config.num_mixer_heads
        for head in range(config.num_mixer_heads):
            rows = slice(head * width, (head + 1) * width)
            yield f"{heads}proj_head.{head}.{kind}", f"{mixing}in_proj.{kind}", rows
            yield f"{heads}convs.{head}.{kind}", f"{mixing}conv.{kind}", head
    elif config.mixer_expansion:
        yield f"{block}conv.0.{kind}", f"{mixing}conv.{kind}", 0
        yield f"{block}conv.2.{kind}", f"{mixing}second_conv.{kind}", 0
    else:
        yield f"{block}conv.{kind}", f"{mixing}conv.{kind}", 0


def _as_reference(tensor: Tensor, name: str, part: int | slice) -> Tensor:
    """A part of our tensor as the reference holds it: a view. A convolution is (taps, out, in) here
    and (out, in, taps) there.
    """
    return tensor[part].permute(1, 2, 0) if name.endswith("conv.weight") else tensor[part]


def without_prefix(
    source: Mapping[str, Tensor], embedding: str = "wte", model: str = NAME
) -> dict[str, Tensor]:
    """The state dict without what wrappers put before every key, known by that of the embedding.
    model: names it in an error.
    """
    pattern = re.compile(rf"({PREFIXES}){embedding}\.weight")
    prefixes = {match.group(1) for key in source if (match := pattern.fullmatch(key))}
    if len(prefixes) != 1:
        raise UserError(
            f"these are not the weights of {model}: {len(prefixes)} keys are {embedding}.weight, "
            "with nothing or model. or module. before it; the first keys are "
            f"{', '.join(sorted(source)[:4])}"
        )
    return {key.removeprefix(*prefixes): tensor for key, tensor in source.items()}


def with_aliases(
    source: Mapping[str, Tensor], metadata: Mapping[str, str] | None
) -> dict[str, Tensor]:
    """The tensors of a file with those that safetensors.torch.save_model has left out, because they
    are the same as others: its metadata has the name of the other under theirs.
    """
    names = (metadata or {}).items()
    aliases = {name: source[other] for name, other in names if other in source}
    return aliases | dict(source)


def _with_convolutions(source: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict with Linear layers (out, in) as convolutions (out, in, 1); with biases of zero
    if no convolution has any.
    """
    source = dict(source)
    names = [match.group(1) for key in source if (match := CONVOLUTION.fullmatch(key))]
    no_biases = not any(f"{name}.bias" in source for name in names)
    for name in names:
        weight = source[f"{name}.weight"]
        if weight.dim() == 2:
            source[f"{name}.weight"] = weight[..., None]
        if no_biases and weight.dim() > 1:
            source[f"{name}.bias"] = weight.new_zeros(weight.shape[0])
    return source


def _config(source: Mapping[str, Tensor], heads_under: str) -> MaskedMixerConfig:
    """The sizes of the model, from the tensors of the first block. `compare` checks later whether
    the other blocks agree.
    """
    first, under = "mixerblocks.0.", f"mixerblocks.0.{heads_under}."
    head_weight = re.compile(rf"{re.escape(under)}convs\.\d+\.weight")
    heads = sum(head_weight.fullmatch(key) is not None for key in source)
    expansion = f"{first}conv.0.weight" in source
    if heads:
        conv = f"{under}convs.0.weight"
    else:
        conv = f"{first}conv.0.weight" if expansion else f"{first}conv.weight"
    mlp = f"{first}patch_ff.0.weight"
    for key, dimensions in (("wte.weight", 2), (conv, 3), (mlp, 2)):
        if key not in source:
            raise UserError(
                f"the weights lack {key}, which tells the model's sizes; give the whole state dict "
                "of a LanguageMixer"
            )
        if source[key].dim() != dimensions:
            raise UserError(
                f"{key} has shape {tuple(source[key].shape)}; a LanguageMixer's has {dimensions} "
                "dimensions"
            )
    if heads == 1:
        raise UserError(
            f"{under}convs has one head, with projections around it; the model here has these for "
            "2 heads or more"
        )
    vocabulary, hidden = source["wte.weight"].shape
    context, _, taps = source[conv].shape
    numbers = {key.split(".")[1] for key in source if key.startswith("mixerblocks.")}
    # Those without a gap. A block behind one, or with a number of millions, is an unknown key.
    blocks = next(number for number in itertools.count() if str(number) not in numbers)
    try:
        return MaskedMixerConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            num_hidden_layers=blocks,
            max_position_embeddings=context,
            intermediate_size=source[mlp].shape[0],
            num_mixer_heads=max(heads, 1),
            mixer_kernel_size=taps,
            mixer_expansion=expansion,
        )
    except ValueError as error:
        raise UserError(f"the weights are not those of a masked mixer: {error}") from None


def compare(source: Mapping[str, Tensor], pieces: Mapping[str, Tensor], model: str = NAME) -> None:
    """Raises UserError, naming the model, unless `source` has just the keys and shapes of
    `pieces`.
    """
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
            f"the weights are not those of {model} that can be converted; nothing is "
            f"guessed:\n  {listing}"
        )
