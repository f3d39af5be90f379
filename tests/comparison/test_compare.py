"""The comparison, its runs in real processes; and the share of token mixing, from real and made
profiles.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launching import run_python
from runs import read_losses

from mixer import MaskedMixerConfig, MaskedMixerForCausalLM, compare
from mixer.common.errors import UserError
from mixer.compare import main
from mixer.comparison.trace import token_mixing_share


@pytest.fixture
def forked_runs(monkeypatch):
    """The commands of the runs as they are, in processes that need not import first."""

    def run(command, stdout, stderr):
        assert command[0] == sys.executable
        return run_python(*command[1:], output=Path(stdout.name))

    monkeypatch.setattr(compare, "subprocess", SimpleNamespace(run=run, STDOUT=subprocess.STDOUT))


def test_backends_are_compared_by_steps_and_a_transformer_gets_its_time(
    write_config, tmp_path, forked_runs, capsys
):
    output = tmp_path / "compared"
    common = ["--config", write_config(), "--output", output, "--repeats", 1, "--timing-steps", 4]
    common = [*map(str, common), "checkpoint.save_last=false", "checkpoint.save_every=0"]
    main([*common, "--backends", "dense", "panels"])
    text, result = (
        (output / "report.md").read_text(),
        json.loads((output / "report.json").read_text()),
    )
    agree = "dense and panels agree: training losses apart by"
    assert agree in capsys.readouterr().out and agree in text
    dense, panels = (read_losses(output / f"runs/{name}") for name in ("dense", "panels"))
    assert list(dense) == list(range(1, 13))
    largest = max(abs(panels[step] / loss - 1) for step, loss in dense.items())
    assert result["gaps"][0]["largest"] == pytest.approx(largest, abs=1e-12)
    assert result["limit"]["median"] > 0 and "no mixing (limit)" in text
    for model in result["models"].values():
        assert 0 < model["token_mixing_share"] < 1
        assert model["tokens_per_second"]["lowest"] == model["tokens_per_second"]["highest"] > 0
        assert model["flops_per_token"]["executed"] > model["flops_per_token"]["useful"]
    for name in ("losses.png", "throughput.png", "gap.png", "dense.jsonl", "panels.jsonl"):
        assert (output / name).stat().st_size > 0

    llama = [*common, "--seconds", "0.5", "--backends", "llama:32x2"]
    with pytest.raises(UserError, match="exists already; choose another --output"):
        main(llama)
    main([*llama, "--resume"])
    result, metrics = (
        json.loads((output / "report.json").read_text()),
        output / "runs/llama-32x2/metrics.jsonl",
    )
    (model,) = result["models"].values()
    assert (
        model["steps"] == max(1, round(0.5 * model["tokens_per_second"]["median"] / (8 * 32)))
        and not result["gaps"]
    )
    shape = "llama:32x2: transformers' LlamaForCausalLM, hidden 32, 2 heads of 16, 2 layers, gated MLP of 64."
    assert 0 < model["token_mixing_share"] < 1 and shape in (output / "report.md").read_text()
    timing = output / "runs/llama-32x2-timing-1/metrics.jsonl"
    timed = timing.stat().st_mtime_ns
    metrics.write_text("")  # as a run leaves it that is killed before its first line
    main([*llama, "--resume"])
    assert len(read_losses(metrics.parent)) == model["steps"] and timing.stat().st_mtime_ns == timed
    with pytest.raises(
        UserError,
        match=r"--seconds 1e-06 gives llama:32x2 1 steps; allowed: optim.warmup_steps = 3 or more",
    ):
        main([*llama, "--resume", "--seconds", "1e-6"])

    written = metrics.stat().st_mtime_ns
    command = ["-m", "mixer.compare", *llama, "--resume"]  # what is complete is not repeated
    done = run_python(*command, output=tmp_path / "printed")
    assert done.returncode == 0 and str(output / "report.md") in done.stdout, done.stdout
    assert metrics.stat().st_mtime_ns == written


@pytest.mark.parametrize(
    "backends, message",
    [
        (
            ["dense", "llama:30x4"],
            "num_attention_heads is 4; allowed: 1 or more, that divide hidden_size 30",
        ),
        (["dens"], "--backends dens; allowed: auto, cuda, panels, dense, llama"),
        (["dense", "dense"], "one is named twice"),
        (["dense", "train.stepz=3"], "unknown key train.stepz"),
        (["dense", "--seconds", "-1"], "--seconds is -1; allowed: above 0"),
        (["dense", "--seconds", "nan"], "--seconds is nan; allowed: above 0"),
    ],
)
def test_mistakes_show_before_anything_runs(write_config, tmp_path, backends, message):
    with pytest.raises(UserError, match=message):
        main(
            [
                "--config",
                str(write_config()),
                "--output",
                str(tmp_path / "out"),
                "--backends",
                *backends,
            ]
        )
    assert not (tmp_path / "out").exists()


def test_runs_that_a_comparison_did_not_make_are_never_replaced(write_config, tmp_path):
    output = tmp_path / "mine"
    weights = output / "runs" / "panels" / "step-9" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"weeks of training")
    command = [
        "--config",
        str(write_config()),
        "--output",
        str(output),
        "--resume",
        "--backends",
        "dense",
        "panels",
    ]
    with pytest.raises(
        UserError,
        match="--resume: .*mine is not a comparison's, which has comparison-logs in it; choose another",
    ):
        main(command)
    (
        output / "comparison-logs"
    ).mkdir()  # it was begun, and a run of one's own came to have an entrant's name
    with pytest.raises(
        UserError,
        match="runs/panels is not a run of this comparison, .*; move it, or choose another --output",
    ):
        main(command)
    assert (
        weights.read_bytes() == b"weeks of training"
        and not (output / "runs" / "dense-timing-1").exists()
    )


def test_a_run_that_fails_ends_the_comparison_with_its_own_words(
    write_config, tmp_path, forked_runs
):
    keys = ["data.source=text", "data.path=none.txt", f"data.directory={tmp_path / 'data'}"]
    with pytest.raises(
        UserError, match=r"dense-timing-1 ended with status 2(.|\n)*data.path 'none.txt' is no file"
    ):
        main(
            [
                "--config",
                str(write_config()),
                "--output",
                str(tmp_path / "out"),
                "--backends",
                "dense",
                *keys,
            ]
        )


def test_a_run_that_a_signal_stopped_is_not_taken_for_a_whole_one(
    write_config, tmp_path, launch, monkeypatch
):
    metrics = tmp_path / "out/runs/dense-timing-1/metrics.jsonl"

    def run(command, stdout, stderr):  # stops it in the middle
        launch(*command[2:]).until(
            lambda: metrics.exists() and '"step": 40,' in metrics.read_text()
        ).stop()
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(compare, "subprocess", SimpleNamespace(run=run, STDOUT=subprocess.STDOUT))
    command = [
        "--config",
        str(write_config()),
        "--output",
        str(tmp_path / "out"),
        "--timing-steps",
        "40",
    ]
    with pytest.raises(
        UserError,
        match="dense-timing-1 was stopped before its last step .--resume does it again.; all of",
    ):
        main([*command, "--backends", "dense"])


class Slow(torch.autograd.Function):
    """The identity, taking 20 ms forward and 40 ms backward."""

    @staticmethod
    def forward(ctx, x):
        time.sleep(0.02)
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        time.sleep(0.04)
        return dy.clone()


@pytest.mark.parametrize("backend", ["panels", "dense"])
def test_the_share_of_token_mixing_has_its_backward_pass_and_nothing_of_its_neighbours(
    tmp_path, monkeypatch, backend
):
    shape = {
        "vocab_size": 50,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "max_position_embeddings": 8,
    }
    model = MaskedMixerForCausalLM(MaskedMixerConfig(**shape, mixing_backend=backend))

    def share() -> float:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(2):
                model(torch.zeros(2, 8, dtype=torch.int64)).logits.sum().backward()
        profile.export_chrome_trace(str(tmp_path / "trace.json"))
        return token_mixing_share(tmp_path / "trace.json")

    share()  # first calls are slow
    with monkeypatch.context() as patch:
        for layer in model.model.layers:
            patch.setattr(
                layer.mixing.conv, "forward", lambda x, residual, *_: Slow.apply(x) + residual
            )
        assert share() > 0.8
    for layer in model.model.layers:  # what stands before, in and after the mixing
        for module in (layer.mixing_norm, layer.mlp_norm, layer.mlp):
            module.register_forward_hook(lambda module, inputs, output: Slow.apply(output))
    assert share() < 0.2


def test_on_a_gpu_the_share_is_that_of_kernels_by_their_launches(tmp_path):
    def event(category, name, start, duration, thread=1, **arguments):
        return {
            "ph": "X",
            "cat": category,
            "name": name,
            "ts": start,
            "dur": duration,
            "tid": thread,
            "args": arguments,
        }

    def launch(start, thread, kernel_start, duration, number):
        yield event("cuda_runtime", "cudaLaunchKernel", start, 1, thread, correlation=number)
        yield event("kernel", "k", kernel_start, duration, 7, correlation=number)

    number = "Sequence number"
    events = [
        event("user_annotation", "token_mixing", 10, 10),
        event("cpu_op", "aten::bmm", 11, 5, **{number: 4, "Fwd thread id": 0}),
        *launch(12, 1, 100, 30, 1),
        event("cpu_op", "aten::gelu", 25, 5, **{number: 5, "Fwd thread id": 0}),
        *launch(26, 1, 130, 20, 2),
        event(
            "cpu_op",
            "autograd::engine::evaluate_function: GeluBackward0",
            40,
            9,
            2,
            **{number: 5, "Fwd thread id": 1},
        ),
        *launch(41, 2, 150, 40, 3),
        event(
            "cpu_op",
            "autograd::engine::evaluate_function: BmmBackward0",
            50,
            9,
            2,
            **{number: 4, "Fwd thread id": 1},
        ),
        *launch(51, 2, 190, 50, 4),
        *launch(52, 2, 240, 10, 5),
        *launch(70, 1, 250, 50, 6),  # the optimizer's
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert token_mixing_share(path) == pytest.approx((30 + 50 + 10) / 200)
    compiled = [event for event in events if event["name"] != "token_mixing"]
    path.write_text(json.dumps({"traceEvents": compiled}))
    assert token_mixing_share(path) is None  # nothing tells what is token mixing
    compiled += [
        event("cpu_op", "mixer::triangular_conv", 11, 5),
        event("cpu_op", "mixer::triangular_conv_grad_input", 50, 9, 2),
    ]
    path.write_text(json.dumps({"traceEvents": compiled}))
    assert token_mixing_share(path) == pytest.approx((30 + 50 + 10) / 200)
