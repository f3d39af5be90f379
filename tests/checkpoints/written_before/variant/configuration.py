"""The shape of a masked mixer, as transformers saves and loads it."""

import math

from transformers import PreTrainedConfig

from .plain import BACKENDS  # relative, as transformers asks of code that goes with a checkpoint

AUTO_MAP = {  # the code beside a saved model that each of transformers' Auto classes finds with trust_remote_code
    "AutoConfig": "configuration.MaskedMixerConfig",
    "AutoModel": "modeling.MaskedMixerModel",
    "AutoModelForCausalLM": "modeling.MaskedMixerForCausalLM",
}


class MaskedMixerConfig(PreTrainedConfig):
    """Configuration of a masked mixer (arXiv 2409.01482, section 2); the defaults are the paper's flat mixer.

    Args:
        vocab_size: number of token ids.
        hidden_size: channels of the residual stream.
        num_hidden_layers: number of blocks.
        max_position_embeddings: the context in tokens; the model has no position embedding, the mixing weight has this size.
        intermediate_size: width of the MLP; None for 4 x hidden_size.
        num_mixer_heads: groups of channels with a mixing weight each; more than one adds an in- and an out-projection.
        mixer_kernel_size: taps of the convolution over the channels, per pair of tokens.
        mixer_expansion: two triangular convolutions with a GELU between, in place of one.
        layer_norm_eps: epsilon of every LayerNorm.
        tie_word_embeddings: use the embedding's weight in lm_head.
        final_norm: a LayerNorm before lm_head.
        mixing_backend: "auto", "cuda", "panels" or "dense", see `mixer.ops.triangular_conv`. Changes the speed alone.

    Raises:
        ValueError: a size or layer_norm_eps is not positive, the heads do not divide hidden_size, or the backend is unknown.
    """

    model_type = "masked_mixer"

    def __init__(
        self,
        vocab_size: int = 8000,
        hidden_size: int = 1024,
        num_hidden_layers: int = 16,
        max_position_embeddings: int = 512,
        intermediate_size: int | None = None,
        num_mixer_heads: int = 1,
        mixer_kernel_size: int = 1,
        mixer_expansion: bool = False,
        layer_norm_eps: float = 1e-5,
        tie_word_embeddings: bool = False,
        final_norm: bool = False,
        mixing_backend: str = "auto",
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.max_position_embeddings = max_position_embeddings
        self.intermediate_size = 4 * hidden_size if intermediate_size is None else intermediate_size
        self.num_mixer_heads = num_mixer_heads
        self.mixer_kernel_size = mixer_kernel_size
        self.mixer_expansion = mixer_expansion
        self.layer_norm_eps = layer_norm_eps
        self.final_norm = final_norm
        self.mixing_backend = mixing_backend
        problems = shape_problems(self)
        if problems:
            raise ValueError("; ".join(problems))
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)

    def save_pretrained(self, save_directory, **kwargs) -> None:
        """As transformers does, which by itself names no class but the one that is saved."""
        self.auto_map = AUTO_MAP | (getattr(self, "auto_map", None) or {})
        super().save_pretrained(save_directory, **kwargs)


SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "max_position_embeddings",
    "intermediate_size",
    "num_mixer_heads",
    "mixer_kernel_size",
)


def shape_problems(config) -> list[str]:
    """Everything wrong with the values of `config` (any object with some of a MaskedMixerConfig's fields), one line each."""
    problems = []
    for name in SIZES:
        value = getattr(config, name, 1)
        if value is None and name == "intermediate_size":  # 4 x hidden_size
            continue
        if type(value) is not int or value < 1:
            problems.append(f"{name} is {value!r}; it must be an integer of at least 1")
    eps = getattr(config, "layer_norm_eps", 1.0)
    if type(eps) not in (int, float) or not 0 < eps < math.inf:
        problems.append(f"layer_norm_eps is {eps!r}; it must be a number above 0")
    if problems:
        return problems
    hidden, heads = config.hidden_size, config.num_mixer_heads
    if heads >= 1 and hidden % heads:
        allowed = ", ".join(str(n) for n in range(1, min(hidden, 64) + 1) if hidden % n == 0)
        problems.append(f"num_mixer_heads is {heads}, which does not divide hidden_size {hidden}; allowed: {allowed}")
    if config.mixing_backend not in BACKENDS:
        problems.append(f"mixing_backend is {config.mixing_backend!r}; allowed: {', '.join(BACKENDS)}")
    return problems
