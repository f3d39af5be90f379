"""The masked mixer: a causal language model that mixes tokens by a triangular convolution (arXiv 2409.01482, section 2).

    x = x + mix(LN(x));  x = x + MLP(LN(x))

No position embedding (the mixing weight knows every position), no final norm unless asked, lm_head without bias.
"""

import math

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel, initialization
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from mixer.configuration import MaskedMixerConfig
from mixer.ops import triangular_conv
from mixer.ops.reference import products_per_triangle


class TriangularConv(nn.Module):
    """The weight and bias of one triangular convolution; see `mixer.ops.triangular_conv` for shapes."""

    def __init__(self, config: MaskedMixerConfig):
        super().__init__()
        heads, taps, context = config.num_mixer_heads, config.mixer_kernel_size, config.max_position_embeddings
        self.weight = nn.Parameter(torch.empty(heads, taps, context, context))
        self.bias = nn.Parameter(torch.empty(heads, context))
        self.backend = config.mixing_backend
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As nn.Conv1d(context, context, taps) starts, then masked: the upper half is dead weight and stays zero."""
        _, taps, context, _ = self.weight.shape
        bound = 1 / math.sqrt(context * taps)
        initialization.uniform_(self.weight, -bound, bound)
        initialization.uniform_(self.bias, -bound, bound)
        if not getattr(self.weight, "_is_hf_initialized", False):  # loaded weights are left as they are
            self.weight.tril_()

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return triangular_conv(x, self.weight, self.bias, residual, backend=self.backend)


class TokenMixing(nn.Module):
    """residual + mix(x), in the family's variants.

    flat       one triangular convolution
    expansion  two, with a GELU between
    heads      in-projection to heads x (hidden / heads), convolution per head, concatenation, out-projection. The
               heads' projections are one Linear, whose output is laid out head after head.
    """

    def __init__(self, config: MaskedMixerConfig):
        super().__init__()
        many = config.num_mixer_heads > 1
        self.in_proj = nn.Linear(config.hidden_size, config.hidden_size) if many else None
        self.conv = TriangularConv(config)
        self.second_conv = TriangularConv(config) if config.mixer_expansion else None
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size) if many else None

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:  # both (batch, tokens, channels)
        # The range makes the time spent here countable in any profile, whichever backend runs.
        with torch.profiler.record_function("token_mixing"):
            if self.in_proj is not None:
                x = self.in_proj(x)
            last = self.conv
            if self.second_conv is not None:
                x = nn.functional.gelu(self.conv(x))
                last = self.second_conv
            if self.out_proj is not None:
                return residual + self.out_proj(last(x))
            return last(x, residual)  # the convolution adds the residual itself


class MLP(nn.Module):
    def __init__(self, config: MaskedMixerConfig):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.gelu(self.up_proj(x)))


class Block(nn.Module):
    def __init__(self, config: MaskedMixerConfig):
        super().__init__()
        self.mixing_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mixing = TokenMixing(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, channels)
        x = self.mixing(self.mixing_norm(x), residual=x)
        return x + self.mlp(self.mlp_norm(x))


class MaskedMixerPreTrainedModel(PreTrainedModel):
    config_class = MaskedMixerConfig
    base_model_prefix = "model"
    _no_split_modules = ["Block"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """PyTorch's own defaults for each layer, as the reference implementation has them, so that runs compare."""
        if isinstance(module, TriangularConv):
            module.reset_parameters()
        elif isinstance(module, nn.Linear):
            initialization.kaiming_uniform_(module.weight, a=math.sqrt(5))
            if module.bias is not None:
                bound = 1 / math.sqrt(module.in_features)
                initialization.uniform_(module.bias, -bound, bound)
        elif isinstance(module, nn.Embedding):
            initialization.normal_(module.weight)
        elif isinstance(module, nn.LayerNorm):
            initialization.ones_(module.weight)
            initialization.zeros_(module.bias)


