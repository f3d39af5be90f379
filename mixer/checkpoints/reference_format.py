"""Reads and writes the author's weight formats: those of the reference implementation of masked
mixers, and of structured mixers, Toeplitz (arXiv 2605.06683) or recurrent (arXiv 2605.08696).

Their state dicts hold the same numbers as ours under other names, with one tensor per head where
ours have one for all heads.

LanguageMixer, the reference implementation, orders the axes of a convolution differently. It masks
its weights in each forward pass, so their upper triangles may hold anything; here they become zero.
Variants with the same logits are read too: convolutions without biases; Linear layers in place of
convolutions of kernel size 1 (torch_compile=True); heads under the name `conv`; and a tied weight
saved once (safetensors.torch.save_model). ASSUMED is what a state dict does not say.

MLPMixer, the structured one, has each block's MLP first, with SiLU, and saves a decay as d, here
1 - d. Tokens stand in columns there, so the author's ColRepeat has our heads by row, and RowRepeat
has heads by column. Keys and shapes do not tell these two, or weights by lag, apart. Heads that are
one layer, ParallelRepeatHeads and ParallelToeplitzHeads, are read as the separate ones of
MixedRepeatHeads and ToeplitzHeads. All Toeplitz mixers and some recurrent ones have a dropout in
the MLP, which has no weights but moves the number of the layer behind it: `reference_dropout` in
the configuration keeps which, for the way back.

A file without lm_head, or without the embedding, is of a model that ties the two.
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from mixer.checkpoints.model_files import check_weights_file
from mixer.common.errors import UserError, first_line
from mixer.models.masked_mixer.configuration import NAMES as OPTIONS
from mixer.models.masked_mixer.configuration import RECURRENT, MaskedMixerConfig
from mixer.models.masked_mixer.convolution import TriangularConv
from mixer.models.masked_mixer.modeling import MaskedMixerForCausalLM

ASSUMED = (
    "plain mixing: masked convolutions, and no softmax over their weights or outputs. The file "
    "does not say so: a softmax mixer has the same keys and shapes"
)
# Options that both formats have too, or that do not change what a model computes.
SHARED = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"),
    *("intermediate_size", "num_mixer_heads", "tie_word_embeddings", "mixing_weight"),
    *("mixing_init", "kaiming_init", "mixing_backend"),
)
EMBEDDING = "model.embed_tokens"
BLOCKS = "model.layers"
HEAD = "lm_head"
PARALLEL = ".mixer_heads.weight"  # of all heads of a structured mixer, where they are one layer
BEHIND_DROPOUT = "channel_mixing_layer.3."
WITHOUT_DROPOUT = "channel_mixing_layer.2."
EXPANDED = re.compile(r"token_mixing_layer\.(mixer_heads\.\d+\.)?3\.weight")
Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Format:
    """The author's names for the parts of a model."""

    model: str
    names: dict[str, str]  # ours, and the author's
    alone: str  # the only convolution of a block without heads
    heads: str  # the list of convolutions of a block with heads
    options: tuple[str, ...]  # that models of this format have besides SHARED
    fixed: dict[str, Any]  # options of all its models that differ from our defaults


LANGUAGE_MIXER = Format(
    model="a LanguageMixer",
    names={
        EMBEDDING: "wte",
        BLOCKS: "mixerblocks",
        HEAD: "lm_head",
        "mixing_norm": "seq_layernorm",
        "mlp_norm": "patch_layernorm",
        "mlp.up_proj": "patch_ff.0",
        "mlp.down_proj": "patch_ff.2",
    },
    alone="conv",
    heads="mixerhead.convs",
    options=("mixer_kernel_size", "mixer_expansion"),
    fixed={},
)
STRUCTURED_MIXER = Format(
    model="a structured mixer",
    names={
        EMBEDDING: "input_layer",
        BLOCKS: "mixer_blocks",
        HEAD: "output_layer",
        "mixing_norm": "token_norm",
        "mlp_norm": "channel_norm",
        "mlp.up_proj": "channel_mixing_layer.0",
        "mlp.down_proj": "channel_mixing_layer.2",
        "conv.scale": "conv.weight",
        "conv.lags": "conv.weight",
        "conv.decay": "conv.decay_value",
    },
    alone="token_mixing_layer",
    heads="token_mixing_layer.mixer_heads",
    options=("mixer_projections", "mixing_decay"),
    fixed={"mlp_first": True, "hidden_act": "silu"},
)


