"""What a window of the mixing weight saves: the operator, a whole training step, and generation.

    python benchmarks/windows.py --output PATH      # writes PATH.json, PATH.md

One GPU, bf16 with lags in float32. The operator's forward and backward passes are timed side by
side with those of all lags, of a full weight, and with copies of x and dy, which no kernel can beat
by much. A step is of a plain mixer trained with AdamW, its blocks compiled. Generation writes after
a short text and after a long one, with random weights and a static cache.
"""

import time

import torch
from saving import markdown, measured_by, origin, parser_of, save
from timing import interleaved
from torch import Tensor
from training_step_models import FORMS, SharedMemory, Size, Step

from mixer import MaskedMixerConfig, MaskedMixerForCausalLM, MixingCache
from mixer.common.errors import UserError, run_command
from mixer.ops import selftest, triangular_conv

TOKENS = 65536
CHANNELS = 1024
HEADS = 8
WINDOWS = {512: (2, 4, 8, 16, 128), 2048: (4, 8, 128), 8192: (4, 8, 16, 128, 512, 2048)}
ROUNDS = 9
BATCH_MS = 20.0
SLOTS = 3
STEP = Size(tokens=8192, batch=8, hidden=1024, layers=16, vocabulary=8000)
GENERATED = (1024, 32768)  # texts so long
NEW = 64


def main() -> None:
    options = parser_of(__doc__).parse_args()
    if reason := selftest.fault(0):
        raise UserError(f"nothing to measure: {reason}")
    result = measured_by(options) | {"operator": []}
    for tokens, windows in WINDOWS.items():
        result["operator"].append(operator_row(tokens, windows))
    result["step"] = steps()
    result["generation"] = [generation_row(window) for window in (4, 128)]
    save(result, table(result), options.output)
    print(table(result))


# ------------------------------------------------------------------------- the operator


def operator_row(tokens: int, windows: tuple[int, ...]) -> dict:
    """Milliseconds of forward and backward of x (TOKENS / tokens, tokens, CHANNELS), by window."""
    torch.manual_seed(0)
    shape = (TOKENS // tokens, tokens, CHANNELS)

    def activations() -> list[Tensor]:
        return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(SLOTS)]

    xs = [x.requires_grad_() for x in activations()]
    dys = activations()
    copies = activations()

    def by_lag(slot: int, lags: Tensor) -> list[Tensor]:
        y = triangular_conv(xs[slot], lags=lags, backend="cuda")
        return [y.detach(), *torch.autograd.grad(y, [xs[slot], lags], dys[slot])]

    def by_full_weight(slot: int, weight: Tensor) -> list[Tensor]:
        y = triangular_conv(xs[slot], weight, backend="cuda")
        return [y.detach(), *torch.autograd.grad(y, [xs[slot], weight], dys[slot])]

    def copy(slot: int) -> None:
        copies[slot].copy_(xs[slot].detach())
        copies[slot].copy_(dys[slot])

    calls = {"copies of x and dy": copy}
    for window in (*windows, tokens):
        lags = torch.randn(HEADS, 1, window, device="cuda", requires_grad=True)
        name = "all lags" if window == tokens else f"window {window}"
        calls[name] = lambda slot, lags=lags: by_lag(slot, lags)
    if tokens <= 512:
        weight = torch.randn(HEADS, 1, tokens, tokens, device="cuda", requires_grad=True)
        calls["full weight"] = lambda slot: by_full_weight(slot, weight)
    times = interleaved(calls, "cuda", SLOTS, ROUNDS, BATCH_MS)
    print(tokens, {name: round(time["ms"], 4) for name, time in times.items()}, flush=True)
    return {"tokens": tokens, "times": times}


# ------------------------------------------------------------------------- a step


def steps() -> dict[str, dict]:
    """Milliseconds of a training step at STEP, with all lags and with a window."""
    forms = {name: FORMS[name] for name in ("lags", "window")}
    calls = {name: Step(form, STEP, "cuda", SharedMemory()) for name, form in forms.items()}
    return interleaved(calls, "cuda", 1, 5, 400.0, hide_host=False)


# ------------------------------------------------------------------------- generation


def generation_row(window: int) -> dict:
    """Milliseconds of a token, and bytes of the cache, after texts of each length in GENERATED."""
    torch.manual_seed(0)
    config = MaskedMixerConfig(
        hidden_size=512,
        num_hidden_layers=16,
        max_position_embeddings=512,
        num_mixer_heads=8,
        mixing_weight="lags",
        mixing_window=window,
    )
    model = MaskedMixerForCausalLM(config).to("cuda", torch.bfloat16).eval()
    row = {"window": window}
    for length in GENERATED:
        cache = MixingCache(config, static=True)
        ids = torch.randint(1, config.vocab_size, (1, length), device="cuda")
        row[str(length)] = {"ms": ms_a_token(model, ids, cache)}
        row[str(length)]["cache_bytes"] = sum(memory.nbytes for memory in cache.memories.values())
    return row


@torch.no_grad()
def ms_a_token(model: MaskedMixerForCausalLM, ids: Tensor, cache: MixingCache) -> float:
    logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
    for count in (4, NEW):  # the first ones capture the step
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            logits = model(logits.argmax(-1), past_key_values=cache).logits
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / NEW


# ------------------------------------------------------------------------- tables


def table(result: dict) -> str:
    rows = []
    for row in result["operator"]:
        all_lags_ms = row["times"]["all lags"]["ms"]
        copies_ms = row["times"]["copies of x and dy"]["ms"]
        for name, measured in row["times"].items():
            ms = measured["ms"]
            cells = [f"{ms:.4f}", f"{ms / all_lags_ms:.3f}", f"{ms / copies_ms:.2f}"]
            rows.append([f"{row['tokens']} tokens, {name}", *cells])
    head = ["forward and backward", "ms", "of all lags", "of copies"]
    paragraphs = [
        "# Windows of the mixing weight",
        f"{TOKENS:,} tokens x {CHANNELS} channels, {HEADS} heads, bf16.",
        markdown(head, rows),
        step_text(result["step"]),
        "Generation, one text, hidden size 512, 16 blocks, context 512, static cache:",
        generation_table(result["generation"]),
        f"Measured on {origin(result)}.",
    ]
    return "\n\n".join(paragraphs) + "\n"


def step_text(times: dict[str, dict]) -> str:
    lags_ms = times["lags"]["ms"]
    window_ms = times["window"]["ms"]
    return (
        f"A step at {STEP.tokens} tokens, hidden size {STEP.hidden}, {STEP.layers} blocks, "
        f"{STEP.batch * STEP.tokens:,} tokens: all lags {lags_ms:.1f} ms, a window of "
        f"{FORMS['window'].window} {window_ms:.1f} ms, {window_ms / lags_ms:.3f} of it."
    )


def generation_table(rows: list[dict]) -> str:
    head = ["generation"]
    for length in GENERATED:
        head += [f"ms a token after {length:,}", f"cache bytes after {length:,}"]
    cells = []
    for row in rows:
        line = [f"window {row['window']}"]
        for length in GENERATED:
            measured = row[str(length)]
            line += [f"{measured['ms']:,.3f}", f"{measured['cache_bytes']:,.0f}"]
        cells.append(line)
    return markdown(head, cells)


if __name__ == "__main__":
    run_command(main)
