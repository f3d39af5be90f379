"""Qwen3 whose keys get a learned share of the previous token's key, as mixer_key_shift does in a
masked mixer: the transformer of today with an ingredient that it can share with mixers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM


class ShiftedQwen3Config(Qwen3Config):
    """Qwen3's configuration under another name, because transformers' Qwen3 has no such keys."""

    model_type = "shifted_qwen3"

    def __init__(self, **options):
        super().__init__(**options | {"use_cache": False})


class ShiftedKeys(nn.Linear):
    """A key projection: (batch, tokens, hidden_size) -> (batch, tokens, channels of all heads)."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)
        self.share = nn.Parameter(torch.zeros(out_features))

    def forward(self, x: Tensor) -> Tensor:
        key = super().forward(x)
        return key + self.share.to(key.dtype) * F.pad(key[:, :-1], (0, 0, 1, 0))


class ShiftedQwen3(Qwen3ForCausalLM):
    """Without a cache, which would lack the previous key: `generate` reads the whole text anew for
    each token.
    """

    config_class = ShiftedQwen3Config

    def __init__(self, config: ShiftedQwen3Config):
        super().__init__(config)
        for layer in self.model.layers:
            old = layer.self_attn.k_proj
            layer.self_attn.k_proj = ShiftedKeys(old.in_features, old.out_features)
        self.post_init()
