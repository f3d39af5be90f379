"""Times keyed mixing by its kernels and by plain PyTorch, beside attention and a convolution alone.

    python benchmarks/keyed_mixing.py --output PATH      # writes PATH.json, PATH.md

bf16 with weights in float32, 65,536 tokens. Every result of the kernels is checked against plain
PyTorch first. Softmax attention has as many channels in heads of 64, keys as long as values. SDPA
chooses its kernels, on Hopper cuDNN's; its flash attention is timed too.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from saving import markdown, measured_by, origin, parser_of, save
from timing import interleaved
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mixer.common.errors import UserError, run_command
from mixer.ops import keyed, keyed_conv, plain, triangular_conv
from mixer.ops.triangular import difference

DEVICE = "cuda"
RESULTS = ("y", "dquery", "dkey", "dvalue", "dweight", "dbias")
TOKENS = 65536
# (context, heads, numbers of a key, numbers of a value)
SHAPES = [
    (512, 8, 32, 64),
    (512, 4, 64, 128),
    (512, 8, 64, 64),
    (512, 4, 128, 128),
    (2048, 8, 32, 64),
    (2048, 8, 64, 64),
    (8192, 8, 32, 64),
    (8192, 8, 64, 64),
]
NAMES = {
    "kernels": "kernels",
    "lags": "kernels, weight by lag",
    "plain": "plain PyTorch",
    "compiled": "compiled",
    "attention": "softmax attention (SDPA)",
    "flash": "its flash attention",
    "convolution": "triangular convolution alone",
}
ATTENTION_SIZE = 64
ROUNDS, BATCH_MS = 9, 20.0


def main() -> None:
    parser = parser_of(__doc__)
    options = parser.parse_args()
    context, _, *sizes = SHAPES[0]
    if not keyed.kernels_serve(torch.device(DEVICE, 0), torch.bfloat16, *sizes, context):
        raise UserError("nothing to measure: this GPU does not run the kernels of keyed mixing")
    result = measured_by(options) | {"rows": []}
    for shape in SHAPES:
        result["rows"] += rows(*shape)
        save(result, table(result), options.output)
    print(table(result))


def inputs(context: int, heads: int, keys: int, values: int) -> list[Tensor]:
    """query, key, value, weight, bias and dy; the first three as parts of one projection."""
    torch.manual_seed(0)
    batch, parts = max(1, TOKENS // context), [heads * keys, heads * keys, heads * values]
    projected = torch.randn(batch, context, sum(parts), device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(heads, 1, context, context, device=DEVICE) * context**-0.5
    bias = torch.randn(heads, context, device=DEVICE)
    dy = torch.randn(batch, context, parts[-1], device=DEVICE, dtype=torch.bfloat16)
    return [*projected.split(parts, dim=-1), weight, bias, dy]


def by_lag(tensors: list[Tensor]) -> list[Tensor]:
    """The same with lags (heads, 1, context) in place of the weight."""
    query, key, value, weight, bias = tensors
    return [query, key, value, weight[:, :, -1].contiguous(), bias]


def mixings(heads: int) -> dict[str, Callable]:
    """Calls with query, key, value, weight and bias."""
    decay = torch.tensor([0.0, 1 / 64, 1 / 256, 1 / 256], device=DEVICE).repeat(heads)[:heads]

    def lags(query, key, value, lags, bias):
        options = {"lags": lags, "decay": decay, "backend": "cuda"}
        return keyed_conv(query, key, value, bias=bias, **options)

    def attention(query, key, value, weight, bias):
        parts = (x.unflatten(-1, (-1, ATTENTION_SIZE)).transpose(1, 2) for x in (query, key, value))
        y = F.scaled_dot_product_attention(*parts, is_causal=True)
        return y.transpose(1, 2).flatten(2)

    def flash(*tensors):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return attention(*tensors)

    return {
        "kernels": lambda *tensors: keyed_conv(*tensors, backend="cuda"),
        "lags": lags,
        "plain": plain.keyed_conv,
        "compiled": torch.compile(plain.keyed_conv, dynamic=False),
        "attention": attention,
        "flash": flash,
        "convolution": lambda _, __, value, weight, bias: triangular_conv(value, weight, bias),
    }


def rows(context: int, heads: int, keys: int, values: int) -> list[dict]:
    torch.compiler.reset()  # which compiles a function for a few shapes only, then runs it as it is
    calls = mixings(heads)
    *tensors, dy = inputs(context, heads, keys, values)
    given = dict.fromkeys(calls, tensors)
    given["attention"] = given["flash"] = inputs(context, heads, values, values)[:-1]
    given["lags"] = by_lag(tensors)
    leaves = {name: [x.detach().requires_grad_() for x in given[name]] for name in calls}

    @torch.no_grad()
    def forward(name: str) -> Tensor:
        return calls[name](*given[name])

    def results(name: str) -> list[Tensor]:
        y = calls[name](*leaves[name])
        gradients = torch.autograd.grad(y, leaves[name], dy, allow_unused=True)
        return [y.detach(), *gradients]

    checked = results("kernels"), results("plain")
    if problem := difference(*checked, RESULTS):
        raise UserError(f"context {context}: {problem}")
    del checked

    found = []
    for title, step in (("forward", forward), ("forward and backward", results)):
        timed = {name: lambda _, name=name, step=step: step(name) for name in calls}
        times = interleaved(timed, DEVICE, 1, ROUNDS, BATCH_MS)
        about = {"context": context, "heads": heads, "keys": keys, "values": values, "pass": title}
        found.append(about | {"times": times})
        print(*cells(found[-1]), flush=True)
    return found


def cells(row: dict) -> list[str]:
    about = [str(row[key]) for key in ("context", "heads", "keys", "values", "pass")]
    times = (time.get("ms") for time in row["times"].values())
    return about + ["-" if ms is None else f"{ms:.3f}" for ms in times]


def table(result: dict) -> str:
    head = ["context", "heads", "keys", "values", "pass"]
    head += [NAMES[name] for name in result["rows"][0]["times"]]
    said = f"{TOKENS:,} tokens, bf16; keys, values: the numbers of each in a head. {origin(result)}"
    rows = markdown(head, [cells(row) for row in result["rows"]])
    return f"# Keyed mixing: milliseconds of one call\n\n{said}\n\n{rows}\n"


if __name__ == "__main__":
    run_command(main)
