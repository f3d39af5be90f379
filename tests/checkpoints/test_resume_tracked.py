"""A run that is stopped and resumed is one run of wandb or TensorBoard."""

import struct
from collections import Counter
from pathlib import Path

import psutil
import pytest
from runs import read_lines

OFFLINE = {"WANDB_MODE": "offline"}


def test_a_run_goes_on_without_wandbs_own_process_and_a_resume_is_the_same_run_there(
    write_config, launch, tmp_path
):
    """A signal to all processes of a job ends wandb's process too."""
    train = {"steps": 100_000, "batch_size": 8, "eval_every": 0, "eval_samples": 8}
    command = ("--config", write_config(train=train), "checkpoint.save_every=0")
    ranks = launch(*command, "logging.tracker=wandb", environment=OFFLINE)
    run = tmp_path / "runs/small"
    ranks.until(lambda: (run / "metrics.jsonl").exists() and len(read_lines(run)) > 5)
    for child in psutil.Process(ranks.ranks[0].pid).children(recursive=True):
        child.kill()
    output = ranks.until(lambda: "wandb has failed, the run continues" in ranks.output).stop()
    assert "stopped by a signal" in output and "Traceback" not in output
    longer = ("logging.tracker=wandb", f"train.steps={read_lines(run)[-1]['step'] + 1}")
    launch(*command, *longer, environment=OFFLINE).succeed()
    files = sorted((run / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2 and len({file.name for file in files}) == 1  # of one id
    # The second has the lines that the first lost: as many as there are, each with its loss.
    assert files[1].read_bytes().count(b"grad_norm") >= len(read_lines(run)) // 2


def test_tensorboard_has_every_line_of_a_resumed_run_once(write_config, launch, tmp_path):
    pytest.importorskip("tensorboardX")
    config = write_config(logging={"log_every": 1, "tracker": "tensorboard"})
    first = launch("--config", config, "checkpoint.save_every=5")
    first.until((tmp_path / "runs/small/step-5").exists).kill()
    launch("--config", config).succeed()
    run = tmp_path / "runs/small"
    lines = [(line["step"], key, line[key]) for line in read_lines(run) for key in line]
    logged = [((step, key), value) for step, key, value in lines if key != "step"]
    found = _scalars(run / "tensorboard")
    assert Counter(place for place, _ in found) == Counter(place for place, _ in logged)
    assert dict(found) == pytest.approx(dict(logged))


def _scalars(directory: Path) -> list[tuple[tuple[int, str], float]]:
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for file in directory.glob("events.*"):
        data = file.read_bytes()
        while data:  # length (8), checksum (4), event, checksum (4)
            (length,) = struct.unpack_from("<Q", data)
            event, data = Event.FromString(data[12 : 12 + length]), data[16 + length :]
            found += [((event.step, one.tag), one.simple_value) for one in event.summary.value]
    return found
