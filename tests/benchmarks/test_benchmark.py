"""The benchmark of token mixing: run as a user runs it, at toy size on a CPU, and told apart from a
wrong backend.
"""

import inspect
import json
import math
import sys
from pathlib import Path

import plain_kernels
import pytest
import torch
from launching import ROOT, run_python

from mixer.ops import cuda

SCRIPT = str(ROOT / "benchmarks" / "token_mixing.py")
TOY = (
    "--device cpu --channels 32 --batch-tokens 256 --rounds 2 --batch-ms 0.2 --commit abc123"
).split()


@pytest.fixture
def benchmark(monkeypatch):
    """The benchmark's modules, imported as the script imports them."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import token_mixing

    return token_mixing


def measure(benchmark, monkeypatch, output: Path, *options: str) -> tuple[dict, str]:
    arguments = [*TOY, "--tokens", "48", "--output", str(output), *options]
    monkeypatch.setattr(sys, "argv", ["token_mixing.py", *arguments])
    benchmark.main()
    return results(output)


def results(output: Path) -> tuple[dict, str]:
    result = json.loads(output.with_suffix(".json").read_text())
    return result, output.with_suffix(".md").read_text()


def row(case: dict, name: str) -> dict:
    return next(row for row in case["variants"] if row["name"] == name)


def forward_line(text: str) -> list[str]:
    """Cells of the first line of numbers under the forward's title."""
    lines = text.split("## Forward, weight packed")[1].splitlines()
    line = next(line for line in lines if line.startswith("| 48 "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_measures_and_draws_without_matplotlib_but_for_the_picture(tmp_path):
    output = tmp_path / "results" / "toy"
    program = tmp_path / "program.py"
    program.write_text(
        "import sys; sys.modules['matplotlib'] = None; sys.path.insert(0, 'benchmarks'); import "
        "token_mixing as t; t.main()"
    )
    command = [program, *TOY, "--suite", "both", "--tokens", "48,128", "--output", output]
    run_python(*command, output=tmp_path / "printed")
    result, text = results(output)
    assert result["hardware"]["device"] == "cpu"
    cases = {}
    for case in result["cases"]:
        cases[case["suite"], case["operation"], case["tokens"]] = case
    operations = "forward grad_input grad_weight fused pack autograd".split()
    main = {("main", name, tokens) for name in operations for tokens in (48, 128)}
    assert main == {key for key in cases if key[0] == "main"}
    assert ("sweep", "autograd", 128) in cases
    for case in result["cases"]:
        assert case["floor_ms"] > 0
        for variant in case["variants"]:
            assert variant["failure"] is None and variant["error"] < 5e-3, (case, variant)
            assert variant["ms"] > 0
    families = {variant["family"] for variant in cases["main", "forward", 48]["variants"]}
    assert families == {"ours", "dense", "Conv1d", "panels"}
    names = {variant["name"] for variant in cases["main", "autograd", 48]["variants"]}
    assert {"ours", "ours, by lag", "Conv1d, compiled", "matmul, compiled"} < names
    assert "Without a number" not in text and "commit abc123" in text
    draws_from_json_alone(output, tmp_path)


def draws_from_json_alone(output: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere.json"
    output.with_suffix(".json").rename(moved)
    run_python(SCRIPT, "--plot", moved, output=tmp_path / "drawn", directory=tmp_path)
    assert (tmp_path / "elsewhere_speedup.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "elsewhere.md").read_text() == output.with_suffix(".md").read_text()


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda right, x, *rest: right(x, *rest) * 1.01, "relative RMSE 0.01"),
        (lambda right, x, *rest: torch.empty_like(x), "relative RMSE nan"),
        (lambda right, x, *rest: right(x, *rest)[:, :-1], "shape"),
    ],
    ids=["inaccurate", "unwritten", "short"],
)
def test_no_speedup_for_a_wrong_result(benchmark, monkeypatch, tmp_path, wrong, reason):
    right = plain_kernels.forward
    monkeypatch.setattr(plain_kernels, "forward", lambda *arguments: wrong(right, *arguments))
    result, text = measure(
        benchmark, monkeypatch, tmp_path / "wrong", "--operations", "forward,grad_input"
    )
    ours = row(result["cases"][0], "ours")
    assert reason in ours["failure"] and "ms" not in ours
    cells = forward_line(text)
    assert cells[1] == "failed" and cells[-4:] == ["-"] * 4
    assert f"forward, 48 tokens: ours: {ours['failure']}" in text
    assert row(result["cases"][1], "ours")["ms"] > 0  # the gradient is right and has its number


def test_a_gradient_above_the_diagonal_fails(benchmark, monkeypatch, tmp_path):
    right = plain_kernels.grad_weight

    def leaking(*arguments):
        dweight, dbias = right(*arguments)
        dweight[..., 0, -1] = 1e-30
        return dweight, dbias

    monkeypatch.setattr(plain_kernels, "grad_weight", leaking)
    result, _ = measure(benchmark, monkeypatch, tmp_path / "leak", "--operations", "grad_weight")
    assert row(result["cases"][0], "ours")["failure"] == "wrong: not zero above the diagonal"


@pytest.mark.parametrize("heads", [1, 4])
def test_every_alternative_is_right_with_heads(benchmark, heads):
    shape = benchmark.Shape(40, 32, 120, heads=heads, dtype="float32")
    torch.manual_seed(0)
    with plain_kernels.replacing_the_kernels():
        data = benchmark.Data(shape, "cpu")
        for operation in benchmark.SWEEP_OPERATIONS:
            _, rows = benchmark.checked(operation, data, compiled=False)
            for row in rows:
                assert row["failure"] is None and row["error"] < 1e-5, (operation, row)


def test_what_stands_in_for_the_kernels_is_called_as_they_are():
    for name in ("pack", "forward"):
        stand_in, kernel = (getattr(module, name) for module in (plain_kernels, cuda))
        assert inspect.signature(stand_in) == inspect.signature(kernel)


CACHES = ("cached", "cached, static", "uncached")
GENERATED = {
    "": [*(("mixer", cache) for cache in CACHES), ("Llama", "cached")],
    "--recurrent": [
        *((name, "cached, static") for name in ("mixer", "rows", "columns")),
        *(("Llama", cache) for cache in ("cached", "cached, static")),
    ],
}


@pytest.mark.parametrize("option", GENERATED)
def test_generation_is_measured_against_other_caches_and_a_llama(tmp_path, option):
    sizes = "--device cpu --hidden 32 --layers 2 --vocabulary 100 --context 64 --prompt 40 --new 4"
    command = [ROOT / "benchmarks" / "generation.py", *sizes.split(), "--output", tmp_path / "toy"]
    command += ["--batches", "1,2", "--repeats", 1, "--commit", "abc123", *option.split()]
    run_python(*command, output=tmp_path / "printed")
    result, text = results(tmp_path / "toy")
    measured = [(row["model"], row["cache"], row["batch"]) for row in result["generate"]]
    assert measured == [
        (model, cache, batch) for batch in (1, 2) for model, cache in GENERATED[option]
    ]
    assert all(math.isfinite(row["tokens_per_second"]) for row in result["generate"])
    assert "commit abc123" in text


def test_a_training_step_is_timed(tmp_path):
    small = "--device cpu --batch-tokens 96 --hidden 32 --layers 2 --vocabulary 100 --rounds 2"
    output = tmp_path / "results" / "step"
    options = [*small.split(), "--batch-ms", 1, "--commit", "abc123", "--tokens", "32,48"]
    options += ["--forms", "eager,reference", "--output", output]
    script = ROOT / "benchmarks" / "training_step.py"
    run_python(script, *options, output=tmp_path / "printed", directory=tmp_path)
    result, text = results(output)
    assert [(case["tokens"], case["batch"]) for case in result["cases"]] == [(32, 3), (48, 2)]
    for case in result["cases"]:
        assert list(case["forms"]) == ["eager", "reference"]
        for row in case["forms"].values():
            assert row["ms"] > 0 and row["losses"][2] < row["losses"][0]
    assert "| eager: ours, eager |" in text


@pytest.mark.slow
def test_what_several_processes_do_together_is_measured_once(tmp_path):
    script = ROOT / "benchmarks" / "several_gpus.py"
    output = tmp_path / "several"
    options = ["--processes", "1,2", "--repeats", 1, "--kills", 1, "--output", output]
    options += ["--only", "start", "fsdp", "muon", "kill", "resume", "large"]
    options += ["--commit", "abc123"]
    small = ["model.hidden_size=16", "model.num_hidden_layers=1", "train.mixed_precision=no"]
    small += ["model.max_position_embeddings=32", "data.max_documents=20", "data.vocab_size=400"]
    small += ["data.validation_fraction=0.5"]
    command = [script, *options, *small]
    run_python(*command, output=tmp_path / "printed", patience=600)
    result, text = results(output)
    start, ddp, _, fsdp, _, muon, kill, resume, large = result["rows"].values()
    assert start["seconds to the first loss"] > 0
    assert ddp["tokens_per_second"] > 0 < fsdp["tokens_per_second"] and ddp["tokens"] == 32 * 32
    assert kill["the same bits"] and kill["left alive"] == [0]
    assert muon["losses"] == 200 and muon["most apart (relative)"] < 1e-4
    assert large["the same bits"] and large["losses after the kill"] > 0
    assert large["alone, most apart (relative)"] < 1e-4
    assert resume["losses"] == 10 and resume["most apart (relative)"] < 1e-5
    assert "| hidden size 2048, FSDP | 1,024 | 2 |" in text and "commit abc123" in text
    again = run_python(*command, output=tmp_path / "again")
    assert again.strip() == text.strip()
