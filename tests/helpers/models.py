"""Small models with tokens for them, and generation by them."""

from pathlib import Path

import torch

from mixer import MaskedMixerConfig, MaskedMixerForCausalLM
from mixer.models import masked_mixer
from mixer.models.masked_mixer.cache import CACHE
from mixer.models.masked_mixer.convolution import RecurrentConv, TriangularConv

# The files of the model's code, which are saved beside its weights.
CODE = {path.name for path in Path(masked_mixer.__file__).parent.glob("*.py")} - {"__init__.py"}
CODE |= {"options.py", "plain.py"}  # from other folders of the package

SMALL = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "max_position_embeddings": 12,
}
# Every way of mixing tokens, which the tests of models and of generation are repeated for.
MIXINGS = {
    "flat": {},
    "expansion": {"mixer_expansion": True, "mixer_kernel_size": 2},
    "projected": {"num_mixer_heads": 4, "mixer_kernel_size": 3},
    "projected-expansion": {"num_mixer_heads": 2, "mixer_expansion": True},
    "heads": {"num_mixer_heads": 4, "mixer_projections": False},
    "heads-expansion": {
        "num_mixer_heads": 2,
        "mixer_projections": False,
        "mixer_expansion": True,
        "mixer_kernel_size": 3,
    },
    "gate": {"mixer_gate": True, "mixer_kernel_size": 3},
    "gate-heads": {"mixer_gate": True, "num_mixer_heads": 4, "suffix_match": 3},
    "keyed": {"mixer_key_size": 3, "num_mixer_heads": 2},
    "keyed-flat": {"mixer_key_size": 5, "mixer_keyed_every": 2, "num_mixer_heads": 4},
    "lags": {"mixing_weight": "lags", "mixer_kernel_size": 3, "num_mixer_heads": 2},
    "window": {
        "mixing_weight": "lags",
        "mixing_window": 5,
        "mixer_kernel_size": 3,
        "num_mixer_heads": 2,
        "suffix_match": 2,
    },
    "keyed-attention-window": {
        "mixing_weight": "lags",
        "mixing_window": 3,
        "mixing_init": "shift",
        "mixer_key_size": 4,
        "mixer_keyed_every": 2,
        "mixer_attention": True,
        "mixer_key_shift": True,
        "mixer_rotary": True,
        "num_mixer_heads": 2,
        "mixer_projections": False,
    },
    "keyed-attention-in-mlp": {
        "mixing_weight": "lags",
        "mixing_window": 3,
        "mixing_in_mlp": True,
        "mixing_init": "shift",
        "mixer_key_size": 4,
        "mixer_keyed_every": 2,
        "mixer_attention": True,
        "mixer_rotary": True,
        "num_mixer_heads": 2,
        "mixer_projections": False,
    },
    "gate-in-mlp": {"mixer_gate": True, "mixing_in_mlp": True},
    "keyed-lags": {
        "mixing_weight": "lags",
        "mixing_init": "shift",
        "mixer_key_size": 3,
        "num_mixer_heads": 2,
    },
    "keyed-heads": {
        "mixing_init": "shift",
        "mixing_weight": "lags",
        "mixer_key_size": 4,
        "mixer_keyed_every": 2,
        "num_mixer_heads": 2,
        "mixer_projections": False,
    },
    "keyed-attention": {
        "num_mixer_heads": 4,
        "mixer_key_size": 4,
        "mixer_attention": True,
        "mixer_key_norm": True,
        "mixer_rotary": True,
        "final_norm": True,
    },
    "keyed-parts": {
        "mixing_weight": "lags",
        "mixing_init": "shift",
        "mixer_key_size": 6,
        "num_mixer_heads": 2,
        "mixer_key_norm": True,
        "mixer_rotary": True,
        "mixer_key_shift": True,
        "suffix_match": 2,
    },
    "rows": {"mixing_weight": "rows", "mixing_decay": True},
    "columns": {"mixing_weight": "columns", "mixer_gate": True},
    "rows-and-columns": {
        "mixing_weight": "mixed",
        "mixing_decay": True,
        "num_mixer_heads": 4,
        "mlp_first": True,
        "hidden_act": "silu",
    },
    "no-biases-relu2": {"linear_bias": False, "hidden_act": "relu2", "num_mixer_heads": 2},
}
LENGTHS = (4, 1, 6, 3)
SETTINGS = {
    "greedy": {"do_sample": False},
    "several": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
}


def small_model(**changes) -> MaskedMixerForCausalLM:
    torch.manual_seed(0)
    return MaskedMixerForCausalLM(MaskedMixerConfig(**(SMALL | changes))).eval()


def tokens(batch=3, length=12) -> torch.Tensor:
    return torch.randint(0, 50, (batch, length), generator=torch.Generator().manual_seed(1))


def lively_model(max_position_embeddings=16, **changes) -> MaskedMixerForCausalLM:
    """Large weights, so that a wrong row or position changes the tokens."""
    model = small_model(max_position_embeddings=max_position_embeddings, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():  # what starts at zero would hide a mistake
                parameter.normal_()
        for module in model.modules():
            if isinstance(module, RecurrentConv):
                module.scale.mul_(8)
            elif isinstance(module, TriangularConv):
                module.set_mixing_weight(8 * module.mixing_weight())
    return model


def prompts() -> list[torch.Tensor]:
    texts = [row[:length] for row, length in zip(tokens(batch=4), LENGTHS, strict=True)]
    return [text + 1 - (text == 49).long() for text in texts]


def padded(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(input_ids, attention_mask), both (4, 6)."""
    ids, mask = torch.zeros(2, 4, max(LENGTHS), dtype=torch.int64)
    for row, prompt in enumerate(prompts()):
        columns = slice(len(prompt)) if side == "right" else slice(-len(prompt), None)
        ids[row, columns] = prompt
        mask[row, columns] = 1
    return ids, mask


def generate(model, ids, new=8, do_sample=False, **options) -> torch.Tensor:
    """The `new` tokens alone, (batch, new). options: of the model's generate."""
    if "past_key_values" in options:
        options[CACHE] = options.pop("past_key_values")
    written = model.generate(
        ids,
        max_new_tokens=new,
        min_new_tokens=new,
        pad_token_id=0,
        do_sample=do_sample,
        **options,
    )
    return written[:, -new:]
