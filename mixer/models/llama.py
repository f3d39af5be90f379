"""The transformer that masked mixers are compared with: transformers' Llama, as the training loop
wants a model.
"""

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM


class Llama(LlamaForCausalLM):
    """LlamaForCausalLM with scaled_dot_product_attention, and two things that a masked mixer has:
    `flops_per_token`, and under autocast a residual stream in the autocast type. Its checkpoints
    are LlamaForCausalLM's.
    """

    def __init__(self, config: LlamaConfig):
        super().__init__(config)
        self.model.embed_tokens.register_forward_hook(
            lambda embedding, arguments, x: in_autocast_type(x)
        )

    def flops_per_token(self, tokens: int | None = None) -> dict[str, float]:
        """As MaskedMixerForCausalLM.flops_per_token, with causal attention: a token meets (tokens +
        1) / 2 on average.

        `token_mixing` is attention without its projections. `executed` has the scores once more,
        for the backward pass of flash attention computes them again (arXiv 2205.14135); the tiles
        on the diagonal are counted as `useful` has them.
        """
        config = self.config
        tokens = config.max_position_embeddings if tokens is None else tokens
        hidden = config.hidden_size
        linear = 2 * (
            4 * hidden * hidden + 3 * hidden * config.intermediate_size
        )  # q, k, v, o; gate, up, down
        others = config.num_hidden_layers * linear + 2 * hidden * config.vocab_size
        product = (
            config.num_hidden_layers * 2 * hidden * (tokens + 1) / 2
        )  # one of the two: scores, or weighted values
        return {
            "useful": 3.0 * (others + 2 * product),
            "executed": 3.0 * (others + 2 * product) + product,
            "token_mixing": 3.0 * 2 * product,
        }


def in_autocast_type(x: Tensor) -> Tensor:
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
