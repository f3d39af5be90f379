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
from mixer.ops.selftest import difference

DEVICE = "cuda"
RESULTS = ("y", "dquery", "dkey", "dvalue", "dweight", "dbias")
TOKENS = 65536
# (context, heads, key size, value size)
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
CASE_COLUMNS = ("context", "heads", "keys", "values", "pass")
ATTENTION_SIZE = 64
ROUNDS = 9
BATCH_MS = 20.0


def main() -> None:
    options = parser_of(__doc__).parse_args()
    context, _, key_size, value_size = SHAPES[0]
    device = torch.device(DEVICE, 0)
    if not keyed.uses_kernels(device, torch.bfloat16, key_size, value_size, context, False):
        raise UserError("nothing to measure: this GPU does not run the kernels of keyed mixing")
    result = measured_by(options) | {"rows": []}
    for shape in SHAPES:
        result["rows"] += rows(*shape)
        save(result, table(result), options.output)
    print(table(result))


def inputs(context: int, heads: int, key_size: int, value_size: int) -> list[Tensor]:
    """query, key, value, weight, bias and dy; the first three as slices of one projection."""
    torch.manual_seed(0)
    batch = max(1, TOKENS // context)
    projection_sizes = [heads * key_size, heads * key_size, heads * value_size]
    shape = (batch, context, sum(projection_sizes))
    projected = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(heads, 1, context, context, device=DEVICE) * context**-0.5
    bias = torch.randn(heads, context, device=DEVICE)
    dy = torch.randn(batch, context, heads * value_size, device=DEVICE, dtype=torch.bfloat16)
    return [*projected.split(projection_sizes, dim=-1), weight, bias, dy]


def by_lag(tensors: list[Tensor]) -> list[Tensor]:
    """The same with lags (heads, 1, context) in place of the weight."""
    query, key, value, weight, bias = tensors
    return [query, key, value, weight[:, :, -1].contiguous(), bias]


def mixings(heads: int) -> dict[str, Callable]:
    """Calls with query, key, value, weight and bias."""
    decay = torch.tensor([0.0, 1 / 64, 1 / 256, 1 / 256], device=DEVICE).repeat(heads)[:heads]

    def lags(query, key, value, lags, bias):
        return keyed_conv(query, key, value, bias=bias, lags=lags, decay=decay, backend="cuda")

    def attention(query, key, value, weight, bias):
        query, key, value = (
            tensor.unflatten(-1, (-1, ATTENTION_SIZE)).transpose(1, 2)  # heads before tokens
            for tensor in (query, key, value)
        )
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
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


def rows(context: int, heads: int, key_size: int, value_size: int) -> list[dict]:
    # The compiler compiles a function for a few shapes only, then runs it as it is.
    torch.compiler.reset()
    calls = mixings(heads)
    *tensors, dy = inputs(context, heads, key_size, value_size)
    arguments = dict.fromkeys(calls, tensors)
    arguments["attention"] = inputs(context, heads, value_size, value_size)[:-1]
    arguments["flash"] = arguments["attention"]
    arguments["lags"] = by_lag(tensors)
    leaves = {name: [x.detach().requires_grad_() for x in arguments[name]] for name in calls}

    @torch.no_grad()
    def forward(name: str) -> Tensor:
        return calls[name](*arguments[name])

    def results(name: str) -> list[Tensor]:
        y = calls[name](*leaves[name])
        gradients = torch.autograd.grad(y, leaves[name], dy, allow_unused=True)
        return [y.detach(), *gradients]

    problem = difference(results("kernels"), results("plain"), RESULTS)
    if problem:
        raise UserError(f"context {context}: {problem}")

    measured = []
    for title, step in (("forward", forward), ("forward and backward", results)):
        timed = {name: lambda _, name=name, step=step: step(name) for name in calls}
        times = interleaved(timed, DEVICE, 1, ROUNDS, BATCH_MS)
        row = {
            "context": context,
            "heads": heads,
            "keys": key_size,
            "values": value_size,
            "pass": title,
            "times": times,
        }
        measured.append(row)
        print(*cells(row), flush=True)
    return measured


def cells(row: dict) -> list[str]:
    case = [str(row[column]) for column in CASE_COLUMNS]
    times = (time.get("ms") for time in row["times"].values())
    return case + ["-" if ms is None else f"{ms:.3f}" for ms in times]


def table(result: dict) -> str:
    head = [*CASE_COLUMNS, *(NAMES[name] for name in result["rows"][0]["times"])]
    caption = (
        f"{TOKENS:,} tokens, bf16; keys, values: the numbers of each in a head. {origin(result)}"
    )
    rows = markdown(head, [cells(row) for row in result["rows"]])
    return f"# Keyed mixing: milliseconds of one call\n\n{caption}\n\n{rows}\n"


if __name__ == "__main__":
    run_command(main)
