"""Converts checkpoints from and to the reference implementation of masked mixers, with the same
logits, or between full mixing weights and weights by lag.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from mixer.checkpoints import pretrained
from mixer.checkpoints.model_files import check_new_weights
from mixer.checkpoints.reference_format import ASSUMED, from_reference, read_weights, to_reference
from mixer.common.files import whole_file
from mixer.data.tokenizer import existing_tokenizer, read_tokenizer
from mixer.models.masked_mixer.convolution import TriangularConv


def convert(
    source: Path, output: Path, tokenizer_name: str | None, mixing: str | None = None
) -> None:
    """Writes a checkpoint directory, with a tokenizer if one is named (directory or hub name)."""
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
    weights = to_reference(pretrained.load_masked_mixer(source))
    with whole_file(output) as stage:
        check_new_weights(output)  # another process may have written it
        save_file(weights, stage, metadata={"format": "pt"})
    print(f"wrote {output}")


def convert_mixing(source: Path, output: Path, form: str) -> None:
    """Writes the model and tokenizer of a checkpoint with mixing weights of another form, full or
    lags.
    """
    model = pretrained.load_masked_mixer(source)
    config_values = model.config.to_dict() | {"mixing_weight": form, "mixing_decay": False}
    if form == "full":
        config_values["mixing_window"] = 0  # which is of lags; what lies beyond is zero
    if model.config.mixer_key_size:
        config_values["mixing_init"] = "shift"  # where the lags of keyed mixing count from
    config = type(model.config).from_dict(config_values)
    converted = type(model)(config)
    converted.load_state_dict(model.state_dict(), strict=False)  # mixing weights have other names
    changes = []  # of each mixing weight, as a share of its norm
    for conv, converted_conv in zip(model.modules(), converted.modules(), strict=True):
        if isinstance(conv, TriangularConv):
            assert isinstance(converted_conv, TriangularConv)
            weight = conv.mixing_weight().detach().tril()
            converted_conv.set_mixing_weight(weight)
            if conv.bias is None and converted_conv.bias is not None:
                torch.nn.init.zeros_(converted_conv.bias)
            change = converted_conv.mixing_weight().detach().tril() - weight
            changes.append(float(change.norm() / weight.norm().clamp(min=1e-30)))
    has_tokenizer = (source / "tokenizer_config.json").exists()
    tokenizer = read_tokenizer(str(source)) if has_tokenizer else None
    pretrained.write_new(output, converted, tokenizer, source)
    mean = sum(changes) / max(1, len(changes))
    most = max(changes, default=0.0)
    summary = f"mixing weights changed by {mean:.2%} of their norm on average, at most {most:.2%}"
    if most > 0.1:
        summary += "; this is now a different model: train it further"
    if model.config.mixing_window and form == "full":
        summary += f"; the window of {model.config.mixing_window} is gone: beyond it stand zeros"
    print(summary)
