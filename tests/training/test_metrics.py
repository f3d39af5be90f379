"""What a run says of itself: its lines, what a resumed run still knows of them, and no waiting for
the device between logging steps.
"""

import json
import re
import time
from types import SimpleNamespace

import pytest
import torch
from runs import read_lines

from mixer.training import metrics as module
from mixer.training.config import RunConfig
from mixer.training.metrics import Metrics

WANTED = {"step", "tokens", "loss", "lr", "grad_norm", "skipped_steps", "tokens_per_second"}
WANTED |= {"useful_tflops", "seconds", "data_wait_share", "peak_memory_gb"}


def slow_evaluation() -> None:
    """Each evaluation takes a thousand seconds, by the timer's clock."""
    from mixer.objectives.language import Language

    real, clock, passed = Language.validate, time.perf_counter, [0]
    module.time = SimpleNamespace(perf_counter=lambda: clock() + passed[0])

    def validate(*arguments):
        passed[0] += 1000
        return real(*arguments)

    Language.validate = validate


def test_lines_hold_what_they_should_without_the_time_of_evaluation(write_config, launch, tmp_path):
    changes = ["train.batch_size=4", "train.eval_every=0"]
    config = write_config(logging={"log_every": 4})
    launch("--config", config, *changes, processes=2, before=slow_evaluation).succeed()
    lines = [line for line in read_lines(tmp_path / "runs/small") if "loss" in line]
    assert [line["step"] for line in lines] == [4, 8, 12]
    for line in lines:
        assert set(line) == WANTED
        assert line["tokens"] == line["step"] * 8 * 32
        assert line["tokens_per_second"] == pytest.approx(4 * 8 * 32 / line["seconds"])
        assert line["seconds"] < 1000 and 0 <= line["data_wait_share"] <= 1
        assert 0.1 < line["peak_memory_gb"] < 8  # torch alone takes some hundred megabytes


def test_a_resumed_run_knows_the_validation_losses_before_it(tmp_path, capsys):
    """Or `best` would point to the best checkpoint since the resume, not to the best of all that
    have scored as many tokens.
    """
    size = {"validation_tokens": 64}
    lines = [{"step": 2, "validation_loss": 1.5, "validation_tokens": 8}]
    lines += [{"step": 4, "validation_loss": 2.5} | size, {"step": 4, "loss": 3.0}]
    lines += [{"step": 8, "validation_loss": 2.0} | size, {"step": 9, "loss": 2.4}]
    texts = [json.dumps(line).encode() for line in lines]
    texts[1:1] = [b"\xff\xfe", b"17"]  # damage that must not stop the run
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*texts, b'{"step": 9, "lo']))
    run = RunConfig(name=tmp_path.name, output_dir=str(tmp_path.parent))
    metrics = Metrics(run, 8, False, None)
    metrics.write({"step": 12, "validation_loss": 2.2} | size)
    metrics.close()
    assert metrics.validation_losses == {4: 2.5, 8: 2.0, 12: 2.2}
    kept = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert kept == [*lines[:4], {"step": 12, "validation_loss": 2.2} | size]
    assert "left out 2 lines," in capsys.readouterr().out


def count_reads() -> None:
    """Notes at which steps a tensor's value is brought to the host, which on a GPU waits for all
    work queued there.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    from mixer.training import loop

    steps: list[int] = []
    real_rate, real_close = loop.learning_rate, loop.Stop.close

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            if steps and function is torch.ops.aten._local_scalar_dense.default:
                read.append(steps[-1])
            return function(*arguments, **(options or {}))

    read: list[int] = []
    mode = Reads()

    def rate(config, step, count):
        steps or mode.__enter__()
        steps.append(step + 1)
        return real_rate(config, step, count)

    def close(stop):
        mode.__exit__(None, None, None)
        print("READ AT", json.dumps(sorted(set(read))))
        real_close(stop)

    loop.learning_rate, loop.Stop.close = rate, close


@pytest.mark.parametrize("packed", [True, False])
def test_between_logging_steps_nothing_is_read_from_the_device(
    write_config, small_run, launch, tmp_path, packed
):
    data = small_run["data"] | {"directory": str(tmp_path / "data"), "packed": packed}
    config = write_config(data=data, logging={"log_every": 4}, checkpoint={"save_every": 0})
    output = launch("--config", config, "train.eval_every=0", before=count_reads).succeed()
    assert json.loads(re.search(r"READ AT (\[.*\])", output).group(1)) == [4, 8, 12]
