"""Measured times decide what backend `auto` takes: the table's rules on made-up times, without a
GPU.
"""

import dataclasses
import json
import logging
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mixer.common.errors import UserError
from mixer.ops import build, choice, cuda, measure, timings, tune
from mixer.ops.timings import Case, Row

CASE = Case("float16", False, 70, tokens=512, channels=1024, heads=1, taps=1)
BUILD = "sm70-0123456789abcdef-fedcba9876543210"


def row(cuda_ms: float, panels_ms: float, **changes) -> Row:
    return Row(
        **vars(dataclasses.replace(CASE, **changes)), batch=64, cuda_ms=cuda_ms, panels_ms=panels_ms
    )


@pytest.fixture
def v100(monkeypatch, tmp_path):
    """A V100 whose kernels lie in a cache of this test's own; `.build` may be changed."""
    state = SimpleNamespace(build=BUILD)
    monkeypatch.setenv("MIXER_CACHE", str(tmp_path))
    monkeypatch.setattr(choice, "unavailable_reason", lambda x=None: None)
    monkeypatch.setattr(cuda, "device_facts", lambda index: (70, 80))

    def kernels_capability(index, dtype, tf32, channels, heads, taps):
        return 70 if dtype == torch.float16 else 0

    monkeypatch.setattr(choice, "kernels_capability", kernels_capability)

    def library(index):
        return SimpleNamespace(_name=str(build.cache_path() / state.build / build.LIBRARY))

    monkeypatch.setattr(cuda, "kernels", library)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100-SXM2-32GB")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    forget()
    yield state
    forget()


def forget() -> None:
    """What a new process would not know."""
    choice.slow_reason_for.cache_clear()
    timings.read.cache_clear()
    choice.warn_once.cache_clear()


def auto(
    tokens: int,
    channels: int = 1024,
    dtype: torch.dtype = torch.float16,
    heads: int = 1,
    taps: int = 1,
) -> str:
    x = SimpleNamespace(
        dtype=dtype, shape=(2, tokens, channels), device=SimpleNamespace(index=0), is_cuda=True
    )
    return choice.resolve_backend("auto", x, heads, taps)


def write(rows: list[Row]) -> Path:
    build.cache_directory()
    path = choice.table_path(0)
    timings.write(path, rows, {"device": "Tesla V100-SXM2-32GB"})
    forget()
    return path


def test_nearest_measured_case_decides(v100):
    write(
        [row(2.0, 1.0, tokens=128), row(1.0, 2.0, tokens=1024), row(9.0, 1.0, tokens=1024, taps=3)]
    )
    assert [auto(tokens) for tokens in (16, 128, 300, 400, 1024, 8192)] == ["panels"] * 3 + [
        "cuda"
    ] * 3
    # 2 is nearer to 3 than to 1
    assert auto(1024, taps=3) == "panels" and auto(1024, taps=2) == "panels"
    assert auto(1024, channels=256) == "cuda" and auto(1024, heads=4) == "cuda"


def test_a_type_that_was_not_measured_keeps_the_rule(v100):
    write([row(1.0, 2.0)])
    assert auto(512) == "cuda"
    assert auto(512, dtype=torch.float32) == "panels"


def test_without_a_table_nothing_is_claimed_of_a_v100(v100, caplog):
    with caplog.at_level(logging.WARNING):
        assert auto(512) == "panels"
    assert "`python -m mixer.ops.tune` does" in caplog.text


def test_auto_names_the_times_it_goes_by(v100, caplog):
    write([row(2.0, 1.0)])
    with caplog.at_level(logging.WARNING):
        auto(512)
    assert (
        "64 x 512 tokens, 1024 channels, 1 heads, kernel size 1: cuda 2.000 ms, panels 1.000 ms"
        in caplog.text
    )


def test_times_of_other_kernels_are_not_used(v100):
    write([row(1.0, 2.0)])
    assert auto(512) == "cuda"
    v100.build = "sm70-another0source00-fedcba9876543210"
    forget()
    assert auto(512) == "panels"