class MaskedMixerModel(MaskedMixerPreTrainedModel):
    """Embedding and blocks: input_ids (batch, tokens) int64 -> last_hidden_state (batch, tokens, hidden_size)."""

    def __init__(self, config: MaskedMixerConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if config.final_norm else nn.Identity()
        self.post_init()

    def forward(self, input_ids: Tensor, **kwargs) -> BaseModelOutput:
        """Raises ValueError for more tokens than the context. Padding on the right cannot be seen by earlier tokens."""
        tokens, context = input_ids.shape[1], self.config.max_position_embeddings
        if tokens > context:
            raise ValueError(f"the input has {tokens} tokens, the model's context is {context}; shorten the input")
        x = self.embed_tokens(input_ids)  # (batch, tokens, channels)
        for layer in self.layers:
            x = layer(x)
        return BaseModelOutput(last_hidden_state=self.norm(x))


class MaskedMixerForCausalLM(MaskedMixerPreTrainedModel, GenerationMixin):
    """The language model; works with `AutoModelForCausalLM.from_pretrained` once `mixer` is imported."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: MaskedMixerConfig):
        super().__init__(config)
        self.model = MaskedMixerModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs,
    ) -> CausalLMOutput:
        """Next-token logits, and the mean cross-entropy in nats where labels are given.

        Args:
            input_ids: (batch, tokens) int64, tokens <= max_position_embeddings.
            attention_mask: accepted for the tools that pass it. Right padding needs no mask, since the mixing is causal;
                left padding moves the tokens to other positions and is refused by `generate`.
            labels: (batch, tokens) int64, the inputs themselves (they are shifted here), -100 where not scored.
            logits_to_keep: compute the logits of only the last so many tokens, or of these positions; 0 for all.

        Returns:
            CausalLMOutput with logits (batch, kept tokens, vocab_size) and loss.
        """
        x = self.model(input_ids).last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(x[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutput(loss=loss, logits=logits)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # nothing is cached: each new token is a full forward of the sequence so far

    def prepare_inputs_for_generation(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs) -> dict:
        if attention_mask is not None and input_ids.shape[1] > 0 and not bool(attention_mask.all()):
            raise ValueError(
                "attention_mask has zeros: prompts of different lengths cannot be generated from in one batch, since padding "
                "moves tokens to other positions; generate from one prompt at a time, or from prompts of equal length"
            )
        return {"input_ids": input_ids, "logits_to_keep": 1}

    def _validate_generated_length(self, generation_config, input_ids_length, has_default_max_length):
        super()._validate_generated_length(generation_config, input_ids_length, has_default_max_length)
        context = self.config.max_position_embeddings
        if generation_config.max_length > context:
            raise ValueError(
                f"the prompt has {input_ids_length} tokens and {generation_config.max_length - input_ids_length} new ones were "
                f"asked for, {generation_config.max_length} together; the model's context is {context}: shorten the prompt or "
                f"give max_new_tokens={max(context - input_ids_length, 0)} or less"
            )

    def flops_per_token(self, tokens: int | None = None) -> dict[str, float]:
        """Floating-point operations of one training step per token, forward and backward (twice the forward).

        Args:
            tokens: length of the sequences; None for the whole context.

        Returns:
            `useful`: every product the model is defined by, the triangle counted exactly, (tokens + 1) / 2 products a token.
            `executed`: what the configured backend multiplies ("auto" counted as cuda).
            `token_mixing`: the part of `useful` spent in the triangular convolutions.
            Multiplication and addition count as two; norms, GELU, embedding and softmax are left out, as is customary.
        """
        config = self.config
        tokens = config.max_position_embeddings if tokens is None else tokens
        hidden = config.hidden_size
        linear = 4 * hidden * config.intermediate_size
        if config.num_mixer_heads > 1:
            linear += 4 * hidden * hidden
        convolutions = (2 if config.mixer_expansion else 1) * config.num_hidden_layers
        per_product = 2 * hidden * config.mixer_kernel_size * convolutions / tokens
        others = config.num_hidden_layers * linear + 2 * hidden * config.vocab_size
        mixing = per_product * tokens * (tokens + 1) / 2
        executed = per_product * products_per_triangle(tokens, config.mixing_backend)
        return {
            "useful": 3.0 * (others + mixing),
            "executed": 3.0 * (others + executed),
            "token_mixing": 3.0 * mixing,
        }
