"""The masked mixer: a causal language model that mixes tokens by a triangular convolution (arXiv 2409.01482, section 2).

    x = x + mix(LN(x));  x = x + MLP(LN(x))

No position embedding (the mixing weight knows every position), no final norm unless asked, lm_head without bias.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PreTrainedModel, initialization
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

# Relative, as transformers asks of code that goes with a checkpoint: there, these files stand beside this one.
from .cache import MixingCache, MixingMemory, Places
from .configuration import MaskedMixerConfig
from .gelu import gelu
from .generation import Generation
from .plain import dense, mix_row, mix_rows, products_per_triangle

try:
    from mixer.ops import mix_row, triangular_conv  # with the kernels, where they can run
except ImportError:  # loaded with trust_remote_code where this package is not installed

    def triangular_conv(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, backend: str) -> Tensor:
        """The masked-weight matmul, whichever backend is asked for."""
        return dense(x, weight, bias, residual)


logger = logging.get_logger(__name__)
# transformers' Trainer shifts the labels of label smoothing for models in this table alone; others would learn to copy.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(MaskedMixerConfig.model_type, "MaskedMixerForCausalLM")


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

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        memory: MixingMemory | Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """With a memory x follows what it holds: the first tokens by the whole operation, later ones by their rows alone.

        A tensor is all of a memory whose tokens are counted elsewhere, for one new token of each sample.
        """
        if isinstance(memory, Tensor):
            return mix_row(memory, x, self.weight, self.bias, residual, positions, self.backend)
        first = memory is None or memory.get_seq_length() == 0
        if not first and x.shape[1] == 1:
            return mix_row(memory.extend(1), x, self.weight, self.bias, residual, positions, self.backend)
        if memory is not None:
            parts = x.unflatten(-1, (self.weight.shape[0], -1)).transpose(1, 2)  # (batch, heads, new, channels of a head)
            earlier, _ = memory.update(parts, positions=positions)
        if first:
            return triangular_conv(x, self.weight, self.bias, residual, backend=self.backend)
        y = mix_rows(earlier, self.weight, self.bias, positions)
        return y if residual is None else y + residual.to(y.dtype)  # under autocast the stream has its dtype, as above


class Linear(nn.Linear):
    """PyTorch's. Compiled for one token, it lets the compiler make a kernel of its own of the product and what follows it.

    The bias is added by itself, as a product with a bias would be left to the library. And x is computed once, into memory,
    as the compiler does before a view by strides: left to itself it computes x again in each of the product's blocks.
    """

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and x.shape[:-1].numel() == 1:
            y = F.linear(x.as_strided(x.shape, x.stride()), self.weight)
            return y + self.bias.to(y.dtype)
        return super().forward(x)


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
        self.in_proj = Linear(config.hidden_size, config.hidden_size) if many else None
        self.conv = TriangularConv(config)
        self.second_conv = TriangularConv(config) if config.mixer_expansion else None
        self.out_proj = Linear(config.hidden_size, config.hidden_size) if many else None

    def forward(
        self,
        x: Tensor,  # (batch, tokens, channels), as residual
        residual: Tensor,
        memories: Sequence[MixingMemory | Tensor | None] = (None, None),  # one for each convolution
        positions: Tensor | None = None,
    ) -> Tensor:
        # The range makes the time spent here countable in any profile, whichever backend runs; the compiler has no ranges.
        with nullcontext() if torch.compiler.is_compiling() else torch.profiler.record_function("token_mixing"):
            if self.in_proj is not None:
                x = self.in_proj(x)
            last = self.conv
            if self.second_conv is not None:
                x = gelu(self.conv(x, None, memories[0], positions))
                last, memories = self.second_conv, memories[1:]
            if self.out_proj is not None:
                return residual + self.out_proj(last(x, None, memories[0], positions))
            return last(x, residual, memories[0], positions)  # the convolution adds the residual itself


class MLP(nn.Module):
    recompute_activation = False  # set by training: the backward pass computes the GELU again, its output is not kept

    def __init__(self, config: MaskedMixerConfig):
        super().__init__()
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up_proj(x)
        if self.recompute_activation and torch.is_grad_enabled():
            return checkpoint(self._down, x, use_reentrant=False)
        return self._down(x)

    def _down(self, x: Tensor) -> Tensor:
        return self.down_proj(gelu(x))


class Block(GradientCheckpointingLayer):
    def __init__(self, config: MaskedMixerConfig):
        super().__init__()
        self.mixing_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mixing = TokenMixing(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,  # (batch, tokens, channels)
        memories: Sequence[MixingMemory | Tensor | None] = (None, None),
        positions: Tensor | None = None,
    ) -> Tensor:
        x = self.mixing(self.mixing_norm(x), x, memories, positions)
        return x + self.mlp(self.mlp_norm(x))


class MaskedMixerPreTrainedModel(PreTrainedModel):
    config_class = MaskedMixerConfig
    base_model_prefix = "model"
    _no_split_modules = ["Block"]
    supports_gradient_checkpointing = True

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

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: MixingCache | None = None,
        use_cache: bool = False,
        output_hidden_states: bool | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """The hidden states of new tokens; see MaskedMixerForCausalLM.forward for arguments and errors."""
        self._check(input_ids, attention_mask, past_key_values, kwargs)
        new = input_ids.shape[1]
        if self.training and self.layers[0].gradient_checkpointing and torch.is_grad_enabled():
            use_cache, past_key_values = self._without_cache(use_cache, past_key_values)
        if use_cache and past_key_values is None:
            past_key_values = MixingCache(self.config)
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states: list[Tensor] | None = [] if wanted else None
        places = Places(attention_mask, new) if attention_mask is not None else None
        if places is not None:
            input_ids = places.gather(input_ids)
        if past_key_values is None:
            x = self._blocks(input_ids, states=states)
        else:
            if places is None or past == 0:
                positions = torch.arange(past, past + new, device=input_ids.device)[None]  # (1, new)
            else:
                positions = places.starts + torch.arange(new, device=input_ids.device)  # (batch, new)
            if past > 0 and new == 1 and states is None:
                x = past_key_values.step(self._blocks, input_ids, positions)
            else:
                x = self._blocks(input_ids, past_key_values.layers, positions, states)
        if places is not None:
            x, states = places.restore(x), states and [places.restore(state) for state in states]
        return BaseModelOutputWithPast(
            last_hidden_state=x, past_key_values=past_key_values, hidden_states=states and tuple(states)
        )

    def _blocks(
        self,
        input_ids: Tensor,
        memories: Sequence[MixingMemory | Tensor] = (),  # of each convolution, block after block
        positions: Tensor | None = None,
        states: list[Tensor] | None = None,  # gets the embedding and each block's output, the last one after the norm
    ) -> Tensor:
        x = self.embed_tokens(input_ids)  # (batch, new, channels)
        each = len(memories) // len(self.layers)  # convolutions of a block
        for number, layer in enumerate(self.layers):
            if states is not None:
                states.append(x)
            own = memories[number * each : (number + 1) * each]
            x = layer(x, own, positions.to(x.device)) if own else layer(x)
        x = self.norm(x)
        if states is not None:
            states.append(x)
        return x

    def _without_cache(self, use_cache: bool, cache: MixingCache | None) -> tuple[bool, None]:
        """Blocks that are computed again in the backward pass would write to it twice. As transformers' models do, says so."""
        if cache is not None and cache.get_seq_length() > 0:
            raise ValueError(
                "past_key_values holds tokens, which gradient checkpointing cannot follow; give all tokens without a cache, or "
                "call gradient_checkpointing_disable() first"
            )
        if use_cache or cache is not None:
            logger.warning_once("`use_cache=True` is incompatible with gradient checkpointing. Setting `use_cache=False`.")
        return False, None

    def _check(self, input_ids: Tensor | None, attention_mask: Tensor | None, cache: MixingCache | None, others: dict) -> None:
        given = [name for name in ("inputs_embeds", "position_ids") if others.get(name) is not None]
        if input_ids is None or given:  # which other models take; without a word they would be left out
            raise ValueError(
                f"{' and '.join(given) or 'no input_ids'} given; a masked mixer reads input_ids alone, and attention_mask tells "
                "each token's position: give input_ids, and mask padding"
            )
        if cache is not None and not isinstance(cache, MixingCache):  # one of transformers' would stay empty, without a word
            raise ValueError(
                f"past_key_values is a {type(cache).__name__}; a masked mixer needs a MixingCache: leave it out, or give the one "
                "that an earlier call with use_cache=True returned"
            )
        (batch, new), context = input_ids.shape, self.config.max_position_embeddings
        past = cache.get_seq_length() if cache is not None else 0
        if new == 0:  # generate leaves out what is in the cache
            raise ValueError(
                f"the input has no tokens but the {past} in the cache; give more, or past_key_values.reset() before another text"
            )
        if past + new > context:
            before = f", {past} of them in the cache" if past else ""
            raise ValueError(f"the input has {past + new} tokens{before}, the model's context is {context}; shorten the input")
        if attention_mask is not None and tuple(attention_mask.shape) != (batch, past + new):
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}; it must be {(batch, past + new)}: (batch, tokens), "
                "with those in the cache"
            )