def test_times_of_another_gpu_are_not_used(v100, monkeypatch):
    write([row(1.0, 2.0)])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    forget()
    assert auto(512) == "panels"


GOOD = dataclasses.asdict(row(1.0, 2.0))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"rows": [1]}',
        json.dumps({"rows": [GOOD | {"cuda_ms": "fast"}]}),
        json.dumps({"rows": [GOOD | {"panels_ms": float("nan")}]}),
        json.dumps({"rows": [GOOD | {"tokens": 0}]}),
        json.dumps({"rows": [GOOD | {"more": 1}]}),
        json.dumps({"rows": [{name: GOOD[name] for name in GOOD if name != "taps"}]}),
    ],
)
def test_a_table_that_cannot_be_read_is_ignored_with_one_warning(v100, text, caplog):
    path = write([])
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert auto(512) == auto(513) == "panels"
    warnings = [record.message for record in caplog.records if "cannot be read" in record.message]
    assert (
        len(warnings) == 1
        and str(path) in warnings[0]
        and "python -m mixer.ops.tune" in warnings[0]
    )


def test_the_command_measures_prints_and_writes(v100, monkeypatch, capsys):
    def made_up(case, dtype, device):
        ms = 1.0 if case.tokens >= 512 else 3.0
        return Row(**vars(case), batch=1, cuda_ms=ms, panels_ms=2.0, dense_ms=1.5)

    monkeypatch.setattr(tune, "measure", made_up)
    tune.main([])
    forget()
    printed = capsys.readouterr().out.splitlines()
    path = choice.table_path(0)
    assert printed[-1] == f"written to {path}: backend 'auto' goes by it from now on"
    # a heading, fp16 and fp32, and where it was written
    assert len(printed) == 2 + 2 * len(tune.SHAPES)
    assert len({len(text) for text in printed[:-1]}) == 1  # columns stand below their names
    assert (
        path.parent == build.cache_path()
        and "tesla-v100-sxm2-32gb" in path.name
        and BUILD in path.name
    )
    assert auto(512) == "cuda" and auto(256) == "panels"
    assert json.loads(path.read_text())["kernels"] == BUILD


def test_wrong_kernels_are_not_timed(monkeypatch):
    """Measuring itself, with dense in place of the kernels and plain calls in place of a GPU's
    clock.
    """
    monkeypatch.setattr(measure, "interleaved", lambda steps: {name: 1.0 for name in steps})
    monkeypatch.setattr(tune, "BATCH_TOKENS", 64)
    small, conv = (
        Case("float32", False, 0, tokens=32, channels=8, heads=2, taps=3),
        measure.triangular_conv,
    )
    monkeypatch.setattr(
        measure,
        "triangular_conv",
        lambda *tensors, backend: conv(*tensors, backend=backend.replace("cuda", "dense")),
    )
    assert tune.measure(small, torch.float32, torch.device("cpu")).batch == 2
    monkeypatch.setattr(
        measure,
        "triangular_conv",
        lambda *tensors, backend: (
            conv(*tensors, backend="panels") * (1.1 if backend == "cuda" else 1)
        ),
    )
    with pytest.raises(
        UserError,
        match="cuda cannot be timed: its results are wrong on this GPU: y is "
        ".*mixing_backend=panels.*test_ops_cuda",
    ):
        tune.measure(small, torch.float32, torch.device("cpu"))


def test_a_backend_that_is_far_behind_is_not_timed_for_long(monkeypatch):
    times, calls = {"cuda": 1.0, "panels": 2.0, "dense": 50.0}, Counter()

    def milliseconds(name, count):
        calls[name] += count
        return times[name]

    monkeypatch.setattr(measure, "milliseconds", milliseconds)
    assert measure.interleaved({name: name for name in times}) == times
    assert calls["cuda"] > 2 * calls["panels"] > 10 * calls["dense"] > 0


def test_without_a_gpu_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="nothing to measure: torch sees no CUDA device"):
        tune.main([])
