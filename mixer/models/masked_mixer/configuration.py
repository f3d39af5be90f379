"""The options of a masked mixer, and its configuration as transformers saves and loads it.

An option is written once, as a field of `MixerOptions`. The configuration of a run (`model.*`), its
checks and `python train.py --help` all come from there.
"""

import dataclasses
import inspect
import math
import re
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedConfig

from mixer.common.options import option, option_problems
from mixer.ops.lags import toeplitz
from mixer.ops.plain import BACKENDS, triangular_conv

# Mixing weights that are a recurrence, with a memory of constant size; see recurrent.py.
RECURRENT = ("rows", "columns", "mixed")
# Which code beside a saved model each of transformers' Auto classes loads with trust_remote_code.
AUTO_MAP = {
    "AutoConfig": "configuration.MaskedMixerConfig",
    "AutoModel": "modeling.MaskedMixerModel",
    "AutoModelForCausalLM": "modeling.MaskedMixerForCausalLM",
}


@dataclass
class MixerOptions:
    """The options of a masked mixer; the defaults are the flat mixer of arXiv 2409.01482."""

    hidden_size: int = option(1024, "channels of the residual stream", at_least=1, at_most=2**16)
    num_hidden_layers: int = option(16, "number of blocks", at_least=1, at_most=1000)
    max_position_embeddings: int = option(
        512,
        "the context in tokens, and so the size of each mixing weight",
        at_least=2,
        at_most=2**20,
    )
    intermediate_size: int | None = option(
        None, "width of the MLP; null for the default, 4 x hidden_size", at_least=1, at_most=2**20
    )
    num_mixer_heads: int = option(
        1, "groups of channels with a mixing weight each", at_least=1, at_most=2**16
    )
    mixer_projections: bool = option(
        True,
        "with several heads: a linear projection before the mixing and one after it. false with "
        "mixer_key_size: blocks between those of keyed mixing have heads, too, in place of one",
    )
    mixer_kernel_size: int = option(
        1, "taps over the channels per pair of tokens", at_least=1, at_most=2**16
    )
    mixer_expansion: bool = option(False, "two triangular convolutions with a GELU between")
    mixer_gate: bool = option(
        False, "gated mixing: out_proj(query * mix(key * value)), all three projections of x"
    )
    mixer_key_size: int = option(
        0,
        "keyed mixing: mixing weights are scaled by how well a query fits a key, which have so "
        "many numbers in each head; 0 for none",
        at_least=0,
        at_most=2**16,
    )
    mixer_keyed_every: int = option(
        1,
        "with mixer_key_size: which blocks have keyed mixing, 1 for all, 4 for every fourth; the "
        "others have gated mixing with mixer_gate, else flat mixing with one head",
        at_least=1,
    )
    mixer_attention: bool = option(
        False,
        "with mixer_key_size: attention in place of keyed mixing, which is the same without a "
        "mixing weight and a mixing bias",
    )
    mixer_key_norm: bool = option(
        False, "with mixer_key_size: RMS norms of queries and keys in each head"
    )
    mixer_rotary: bool = option(
        False, "with mixer_key_size: queries and keys are rotated by their position"
    )
    mixer_key_shift: bool = option(
        False, "with mixer_key_size: a key also has a learned share of the key before it"
    )
    value_embeddings: int = option(
        0,
        "with mixer_key_size: every so many blocks, an embedding of the tokens is added to the "
        "values; 0 for none",
        at_least=0,
    )
    mixing_weight: str = option(
        "full",
        "what a mixing weight is: full, a number for each pair of positions, or lags, one for each "
        "distance of two tokens, so that nothing grows with the square of the context, or a "
        "recurrence, whose memory does not grow while a text is generated: rows and columns have "
        "one for each token, by which it takes or gives, mixed has rows in half of the heads",
        choices=("full", "lags", *RECURRENT),
    )
    mixing_decay: bool = option(
        False, "with mixing_weight rows, columns or mixed: each head learns how fast it forgets"
    )
    mlp_first: bool = option(False, "a block's MLP stands before its mixing")
    mixing_init: str = option(
        "reference",
        "initial mixing weights: reference (random, as the author's), zero (a block starts as its "
        "MLP alone), or shift (each head starts by passing on the token some places back, and in "
        "keyed mixing as a mean of earlier tokens; for several heads)",
        choices=("reference", "zero", "shift"),
    )
    zero_init: bool = option(
        False,
        "blocks start as the identity: their output projections are zero, and the embedding is "
        "smaller",
    )
    kaiming_init: bool = option(
        False,
        "linear layers and random mixing weights start with a variance of 2 / inputs, and without "
        "biases, as in the author's Toeplitz and recurrent mixers; else as PyTorch's layers do",
    )
    layer_norm_eps: float = option(1e-5, "epsilon of every LayerNorm", above=0)
    tie_word_embeddings: bool = option(False, "use the embedding's weight in lm_head")
    final_norm: bool = option(False, "a LayerNorm before lm_head")
    linear_bias: bool = option(True, "whether linear layers have biases; lm_head never has")
    hidden_act: str = option(
        "gelu",
        "the MLP's nonlinearity; relu2 is the square of ReLU",
        choices=("gelu", "relu2", "silu"),
    )
    mixing_backend: str = option(
        "auto",
        "what computes the triangular convolutions: cuda (our kernels), dense (masked-weight "
        "matmul in plain PyTorch), or auto: cuda where it can run, but in a training run on a GPU "
        "that nobody has timed the faster one, measured before the first step",
        choices=BACKENDS,
    )


