"""Tables of benchmarks/training_step.py: the forms side by side, and where a step's time goes by
kind of kernel.
"""

import re

import torch
from saving import origin
from training_step_models import FORMS

WITHOUT_MIXING = ("without", "limit")  # models: their products are the others' without token mixing
BASELINES = {"matmul": "dense matmul", "reference": "reference", "limit": "limit"}
KERNELS_SHOWN = 30

# Kinds of kernels, by the first pattern found in a kernel's name.
KINDS = {
    "triangular convolution": (
        r"(?<![a-z_])(product|partial|finish|pack|shift|grad_bias|grad_weight)_kernel"
    ),
    "products of the library": r"gemm|nvjet|cutlass|cublas|xmma|cudnn|conv|splitK|::mm\b|addmm|bmm",
    # Of what is compiled, the optimizers alone have a lerp, an unbind, sums along diagonals and a
    # stack of matrices.
    "optimizer": (
        r"[aA]dam|triton.*(lerp|unbind|arange_(constant_pad_nd_)?le_(pow_)?rsub|to_copy_stack)"
    ),
    "clipping": r"multi_tensor|LpNorm|lpnorm|foreach",
    "compiled reductions": r"triton_(red|per)|cpp_fused",
    "compiled pointwise": r"triton_poi|triton_",
    "embedding": r"embedding|[Rr]adix|indexing|krn_partial|sum_and_scatter|compute_grad_weight",
    "copies and fills": r"[mM]emcpy|[mM]emset|copy|fill|Fill",
    "eager LayerNorm": r"layer_norm|LayerNorm|GammaBeta",
    "eager softmax and loss": r"[sS]oft[mM]ax|nll_loss",
    "eager sums": r"reduce_kernel|aten::sum",
    "eager pointwise": r"elementwise|aten::",
}


def profiled(step, device: str) -> dict:
    """Milliseconds of one step by kind of kernel, and the kernels that take longest with how often
    they ran.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        if device == "cuda":
            torch.cuda.synchronize()
    kind_of_device = getattr(torch.autograd.DeviceType, device.upper())
    ran = [
        e
        for e in profile.key_averages()
        if e.device_type == kind_of_device and not e.is_user_annotation
    ]
    times = [
        (
            e.key,
            (e.self_device_time_total if device == "cuda" else e.self_cpu_time_total) / 1e3,
            e.count,
        )
        for e in ran
    ]
    times = sorted((row for row in times if row[1] > 0), key=lambda row: -row[1])
    kinds = dict.fromkeys([*KINDS, "other"], 0.0)
    for name, ms, _ in times:
        kinds[kind(name)] += ms
    return {
        "kinds": {name: ms for name, ms in kinds.items() if ms},
        "kernels": times[:KERNELS_SHOWN],
    }


def kind(kernel: str) -> str:
    return next((name for name, pattern in KINDS.items() if re.search(pattern, kernel)), "other")


def table(result: dict) -> str:
    """Everything as Markdown."""
    parts = [f"# A training step on {result['hardware'].get('device')}", introduction(result)]
    for case in result["cases"]:
        parts += [
            f"## {case['batch']} x {case['tokens']} tokens",
            forms(case, result["ceiling_tflops"]),
        ]
    parts += [kinds(case) for case in result["cases"]] + [longest(case) for case in result["cases"]]
    if result["left_out"]:
        parts += ["Left out, since the time was up: " + "; ".join(result["left_out"]) + "."]
    parts += [f"Measured on {origin(result)}."]
    return "\n\n".join(part for part in parts if part) + "\n"


def introduction(result: dict) -> str:
    size = f"{result['ceiling_size']}^3"
    return (
        "Forward, backward, clipping and the optimizer (AdamW unless said) on random tokens, bf16 "
        f"autocast, {result['batch_tokens']:,} tokens a step, vocabulary {result['vocabulary']:,}, "
        f"hidden size {result['hidden']:,}, {result['layers']} layers; medians of "
        f"{result['rounds']} interleaved rounds. Ratios are of tokens a second. The limit is the "
        "clean model with token mixing removed, compiled. Useful operations are the products that "
        "the model is defined by, of a triangle those on and below the diagonal; their share is of "
        f"the library's bf16 product of {size}, {result['ceiling_tflops']:.4g} TFLOP/s."
    )


def forms(case: dict, ceiling_tflops: float) -> str:
    head = [
        "form",
        "ms",
        "spread",
        "tokens/s",
        *(f"vs {text}" for text in BASELINES.values()),
        "share",
        "peak GB",
        "first step, s",
    ]
    rows = []
    for name, row in case["forms"].items():
        if "failure" in row:
            rows.append(
                [
                    f"{name}: {FORMS[name].what}",
                    f"failed: {row['failure']}",
                    *["-"] * (len(head) - 2),
                ]
            )
            continue
        mixing = 0 if FORMS[name].model in WITHOUT_MIXING else case["useful_flops"]["token_mixing"]
        flops = case["useful_flops"]["useful"] - case["useful_flops"]["token_mixing"] + mixing
        rows.append(
            [
                f"{name}: {FORMS[name].what}",
                f"{row['ms']:.1f}",
                f"{row['low']:.1f}-{row['high']:.1f}",
            ]
            + [f"{row['tokens_per_second']:,.0f}", *(ratio(case, row, base) for base in BASELINES)]
            + [
                f"{1e-9 * flops / row['ms'] / ceiling_tflops:.1%}",
                f"{row['peak_gb']:.1f}" if "peak_gb" in row else "-",
            ]
            + [f"{row['first_step_seconds']:.0f}"]
        )
    return markdown(head, rows)


def ratio(case: dict, row: dict, base: str) -> str:
    other = case["forms"].get(base, {})
    return f"{other['ms'] / row['ms']:.3f}" if "ms" in other else "-"


def kinds(case: dict) -> str:
    """Milliseconds of a profiled step: a row for each kind of kernel, a column for each form."""
    columns = {
        name: row["profile"]["kinds"] for name, row in case["forms"].items() if "profile" in row
    }
    if not columns:
        return ""
    found = [
        name for name in [*KINDS, "other"] if any(name in column for column in columns.values())
    ]
    rows = [
        [name, *(f"{column.get(name, 0):.2f}" for column in columns.values())] for name in found
    ]
    rows.append(["all", *(f"{sum(column.values()):.2f}" for column in columns.values())])
    title = (
        f"## Where the time goes, {case['batch']} x {case['tokens']} tokens (ms of one step, "
        "profiled)"
    )
    return title + "\n\n" + markdown(["kind of kernel", *columns], rows)


def longest(case: dict) -> str:
    parts = []
    for name, row in case["forms"].items():
        if "profile" in row:
            rows = [
                [f"`{kernel[:110]}`".replace("|", "/"), f"{ms:.3f}", str(n)]
                for kernel, ms, n in row["profile"]["kernels"]
            ]
            parts += [
                f"### {name}, {case['tokens']} tokens",
                markdown(["kernel", "ms", "calls"], rows),
            ]
    return "\n\n".join(parts)


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
