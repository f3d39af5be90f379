"""Qwen3 with masked mixers' mixer_key_shift: each key gets a learned share of the previous token's
key, before its norm and rotation.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from mixer.common.errors import UserError


class ShiftedQwen3Config(Qwen3Config):
    """Under a name of its own, because transformers' Qwen3 would drop the shares."""

    model_type = "shifted_qwen3"


class ShiftedKeys(nn.Linear):
    """A key projection: (batch, tokens, hidden_size) -> (batch, tokens, channels of all heads)."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)
        self.share = nn.Parameter(torch.zeros(out_features))

    def forward(self, x: Tensor) -> Tensor:
        key = super().forward(x)
        return key + self.share.to(key.dtype) * F.pad(key[:, :-1], (0, 0, 1, 0))


class ShiftedQwen3Model(Qwen3Model):
    """There is no cache, which would lack the previous key: generation reads the whole text again
    for each token. Raises UserError for padding on the left, whose keys would be shares of others.
    """

    config_class = ShiftedQwen3Config

    def __init__(self, config: ShiftedQwen3Config):
        super().__init__(config)
        for layer in self.layers:
            assert isinstance(layer, Qwen3DecoderLayer)
            keys = layer.self_attn.k_proj
            layer.self_attn.k_proj = ShiftedKeys(keys.in_features, keys.out_features)
        self.post_init()

    def forward(self, input_ids: torch.LongTensor, attention_mask: Tensor | None = None, **kwargs):
        if attention_mask is not None and not attention_mask[:, 0].all():
            raise UserError("a shifted_qwen3 reads no padding on the left: give one text at a time")
        # What transformers calls a cache depends on its version.
        kwargs.pop("past_key_values", None)
        kwargs.pop("cache", None)
        kwargs["use_cache"] = False
        return super().forward(input_ids, attention_mask, **kwargs)


class ShiftedQwen3ForCausalLM(Qwen3ForCausalLM):
    config_class = ShiftedQwen3Config

    def __init__(self, config: ShiftedQwen3Config):
        super().__init__(config)
        self.model = ShiftedQwen3Model(config)
        self.post_init()

    def _assisted_decoding(self, *_, **__):
        problem = "has no cache, which guessing ahead needs"
        remedy = "leave out prompt_lookup_num_tokens and assistants"
        raise UserError(f"a shifted_qwen3 {problem}: {remedy}")

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs) -> dict:
        return {"input_ids": input_ids, "attention_mask": kwargs.get("attention_mask")}


AutoModel.register(ShiftedQwen3Config, ShiftedQwen3Model)
AutoModelForCausalLM.register(ShiftedQwen3Config, ShiftedQwen3ForCausalLM)