@dataclass
class ModelOptions(MixerOptions):
    """MixerOptions and the vocabulary's size, which a run takes from its tokenizer."""

    vocab_size: int = option(8000, "number of token ids", at_least=1, at_most=2**24)


NAMES = tuple(item.name for item in dataclasses.fields(ModelOptions))


class MaskedMixerConfig(PreTrainedConfig):
    """Configuration of a masked mixer (arXiv 2409.01482, section 2).

    Args:
        options: any of the fields of ModelOptions, above, where each has its default and meaning.
            All other keywords are those of transformers' PreTrainedConfig.

    Raises:
        ValueError: a size is too small, layer_norm_eps is not positive, the heads do not divide
            hidden_size, the backend is unknown, or options do not go together.
    """

    model_type = "masked_mixer"

    def __init__(self, **options):
        given = {name: options.pop(name) for name in NAMES if name in options}
        chosen = ModelOptions(**given)
        problems = option_problems(chosen) or shape_problems(chosen)
        if problems:
            raise ValueError("; ".join(problems))
        for name in NAMES:
            setattr(self, name, getattr(chosen, name))
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        super().__init__(tie_word_embeddings=chosen.tie_word_embeddings, **options)

    @property
    def longest_text(self) -> float:
        """How many tokens the model reads at most: the context, or without end."""
        recurrent = self.mixing_weight in RECURRENT
        return math.inf if recurrent else self.max_position_embeddings

    def save_pretrained(self, save_directory, **kwargs) -> None:
        """As in transformers, and the model's code, for trust_remote_code where this package is not
        installed.
        """
        self.auto_map = AUTO_MAP
        copy_code(Path(save_directory))
        super().save_pretrained(save_directory, **kwargs)


def copy_code(directory: Path) -> None:
    """Copies the files of the model into a directory, and those of mixer/ops and mixer/common that
    they import. There all stand side by side, so imports of these become relative.
    """
    directory.mkdir(parents=True, exist_ok=True)
    elsewhere = (Path(inspect.getfile(part)) for part in (option, toeplitz, triangular_conv))
    files = {file.stem: file for file in (*Path(__file__).parent.glob("*.py"), *elsewhere)}
    del files["__init__"]
    for name, file in files.items():
        code = file.read_text(encoding="utf-8")
        code = re.sub(r"^( *from) mixer\.\w+(\.\w+ import)", r"\1 \2", code, flags=re.MULTILINE)
        if name == "modeling":
            # Up to 5.9, transformers takes no files along but those that this one imports itself.
            imported = re.findall(r"^from \.(\w+) import", code, re.MULTILINE)
            missing = sorted(files.keys() - {name, *imported})
            code += "".join(f"from .{other} import __doc__ as _\n" for other in missing)
        (directory / file.name).write_text(code, encoding="utf-8")


def shape_problems(options: MixerOptions) -> list[str]:
    """One line for each rule that options break together, each being allowed by itself."""
    heads, hidden = options.num_mixer_heads, options.hidden_size
    gate, expansion, size = options.mixer_gate, options.mixer_expansion, options.mixer_key_size
    every, form, start = options.mixer_keyed_every, options.mixing_weight, options.mixing_init
    taps = options.mixer_kernel_size
    of_keys = ("attention", "key_norm", "rotary", "key_shift")
    of_keys = [*(f"mixer_{name}" for name in of_keys), "value_embeddings"]
    of_keys = [name for name in of_keys if getattr(options, name)]
    of_keys += ["mixer_keyed_every"] if every > 1 else []
    recurrent = form in RECURRENT
    # Whether it is broken, the options, and what is allowed.
    rules = [
        (hidden % heads, "num_mixer_heads hidden_size", "heads that divide it"),
        (expansion and gate, "mixer_expansion mixer_gate", "one of them"),
        (expansion and size, "mixer_expansion mixer_key_size", "one of them"),
        (
            size and gate and every == 1,
            "mixer_key_size mixer_gate mixer_keyed_every",
            "one of the first two, or mixer_keyed_every of 2 or more, for blocks of both",
        ),
        (
            (gate or (size and every == 1)) and not options.mixer_projections,
            "mixer_gate mixer_key_size mixer_projections",
            "mixer_projections true, which gated and keyed mixing always have",
        ),
        (of_keys and not size, " ".join(of_keys), "with a mixer_key_size, such as 64"),
        (size and taps > 1, "mixer_key_size mixer_kernel_size", "one tap"),
        (
            size and every > options.num_hidden_layers,
            "mixer_keyed_every num_hidden_layers",
            "no more than the blocks",
        ),
        (options.mixer_rotary and size % 2, "mixer_rotary mixer_key_size", "even sizes"),
        (
            size and options.value_embeddings % every,
            "value_embeddings mixer_keyed_every",
            "a multiple of it, as keyed mixing alone has values to add to",
        ),
        (size and recurrent, "mixing_weight mixer_key_size", "full and lags with keys"),
        (taps > 1 and recurrent, "mixing_weight mixer_kernel_size", "full and lags with taps"),
        (
            size and form == "lags" and start != "shift",
            "mixing_init mixer_key_size mixing_weight",
            "mixing_init shift",
        ),
        (
            options.mixing_decay and not recurrent,
            "mixing_decay mixing_weight",
            f"with mixing_decay, {', '.join(RECURRENT)}",
        ),
        (start == "shift" and recurrent, "mixing_init mixing_weight", "reference and zero"),
        (form == "mixed" and heads < 2, "mixing_weight num_mixer_heads", "2 heads or more"),
    ]
    return [
        f"{' and '.join(f'{n} = {getattr(options, n)!r}' for n in names.split())}; allowed: {right}"
        for is_broken, names, right in rules
        if is_broken
    ]