class MaskedMixerForCausalLM(MaskedMixerPreTrainedModel, Generation, GenerationMixin):  # transformers looks for the last
    """The language model; works with `AutoModelForCausalLM.from_pretrained` once `mixer` is imported."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: MaskedMixerConfig):
        super().__init__(config)
        self.model = MaskedMixerModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        past_key_values: MixingCache | None = None,
        use_cache: bool = False,
        output_hidden_states: bool | None = None,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """Next-token logits, and the mean cross-entropy in nats where labels are given.

        Args:
            input_ids: (batch, tokens) int64; with those in the cache at most max_position_embeddings.
            attention_mask: (batch, tokens in the cache + tokens), 1 for a token and 0 for padding, on either side. Each text is
                computed as if it stood alone; a padded place repeats the logits of the token before it.
            labels: (batch, tokens) int64, the inputs themselves (they are shifted here), -100 where not scored. The first
                token of a text, which nothing predicts, is not scored.
            logits_to_keep: compute the logits of only the last so many tokens, or of these positions; 0 for all.
            past_key_values: what an earlier call returned, which these tokens follow; it is changed in place.
            use_cache: return a cache. Generation sets it. With gradient checkpointing there is none while training.
            output_hidden_states: return them too; None for what the configuration says.

        Returns:
            CausalLMOutputWithPast with logits (batch, kept tokens, vocab_size), loss, past_key_values and hidden_states: the
            embedding and each block's output, the last one after the final norm, (batch, tokens, hidden_size) each.

        Raises:
            ValueError: no token, more than the context has, an attention_mask of another shape, a cache of another kind or, with
                gradient checkpointing, one that holds tokens; inputs_embeds or position_ids, which this model does not read.
        """
        output = self.model(input_ids, attention_mask, past_key_values, use_cache, output_hidden_states, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            if attention_mask is not None:
                labels = labels.masked_fill(Places(attention_mask, labels.shape[1]).unpredicted(), -100)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=output.past_key_values, hidden_states=output.hidden_states
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