def read_weights(file: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file. safetensors.torch.save_model leaves out tensors that are
    the same as others, and names the others in the metadata.
    """
    check_weights_file(file)
    with safe_open(file, "pt") as opened:
        weights = {name: opened.get_tensor(name) for name in opened.keys()}
        aliases = opened.metadata() or {}  # tensors that are left out, and what they equal
    copies = {name: weights[saved] for name, saved in aliases.items() if saved in weights}
    return copies | weights


@torch.no_grad()
def from_reference(source: Weights, mixing: str | None = None) -> MaskedMixerForCausalLM:
    """The model of one of the author's state dicts, in fp32 and eval mode, as ASSUMED.

    mixing: the mixing_weight of a structured mixer. Raises UserError if it is missing or unwanted,
    and for unknown or missing keys and shapes that do not fit, naming each.
    """
    is_structured = any("mixer_blocks." in key for key in source)
    form = STRUCTURED_MIXER if is_structured else LANGUAGE_MIXER
    is_parallel = any(key.endswith(PARALLEL) for key in source)
    is_wrong = is_parallel and mixing not in ("mixed", "lags")
    if (mixing is not None) != is_structured or is_wrong:
        raise UserError(
            f"these are the weights of {form.model}, and --mixing is {mixing}; allowed: no --mixing"
            " for a LanguageMixer; for a structured mixer, lags (the author's Toeplitz layers), "
            "rows (ColRepeat), columns (RowRepeat) or mixed (MixedRepeatHeads); for heads that are "
            "one layer, lags (ParallelToeplitzHeads) or mixed (ParallelRepeatHeads)"
        )
    if expanded := next(filter(EXPANDED.search, source), None):
        problem = f"has {expanded}: two layers that mix tokens, with a SiLU between"
        raise UserError(f"{form.model} that {problem}, does not exist here and is not converted")
    source = _with_known_names(source)
    has_dropout = any(BEHIND_DROPOUT in key for key in source)
    source = {key.replace(BEHIND_DROPOUT, WITHOUT_DROPOUT): x for key, x in source.items()}
    source = _with_both_embeddings(_with_separate_heads(source), form)
    config = _config(source, form, mixing)
    if is_structured:
        config.reference_dropout = has_dropout
    model = MaskedMixerForCausalLM(config).eval()
    _fill(dict(_pieces(model.state_dict(), model.config, form)), source, form)
    for name, parameter in model.named_parameters():
        if name.endswith("conv.weight"):
            parameter.tril_()
    return model


def to_reference(model: MaskedMixerForCausalLM) -> dict[str, Tensor]:
    """The state dict of the author's model with the same logits, in the model's dtype: a structured
    mixer if the mixing weight is a recurrence, or by lag behind the MLP; else a LanguageMixer.

    Raises UserError for a model that the author's code does not have.
    """
    config = model.config
    forms = (*RECURRENT, "lags") if config.mlp_first else RECURRENT
    form = STRUCTURED_MIXER if config.mixing_weight in forms else LANGUAGE_MIXER
    has = MaskedMixerConfig(**form.fixed)
    absent = [
        f"{name} = {getattr(config, name)}"
        for name in OPTIONS
        if name not in (*SHARED, *form.options) and getattr(config, name) != getattr(has, name)
    ]
    if config.mixer_expansion and config.num_mixer_heads > 1:
        absent.append(f"mixer_expansion with num_mixer_heads = {config.num_mixer_heads}")
    if absent:
        raise UserError(
            f"{form.model} in the author's format does not have {', '.join(absent)}; this model "
            "cannot be converted to it"
        )
    tensors = model.state_dict()
    if form is LANGUAGE_MIXER:
        for name, module in model.named_modules():
            if isinstance(module, TriangularConv):
                tensors.pop(f"{name}.lags", None)
                tensors[f"{name}.weight"] = module.mixing_weight().detach().tril()
    state = {
        key: _decay(key, piece).clone(memory_format=torch.contiguous_format)
        for key, piece in _pieces(tensors, config, form)
    }
    if getattr(config, "reference_dropout", config.mixing_weight == "lags"):
        return {key.replace(WITHOUT_DROPOUT, BEHIND_DROPOUT): x for key, x in state.items()}
    return state


def _decay(key: str, tensor: Tensor) -> Tensor:
    """1 - d for d and back; any other tensor as it is."""
    return 1 - tensor if key.endswith("decay_value") else tensor


def _pieces(
    tensors: Weights, config: MaskedMixerConfig, form: Format
) -> Iterator[tuple[str, Tensor]]:
    """Views of the model's tensors, under the author's names and with the author's axes."""
    heads = config.num_mixer_heads
    module = form.heads.partition(".")[0]
    alone = {"conv": "conv.0" if config.mixer_expansion else form.alone, "second_conv": "conv.2"}
    for name, tensor in tensors.items():
        for ours, theirs in form.names.items():
            name = name.replace(ours, theirs)
        block, is_mixing, suffix = name.partition("mixing.")
        layer, _, parameter = suffix.partition(".")
        if not is_mixing:
            yield name, tensor
        elif layer == "out_proj":
            yield f"{block}{module}.out_proj.{parameter}", tensor
        elif layer == "in_proj":
            for head, piece in enumerate(tensor.chunk(heads)):
                yield f"{block}{module}.proj_head.{head}.{parameter}", piece
        else:
            if tensor.dim() == 4:  # (heads, taps, out, in) -> (heads, out, in, taps)
                tensor = tensor.permute(0, 2, 3, 1)
            elif tensor.dim() == 1:  # a number for each head, which is (1,) there
                tensor = tensor[:, None]
            for head, piece in enumerate(tensor):
                conv = f"{form.heads}.{head}" if heads > 1 else alone[layer]
                yield f"{block}{conv}.{parameter}", piece


def _with_known_names(source: Weights) -> dict[str, Tensor]:
    """The state dict without prefixes of wrappers, and with heads under the name `mixerhead`."""
    wrappers = re.compile(r"^((model|module|_orig_mod)\.)+")
    heads = re.compile(r"\.conv\.(convs|proj_head|out_proj)\.")
    renamed = {}
    for key, tensor in source.items():
        renamed[heads.sub(r".mixerhead.\1.", wrappers.sub("", key))] = tensor
    if len(renamed) < len(source):
        raise UserError("the weights have keys that differ only by a leading model. or module.")
    return renamed


def _with_both_embeddings(source: Weights, form: Format) -> dict[str, Tensor]:
    """The state dict with the tensor that a tied model has only once under both of its names."""
    names = [f"{form.names[EMBEDDING]}.weight", f"{form.names[HEAD]}.weight"]
    tensors = [source[name] for name in names if name in source]
    return dict.fromkeys(names, tensors[0]) | dict(source) if tensors else dict(source)


def _with_separate_heads(source: Weights) -> dict[str, Tensor]:
    """The state dict with heads that are one layer each by itself. All have the second of the
    layer's two decays: the author's code never reads the first.
    """
    names = {"in_proj": "proj_head", "mixer_heads": "mixer_heads"}
    separate = {}
    for key, tensor in source.items():
        layer, _, parameter = key.rpartition(".")
        module, _, name = layer.rpartition(".")
        if name not in names or f"{module}{PARALLEL}" not in source:
            separate[key] = tensor
            continue
        heads = len(source[f"{module}{PARALLEL}"])
        pieces = [tensor[-1]] * heads if parameter == "decay_value" else tensor.chunk(heads)
        for head, piece in enumerate(pieces):
            piece = piece.flatten() if parameter == "bias" else piece
            separate[f"{module}.{names[name]}.{head}.{parameter}"] = piece
    return separate


def _config(source: Weights, form: Format, mixing: str | None) -> MaskedMixerConfig:
    """The sizes of the model, from the tensors of the first block. `_fill` checks the others."""
    blocks = form.names[BLOCKS]
    block = f"{blocks}.0."
    convs = f"{block}{form.heads}."
    in_convs = [key.removeprefix(convs) for key in source if key.startswith(convs)]
    heads = len({key.partition(".")[0] for key in in_convs})
    is_expanded = f"{block}conv.0.weight" in source
    conv = f"{convs}0" if heads else f"{block}{'conv.0' if is_expanded else form.alone}"
    out_proj = f"{block}{form.heads.partition('.')[0]}.out_proj.weight"
    up_proj = f"{block}{form.names['mlp.up_proj']}.weight"
    embedding = f"{form.names[EMBEDDING]}.weight"
    lm_head = f"{form.names[HEAD]}.weight"
    # Blocks without a gap: one behind it is an unknown key.
    numbers = {key.split(".")[1] for key in source if key.startswith(f"{blocks}.")}
    try:
        vocabulary, hidden = source[embedding].shape
        _, context, *taps = source[f"{conv}.weight"].shape
        width, _ = source[up_proj].shape
        return MaskedMixerConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            num_hidden_layers=next(n for n in itertools.count() if str(n) not in numbers),
            max_position_embeddings=context,
            intermediate_size=width,
            num_mixer_heads=max(heads, 1),
            mixer_kernel_size=taps[0] if taps else 1,
            mixer_expansion=is_expanded,
            mixer_projections=not heads or form is LANGUAGE_MIXER or out_proj in source,
            mixing_weight=mixing or "full",
            mixing_decay=f"{conv}.decay_value" in source,
            tie_word_embeddings=_are_equal(source[embedding], source[lm_head]),
            **form.fixed,
        )
    except (KeyError, ValueError) as error:
        raise UserError(
            f"these are not the weights of {form.model} ({first_line(error)}); the first keys are "
            f"{', '.join(sorted(source)[:4])}: give its whole state dict"
        ) from None


