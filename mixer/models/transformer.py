"""The transformers that masked mixers are compared with: the Llama and the Qwen3 of transformers,
with what the training loop needs. Qwen3 is that Llama with RMS-normed queries and keys.
"""

from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedConfig, Qwen3ForCausalLM

from mixer.models.masked_mixer.modeling import in_autocast_type


class Transformer:
    """What a masked mixer has and a model of transformers has not: `flops_per_token`, and under
    autocast a residual stream in the autocast type. Checkpoints are those of the model's own class.
    """

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        self.model.embed_tokens.register_forward_hook(
            lambda embedding, arguments, x: in_autocast_type(x)
        )

    def flops_per_token(self, tokens: int | None = None) -> dict[str, float]:
        """As MaskedMixerForCausalLM.flops_per_token. In causal attention a token attends to
        (tokens + 1) / 2 tokens on average.

        `token_mixing` is attention without its projections.
        """
        config = self.config
        tokens = config.max_position_embeddings if tokens is None else tokens
        linear = sum(2 * m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        # the scores, and the sum of the values
        mixing = config.num_hidden_layers * 2 * 2 * config.hidden_size * (tokens + 1) / 2
        return {"useful": 3.0 * (linear + mixing), "token_mixing": 3.0 * mixing}


class Llama(Transformer, LlamaForCausalLM):
    """Queries and keys without norms (arXiv 2302.13971)."""


class Qwen3(Transformer, Qwen3ForCausalLM):
    """RMS-normed queries and keys (arXiv 2505.09388): the transformer of today."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **more):
        """As the model of transformers. In training without a mask it does not look for texts that
        are packed into one row, which would wait for the GPU in every step.
        """
        if self.training and attention_mask is None:
            attention_mask = {"full_attention": None}
        return super().forward(input_ids, attention_mask=attention_mask, **more)
