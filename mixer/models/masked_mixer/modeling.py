# Copied beside every saved model: it imports from this package only files that are copied too.
"""The masked mixer, a causal language model for transformers (arXiv 2409.01482, section 2).

A block is a transformer's, with a learned triangular convolution instead of attention:

    x = x + mix(LN(x));  x = x + MLP(LN(x))

or, with mixing_in_mlp, one layer in place of both, where the MLP reads what is mixed:

    h = LN(x);  x = x + MLP(h + mix(h))

In the flat mixer, mix(x)[i] = bias[i] + sum over j <= i of weight[i, j] * x[j], with one learned
weight (context, context) for all channels; mixing.py has the others. There is no position
embedding, because the mixing weight has a number for every pair of positions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PreTrainedModel, initialization
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from mixer.ops.plain import in_autocast_dtype

from .cache import CACHE, MixingCache
from .configuration import RECURRENT, MaskedMixerConfig
from .loops import InTransformersLoops
from .mixing import Keyed, gelu, linear, mixing_class, relu2, rotations
from .suffix import SuffixMatch

NO_TOKEN = "a text has no token; allowed: 1 or more in each"


class MLP(nn.Module):
    """Two linear layers with a nonlinearity between, on each token by itself."""

    # Set by training to save memory: the nonlinearity's output is computed again in backward.
    recompute_activation = False

    def __init__(self, config: MaskedMixerConfig):
        super().__init__()
        self.up_proj = linear(config.hidden_size, config.intermediate_size, bias=config.linear_bias)
        self.down_proj = linear(
            config.intermediate_size, config.hidden_size, bias=config.linear_bias
        )
        self.activation = {"gelu": gelu, "relu2": relu2, "silu": F.silu}[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        x = self.up_proj(x)
        if self.recompute_activation and torch.is_grad_enabled():
            return checkpoint(self._down, x, use_reentrant=False)
        return self._down(x)

    def _down(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(x))


class Block(GradientCheckpointingLayer):
    """Token mixing and an MLP, each after a LayerNorm and added to the residual stream; or, with
    mixing_in_mlp in blocks without keys, an MLP after a LayerNorm and mixing.
    """

    def __init__(self, config: MaskedMixerConfig, number: int):
        super().__init__()
        variant = mixing_class(config, number)
        self.is_keyed = variant is Keyed
        self.mixing_in_mlp = config.mixing_in_mlp and not self.is_keyed
        if not self.mixing_in_mlp:
            self.mixing_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mixing = variant(config)
        for index, module in enumerate(self.mixing.modules()):
            module.module_id = (number, index)  # pyright: ignore[reportArgumentType]
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = MLP(config)
        self.mlp_first = config.mlp_first

    def forward(
        self,
        x: Tensor,
        past: MixingCache | None = None,
        rotation: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """x and the result are (batch, tokens, channels). rotation: read by keyed mixing."""
        if past is not None:
            past.positions = past.positions.to(x.device)  # of this block, with a device_map
        if self.mixing_in_mlp:
            normed = self.mlp_norm(x)
            return x + self.mlp(self.mixing(normed, normed, past))
        if self.mlp_first:
            x = x + self.mlp(self.mlp_norm(x))
        if self.is_keyed:
            x = self.mixing(self.mixing_norm(x), x, past, rotation)
        else:
            x = self.mixing(self.mixing_norm(x), x, past)
        return x if self.mlp_first else x + self.mlp(self.mlp_norm(x))


class MaskedMixerPreTrainedModel(PreTrainedModel):
    """What transformers needs to know of every masked mixer: its names and initial weights."""

    config_class = MaskedMixerConfig
    base_model_prefix = "model"
    _no_split_modules = ["Block"]
    supports_gradient_checkpointing = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """The author's initial weights: PyTorch's defaults, or those of kaiming_init."""
        if isinstance(module, nn.Linear) and self.config.kaiming_init:
            initialization.kaiming_normal_(module.weight)
            if module.bias is not None:
                initialization.zeros_(module.bias)
        elif reset := getattr(module, "reset_parameters", None):
            reset()  # transformers leaves out what it has loaded

    def resize_token_embeddings(self, *arguments, **options) -> nn.Embedding:
        """As in transformers, with the embedding of suffix_match."""
        embedding = super().resize_token_embeddings(*arguments, **options)
        match = self.base_model.suffix_match
        if isinstance(match, SuffixMatch):
            rows = len(embedding.weight)
            match.embed_tokens = self._get_resized_embeddings(match.embed_tokens, rows)
        return embedding


class TokenLayout:
    """Where a batch's new tokens are, by an attention mask (batch, past + new) or None. The
    model works on `gather(input_ids)`: each text's tokens come first, and its padding after them,
    where no token can see it. `restore` puts the results back into the input's columns. A padded
    position gets the result of the last token before it, also of one in the cache: `generate` reads
    the last column, which so has every text's prediction, whichever side is padded. Positions
    before the first token get zeros: a loss over all columns would learn from anything else there.
    """

    def __init__(self, mask: Tensor | None, new: int):
        self.new = new
        self.is_padded = mask is not None
        self.order = None
        if mask is None:
            return
        is_token = mask[:, -new:].bool()
        self.starts = mask[:, :-new].bool().sum(1, keepdim=True)  # (batch, 1): tokens in the cache
        self.count = is_token.cumsum(1)  # (batch, new): new tokens up to each column
        if new > 1:  # (batch, new): the columns with tokens, then those with padding
            self.order = is_token.logical_not().to(torch.uint8).argsort(dim=1, stable=True)

    def check(self, cache: MixingCache | None) -> None:
        """Raises ValueError for a mask without a token, and for one that is not the cache's. Waits
        for the GPU where there is a mask, or there was one.
        """
        if cache is not None and not cache.is_empty:
            if not cache.may_have(self.starts if self.is_padded else cache.length):
                raise ValueError(
                    "attention_mask, or that there is none, hides other tokens of the cache than "
                    "earlier calls did; allowed: the earlier mask, with columns for the new "
                    "tokens. To hide more, call past_key_values.reset() and give the text anew"
                )
        # Beside others, a text without tokens would get zeros, which look like a result.
        elif self.is_padded and not self.count[:, -1].all():
            raise ValueError(NO_TOKEN)

    def gather(self, input_ids: Tensor) -> Tensor:
        return input_ids if self.order is None else input_ids.gather(1, self.order)

    def positions(self, earlier: int, device: torch.device, mark_padding: bool) -> Tensor:
        """Of the gathered tokens, after `earlier` columns in the cache: (batch or 1, new) int64.
        Padding stands behind each text, or at -1 if it is to be marked.
        """
        column = torch.arange(self.new, device=device)
        if not self.is_padded:
            return earlier + column[None]
        is_marked = (column >= self.count[:, -1:]) & mark_padding
        return (self.starts + column).masked_fill(is_marked, -1)

    def tokens(self, columns: int) -> Tensor | int:
        """Of each text so far, (batch, 1); or all of so many columns, where there is no mask."""
        return self.starts + self.count[:, -1:] if self.is_padded else columns

    def restore(self, x: Tensor, last: Tensor | None = None) -> Tensor:
        """x (batch, new, channels), back in the order of the input's columns. last: the result of
        each text's last token in the cache, (batch, channels); None: zeros.
        """
        if not self.is_padded:
            return x
        if self.order is not None:
            column = (self.count - 1).clamp(min=0)[..., None].expand_as(x)
            x = x.gather(1, column)
        before = (self.count == 0)[..., None]  # the first new token
        if last is None:
            return x.masked_fill(before, 0)
        return x.where(~before, last[:, None].to(x.dtype))


class MaskedMixerModel(MaskedMixerPreTrainedModel):
    """Embedding and blocks: input_ids (batch, tokens) int64 -> last_hidden_state (batch, tokens,
    hidden_size).
    """

    def __init__(self, config: MaskedMixerConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.suffix_match = SuffixMatch(config) if config.suffix_match else None
        numbers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(Block(config, number) for number in numbers)
        final_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.norm = final_norm if config.final_norm else nn.Identity()
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: MixingCache | None = None,
        use_cache: bool = False,
        output_hidden_states: bool | None = None,
        cache: MixingCache | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """For arguments and errors, see MaskedMixerForCausalLM.forward."""
        past = past_key_values if cache is None else cache
        self._check(input_ids, attention_mask, past, kwargs)
        assert input_ids is not None  # or _check would have raised
        if self.training and self.layers[0].gradient_checkpointing and torch.is_grad_enabled():
            use_cache = False  # a block that is computed again would write to it twice
        if use_cache and past is None:
            past = MixingCache(self.config)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        states = [] if output_hidden_states else None
        layout = TokenLayout(attention_mask, input_ids.shape[1])
        is_capturing = input_ids.is_cuda and torch.cuda.is_current_stream_capturing()
        if not (torch.compiler.is_compiling() or is_capturing):
            layout.check(past)
        input_ids = layout.gather(input_ids)
        if past is None:
            x = self._blocks(input_ids, None, states)
        else:
            # A single token of padding is overwritten by the token that follows.
            mark_padding = self.config.mixing_weight in RECURRENT or input_ids.shape[1] > 1
            past.positions = layout.positions(past.length, input_ids.device, mark_padding)
            past.has_padding = mark_padding and layout.is_padded
            x = past.run(self._blocks, input_ids, states)
        x = layout.restore(x, None if past is None else past.last)
        if past is not None:
            past.last = x[:, -1].clone()  # a view would keep the results of a whole prompt
            past.tokens = layout.tokens(past.length)
        if states is not None:
            states = (*map(layout.restore, states[:-1]), x)
        return BaseModelOutputWithPast(x, past, hidden_states=states)

    def _blocks(
        self, input_ids: Tensor, past: MixingCache | None, states: list[Tensor] | None = None
    ) -> Tensor:
        """Embedding, blocks and final norm: (batch, new) int64 -> (batch, new, channels). `states`
        is filled with the embedding and each block's output, the last one after the norm.
        """
        if past is not None:
            past.forget_step()
        x = self.embed_tokens(input_ids)
        if self.suffix_match is not None:
            x = x + self.suffix_match(input_ids, past)
        (x,) = in_autocast_dtype(x)
        rotation = None
        if self.config.mixer_rotary:
            if past is None:
                positions = torch.arange(x.shape[1], device=x.device)[None]
            else:
                positions = past.positions
            rotation = rotations(positions, self.config.mixer_key_size)
        for layer in self.layers:
            if states is not None:
                states.append(x)
            x = layer(x, past, rotation)
        x = self.norm(x)
        if past is not None:
            past.forget_step()
        if states is not None:
            states.append(x)
        return x

    def _check(self, input_ids, attention_mask, cache, kwargs: dict) -> None:
        """Raises ValueError for the input errors that MaskedMixerForCausalLM.forward names."""
        # Other models read these. Ignoring them without an error would give wrong results.
        unread = [
            name for name in ("inputs_embeds", "position_ids") if kwargs.get(name) is not None
        ]
        if cache is not None and not isinstance(cache, MixingCache):
            unread.append(type(cache).__name__)
        if input_ids is None or unread:
            raise ValueError(
                f"{' and '.join(unread) or 'no input_ids'} given; a masked mixer reads input_ids, "
                "an attention_mask for padding, and a MixingCache as past_key_values"
            )
        batch, new = input_ids.shape
        past = 0
        longest = self.config.longest_text
        if cache is not None:
            if cache.config.longest_text != longest:  # its rings would have other columns
                raise ValueError(
                    f"the cache is for texts of at most {cache.config.longest_text} tokens, and "
                    f"this model reads {longest}: give MixingCache(model.config) of this model"
                )
            past = cache.length
            longest = min(longest, cache.longest_text)
        if new == 0:
            raise ValueError(NO_TOKEN)
        if past + new > longest:
            before = f" and the cache {past}" if past else ""
            raise ValueError(
                f"the input has {new} tokens{before}; allowed: together at most {longest}, the "
                "context or the room of a static cache: give a shorter input, call "
                "past_key_values.reset() before a new text, or use a larger MixingCache"
            )
        if cache is not None and past and cache.batch != batch:
            raise ValueError(
                f"input_ids has {batch} texts, but the cache {cache.batch}: give as many, call "
                "past_key_values.reset() before new texts, or batch_repeat_interleave(n) if n "
                "texts continue each text of the cache"
            )
        shape = tuple(attention_mask.shape) if attention_mask is not None else (batch, past + new)
        if shape != (batch, past + new):
            raise ValueError(f"attention_mask has shape {shape}; allowed: {(batch, past + new)}")


# GenerationMixin must be named here: transformers looks for it among the direct bases.
class MaskedMixerForCausalLM(MaskedMixerPreTrainedModel, InTransformersLoops, GenerationMixin):
    """The language model: MaskedMixerModel and lm_head. AutoModelForCausalLM.from_pretrained loads
    it after `import mixer`, or without this package with trust_remote_code=True.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: MaskedMixerConfig):
        super().__init__(config)
        self.model = MaskedMixerModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """Next-token logits, and the mean cross-entropy in nats if labels are given.

        Args:
            input_ids: (batch, tokens) int64. With full mixing weights, these and the tokens in the
                cache must fit into the context; other weights have no limit.
            attention_mask: (batch, tokens in the cache + tokens), 1 for a token and 0 for padding,
                on either side. Each text is computed as if it stood alone. A padded position
                repeats the logits of the token before it, or has zeros if there is none, or a crop
                of the cache came between.
            labels: (batch, tokens) int64, the inputs themselves (they are shifted here), -100 for
                tokens that are not scored. The first token of a text and padding are never scored.
            logits_to_keep: the number of last tokens, or the positions; 0: all.
            past_key_values, or cache: what an earlier call returned; it is changed in place.
            use_cache: return a cache. While training with gradient checkpointing there is none.
            output_hidden_states: return the embedding and the output of each block, the last one
                after the final norm, (batch, tokens, hidden_size) each.
            num_items_in_batch: the loss is a sum divided by this number, in place of a mean.

        Returns logits (batch, kept tokens, vocab_size), loss, past_key_values and hidden_states.
        Raises ValueError if the tokens exceed the context, if attention_mask has another shape, and
        for arguments that this model does not read: inputs_embeds, position_ids, other caches.
        """
        output = self.model(input_ids, attention_mask, **kwargs | {"return_dict": True})
        columns = logits_to_keep
        if isinstance(logits_to_keep, int):
            columns = slice(-logits_to_keep, None)
        logits = self.lm_head(output.last_hidden_state[:, columns])
        loss = None
        if labels is not None:
            labels = self.predicted_labels(labels, attention_mask)
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(
            loss, logits, output.get(CACHE), hidden_states=output.hidden_states
        )

    def flops_per_token(self) -> dict[str, float]:
        """FLOPs of one training step, forward and backward, per token of a text as long as the
        context; a multiplication and an addition count as two.

        Returns `useful`: all matrix products of the model, with exactly half of each square for a
        triangle, but as usual no norms, nonlinearities, embedding and softmax; and `token_mixing`,
        the part of these in the triangular convolutions.
        """
        tokens = self.config.max_position_embeddings
        linear = 0
        text_mixing = 0  # of all tokens of a text
        for module in self.modules():
            if isinstance(module, nn.Linear):
                linear += 2 * module.weight.numel()
            if flops := getattr(module, "flops", None):
                text_mixing += flops(tokens)
        mixing = text_mixing / tokens
        return {"useful": 3.0 * (linear + mixing), "token_mixing": 3.0 * mixing}