def _are_equal(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left, right)


def _fill(pieces: dict[str, Tensor], source: dict[str, Tensor], form: Format) -> None:
    """Copies `source` into tensors under the same keys. A Linear layer's weight (out, in) is that
    of a convolution (out, in, 1), and biases are zero if no convolution has any.

    Raises UserError unless `source` has just their keys and shapes, in floating-point numbers.
    """
    layers = [key.removesuffix("weight") for key, piece in pieces.items() if piece.dim() == 3]
    biases = [f"{layer}bias" for layer in layers]
    if not any(bias in source for bias in biases):
        source |= {bias: torch.zeros_like(pieces[bias]) for bias in biases}
    for key, tensor in source.items():
        if tensor.dim() == 2 and key.removesuffix("weight") in layers:
            source[key] = tensor[..., None]
    actual = {key: _shape_or_type(tensor) for key, tensor in source.items()}
    expected = {key: _shape_or_type(piece) for key, piece in pieces.items()}
    problems = [
        f"{key} is {actual.get(key, 'missing')}, expected: {expected.get(key, 'nothing')}"
        for key in sorted(actual | expected)
        if actual.get(key) != expected.get(key)
    ]
    if problems:
        listing = "\n  ".join(problems)
        raise UserError(
            f"the weights do not fit {form.model}, so they cannot be converted:\n  {listing}"
        )
    for key, piece in pieces.items():
        piece.copy_(_decay(key, source[key].float()))


def _shape_or_type(tensor: Tensor) -> str:
    return f"{list(tensor.shape)}" if tensor.is_floating_point() else f"of type {tensor.dtype}"
