# Copied beside every saved model: it imports from this package only files that are copied too.
"""The options of a masked mixer, defined only here, also for a run's section `model` and checks.
Importing them takes no time.
"""

import dataclasses
from dataclasses import dataclass

from mixer.common.options import option

BACKENDS = ("auto", "cuda", "dense")  # as in mixer/ops/plain.py, which takes time to import
# Mixing weights that are a recurrence, with a memory of constant size; see RecurrentConv.
RECURRENT = ("rows", "columns", "mixed")
# Options that need a mixer_key_size.
OF_KEYS = (
    "mixer_keyed_every",
    "mixer_keyed_blocks",
    "mixer_attention",
    "mixer_key_norm",
    "mixer_rotary",
    "mixer_key_shift",
)
MOST = 2**16  # of channels, heads and taps


@dataclass
class MixerOptions:
    """The options of a masked mixer; the defaults are the flat mixer of arXiv 2409.01482."""

    hidden_size: int = option(1024, "channels of the residual stream", at_least=1, at_most=MOST)
    num_hidden_layers: int = option(16, "number of blocks", at_least=1, at_most=1000)
    max_position_embeddings: int = option(512, "context length (tokens)", at_least=2, at_most=2**20)
    intermediate_size: int | None = option(
        None, "width of the MLP; null: 4 x hidden_size", at_least=1, at_most=2**20
    )
    num_mixer_heads: int = option(
        1, "groups of channels, each with its own mixing weight", at_least=1, at_most=MOST
    )
    mixer_projections: bool = option(
        True, "linear layers around the heads; false: none, and with keys, flat blocks have heads"
    )
    mixer_kernel_size: int = option(
        1, "taps of the convolution over the channels", at_least=1, at_most=MOST
    )
    mixer_expansion: bool = option(False, "two triangular convolutions, a GELU between them")
    mixer_gate: bool = option(
        False, "gated mixing: out_proj(query * mix(key * value)), all three projections of x"
    )
    mixer_key_size: int = option(
        0,
        "keyed mixing: channels of a query or key in each head; 0: no keyed mixing",
        at_least=0,
        at_most=MOST,
    )
    mixer_keyed_every: int = option(
        1, "with keys: keyed mixing in every n-th block, gated or flat in the others", at_least=1
    )
    mixer_keyed_blocks: list | None = option(
        None, "in place of mixer_keyed_every: the blocks with keyed mixing, from 1 on, as in [3, 5]"
    )
    mixer_attention: bool = option(False, "with keys: softmax attention instead of keyed mixing")
    mixer_key_norm: bool = option(False, "with keys: RMS-normalize queries and keys in each head")
    mixer_rotary: bool = option(False, "with keys: rotate queries and keys by position")
    mixer_key_shift: bool = option(False, "with keys: add a learned share of the previous key")
    suffix_match: int = option(
        0,
        "add an embedding of the token that followed the last time that the same tokens stood in "
        "the context, up to so many; 0: none",
        at_least=0,
        at_most=16,
    )
    mixing_weight: str = option(
        "full",
        "full: a number per pair of positions; lags: per distance; rows, columns, mixed: recurrent",
        choices=("full", "lags", *RECURRENT),
    )
    mixing_window: int = option(
        0,
        "with mixing_weight lags: so many of the last tokens are mixed, in blocks without keys; 0: "
        "as many as the context has",
        at_least=0,
        at_most=2**20,
    )
    mixing_decay: bool = option(False, "with a recurrent mixing_weight: each head learns a decay")
    mixing_in_mlp: bool = option(
        False, "in blocks without keys, the MLP reads its input plus what is mixed of it: one layer"
    )
    mlp_first: bool = option(False, "put each block's MLP before its mixing")
    mixing_init: str = option(
        "reference",
        "initial mixing weights: reference (random, like the author's), zero, or shift (copies the "
        "token a fixed distance back; in keyed mixing, averages earlier tokens)",
        choices=("reference", "zero", "shift"),
    )
    kaiming_init: bool = option(
        False, "initial variance 2 / fan-in, biases 0, like the author's other mixers"
    )
    layer_norm_eps: float = option(1e-5, "epsilon of every LayerNorm", above=0)
    tie_word_embeddings: bool = option(False, "use the embedding's weight in lm_head")
    final_norm: bool = option(False, "apply a LayerNorm before lm_head")
    linear_bias: bool = option(True, "whether linear layers have biases; lm_head never does")
    hidden_act: str = option(
        "gelu", "the MLP's nonlinearity; relu2: ReLU squared", choices=("gelu", "relu2", "silu")
    )
    mixing_backend: str = option(
        "auto",
        "cuda: our kernels; dense: plain PyTorch; auto: cuda where it can run, else dense. Keyed "
        "mixing takes cuda for auto",
        choices=BACKENDS,
    )


@dataclass
class ModelOptions(MixerOptions):
    """MixerOptions and the vocabulary's size, which a run takes from its tokenizer."""

    vocab_size: int = option(8000, "number of token ids", at_least=1, at_most=2**24)


