"""Weights of the author's structured recurrent mixers (arXiv 2605.08696), read and written.

The author calls the model MLPMixer. Its state dict holds the same numbers as ours under other
names: each block has its MLP first, with SiLU, and a decay is saved as d, here as 1 - d. Tokens
stand in columns there, so the author's ColRepeat has our heads by row, and RowRepeat those by
column. The keys and shapes of all of them are the same.
"""

import itertools
import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from mixer.checkpoints.reference_format import count_blocks, fill, without_prefix
from mixer.common.errors import UserError
from mixer.models.masked_mixer.configuration import RECURRENT, MaskedMixerConfig
from mixer.models.masked_mixer.modeling import MaskedMixerForCausalLM

NAME = "a structured recurrent mixer"
LAYERS = {  # the author's names of what every block has, and ours
    "token_norm": "mixing_norm",
    "channel_norm": "mlp_norm",
    "channel_mixing_layer.0": "mlp.up_proj",
    "channel_mixing_layer.2": "mlp.down_proj",
}
MIXING = "token_mixing_layer."


def is_recurrent_format(source: Mapping[str, Tensor]) -> bool:
    return any("mixer_blocks." in key for key in source)


@torch.no_grad()
def from_recurrent(source: Mapping[str, Tensor], form: str | None) -> MaskedMixerForCausalLM:
    """The model of an MLPMixer's state dict, in fp32 and eval mode; `form` is its mixing_weight.

    Raises UserError naming every key that is unknown or missing, and every tensor whose shape does
    not fit the others.
    """
    if form not in RECURRENT:
        raise UserError(
            f"these are the weights of {NAME}, which do not say whether a head goes by row or by "
            "column; give --mixing rows (the author's ColRepeat in all heads), columns (RowRepeat) "
            "or mixed (MixedRepeatHeads)"
        )
    source = without_prefix(source, "input_layer", NAME)
    model = MaskedMixerForCausalLM(_config(source, form)).eval()
    for key in source:
        if key.endswith("decay_value"):
            source[key] = 1 - source[key].float()
    fill(dict(_pieces(model)), source, NAME)
    return model


def to_recurrent(model: MaskedMixerForCausalLM) -> dict[str, Tensor]:
    """The state dict of an MLPMixer with the model's logits, in the model's dtype.

    Raises UserError for a model that the author's code does not have.
    """
    wanted = {"mlp_first": True, "hidden_act": "silu", "linear_bias": True, "mixer_kernel_size": 1}
    wanted |= dict.fromkeys(("final_norm", "mixer_expansion", "mixer_gate"), False)
    config = model.config
    absent = [
        f"{key}: {getattr(config, key)}" for key in wanted if getattr(config, key) != wanted[key]
    ]
    if absent:
        raise UserError(
            f"{NAME} in the author's format does not have {', '.join(absent)}; this model cannot "
            "be converted to it"
        )
    return {
        key: (1 - piece if key.endswith("decay_value") else piece).clone()
        for key, piece in _pieces(model)
    }


def _pieces(model: MaskedMixerForCausalLM) -> Iterator[tuple[str, Tensor]]:
    """(the author's key, the part of our parameters with its numbers) for every tensor."""
    config, tensors = model.config, model.state_dict()
    heads = config.num_mixer_heads
    yield "input_layer.weight", tensors["model.embed_tokens.weight"]
    yield "output_layer.weight", tensors["lm_head.weight"]
    for number in range(config.num_hidden_layers):
        block, ours = f"mixer_blocks.{number}.", f"model.layers.{number}."
        for name, kind in itertools.product(LAYERS, ("weight", "bias")):
            yield f"{block}{name}.{kind}", tensors[f"{ours}{LAYERS[name]}.{kind}"]
        block, ours = f"{block}{MIXING}", f"{ours}mixing."
        for kind in ("weight", "bias") if heads > 1 and config.mixer_projections else ():
            yield f"{block}out_proj.{kind}", tensors[f"{ours}out_proj.{kind}"]
            for head, rows in enumerate(tensors[f"{ours}in_proj.{kind}"].chunk(heads)):
                yield f"{block}proj_head.{head}.{kind}", rows
        for head in range(heads):
            name = f"{block}mixer_heads.{head}." if heads > 1 else block
            yield f"{name}weight", tensors[f"{ours}conv.scale"][head]
            yield f"{name}bias", tensors[f"{ours}conv.bias"][head]
            if config.mixing_decay:
                yield f"{name}decay_value", tensors[f"{ours}conv.decay"][head : head + 1]


def _config(source: Mapping[str, Tensor], form: str) -> MaskedMixerConfig:
    """As that of reference_format."""
    first = f"mixer_blocks.0.{MIXING}"
    head = re.compile(rf"{re.escape(first)}mixer_heads\.\d+\.weight")
    heads = sum(head.fullmatch(key) is not None for key in source)
    scale = f"{first}mixer_heads.0." if heads else first
    try:
        vocabulary, hidden = source["input_layer.weight"].shape
        _, context = source[f"{scale}weight"].shape
        width, _ = source["mixer_blocks.0.channel_mixing_layer.0.weight"].shape
        return MaskedMixerConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            num_hidden_layers=count_blocks(source, "mixer_blocks"),
            max_position_embeddings=context,
            intermediate_size=width,
            num_mixer_heads=max(heads, 1),
            mixer_projections=not heads or f"{first}out_proj.weight" in source,
            mixing_weight=form,
            mixing_decay=f"{scale}decay_value" in source,
            mlp_first=True,
            hidden_act="silu",
        )
    except (KeyError, ValueError) as error:
        raise UserError(f"the weights do not tell the sizes of {NAME} ({error})") from None