NAMES = tuple(item.name for item in dataclasses.fields(ModelOptions))


def keyed_blocks(options: MixerOptions) -> list[int]:
    """The numbers of the blocks with keyed mixing, from 1 on."""
    if not options.mixer_key_size:
        return []
    if options.mixer_keyed_blocks is not None:
        return options.mixer_keyed_blocks
    every = options.mixer_keyed_every
    return list(range(every, options.num_hidden_layers + 1, every))


def shape_problems(options: MixerOptions) -> list[str]:
    """One line for each rule broken by options that are allowed alone, but not together."""
    heads = options.num_mixer_heads
    taps = options.mixer_kernel_size
    keys = options.mixer_key_size
    gate = options.mixer_gate
    form = options.mixing_weight
    window = options.mixing_window
    blocks = range(1, options.num_hidden_layers + 1)
    listed = options.mixer_keyed_blocks
    is_list_wrong = listed is not None and (
        not listed
        or not all(type(block) is int and block in blocks for block in listed)
        or sorted(set(listed)) != listed
    )
    keyed_in_all = keyed_blocks(options) == list(blocks)
    recurrent = form in RECURRENT
    shift = options.mixing_init == "shift"
    keyed = ["mixer_keyed_every" if listed is None else "mixer_keyed_blocks"]
    of_keys = [name for name in OF_KEYS if getattr(options, name) != getattr(MixerOptions, name)]
    # Whether a model breaks a rule, the options that it is about, and what is allowed of them.
    rules = [
        (
            options.hidden_size % heads,
            ["num_mixer_heads", "hidden_size"],
            "heads that divide the size",
        ),
        (
            options.mixer_expansion and (gate or keys),
            ["mixer_expansion", "mixer_gate", "mixer_key_size"],
            "expansion alone",
        ),
        (
            is_list_wrong,
            ["mixer_keyed_blocks", "num_hidden_layers"],
            "one or more numbers of blocks, from 1 to num_hidden_layers, each once and in order",
        ),
        (
            listed is not None and options.mixer_keyed_every > 1,
            ["mixer_keyed_blocks", "mixer_keyed_every"],
            "one of them; with mixer_keyed_blocks set mixer_keyed_every=1",
        ),
        (
            gate and keyed_in_all,
            ["mixer_gate", "mixer_key_size", *keyed],
            "mixer_keyed_every above 1, or some of the blocks in mixer_keyed_blocks",
        ),
        (
            (gate or keyed_in_all) and not options.mixer_projections,
            ["mixer_projections", "mixer_gate", "mixer_key_size"],
            "true with gate, or keys in all blocks",
        ),
        (of_keys and not keys, of_keys, "with a mixer_key_size, such as 64"),
        (
            keys and taps > 1,
            ["mixer_key_size", "mixer_kernel_size"],
            "kernel size 1 with keys",
        ),
        (
            keys and options.mixer_keyed_every > options.num_hidden_layers,
            ["mixer_keyed_every", "num_hidden_layers"],
            "at most the number of blocks",
        ),
        (
            options.mixer_rotary and keys % 2,
            ["mixer_rotary", "mixer_key_size"],
            "an even size",
        ),
        (
            recurrent and keys,
            ["mixing_weight", "mixer_key_size"],
            "full or lags with keys",
        ),
        (
            recurrent and taps > 1,
            ["mixing_weight", "mixer_kernel_size"],
            "full or lags with several taps",
        ),
        (
            recurrent and options.suffix_match,
            ["mixing_weight", "suffix_match"],
            "full or lags with suffix_match",
        ),
        (
            recurrent and shift,
            ["mixing_weight", "mixing_init"],
            "reference or zero with a recurrence",
        ),
        (
            keys and form == "lags" and not shift,
            ["mixing_init", "mixing_weight", "mixer_key_size"],
            "shift with lags and keys",
        ),
        (
            options.mixing_in_mlp and options.mlp_first,
            ["mixing_in_mlp", "mlp_first"],
            "one of them",
        ),
        (
            options.mixing_in_mlp and keyed_in_all,
            ["mixing_in_mlp", "mixer_key_size", *keyed],
            "mixing in the MLP of blocks without keys",
        ),
        (
            window and form != "lags",
            ["mixing_window", "mixing_weight"],
            "a window with lags",
        ),
        (
            window > options.max_position_embeddings,
            ["mixing_window", "max_position_embeddings"],
            "a window of at most the context",
        ),
        (
            window and keyed_in_all,
            ["mixing_window", "mixer_key_size", *keyed],
            "a window with blocks without keys",
        ),
        (
            options.mixing_decay and not recurrent,
            ["mixing_decay", "mixing_weight"],
            f"decay with {', '.join(RECURRENT)}",
        ),
        (
            form == "mixed" and heads < 2,
            ["mixing_weight", "num_mixer_heads"],
            "2 heads or more",
        ),
    ]
    problems = []
    for is_broken, names, allowed in rules:
        if is_broken:
            values = " and ".join(f"{name} = {getattr(options, name)!r}" for name in names)
            problems.append(f"{values}; allowed: {allowed}")
    return problems
