"""A run that is stopped and resumed is one run of wandb or TensorBoard, with every line."""

import json
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from runs import read_lines, read_timeless

OFFLINE = {"WANDB_MODE": "offline"}


def test_a_run_goes_on_without_wandbs_own_process_and_a_resume_gives_wandb_every_line(
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
    output = ranks.until(lambda: "wandb has failed, the run goes on without" in ranks.output).stop()
    assert "stopped by a signal" in output and "Traceback" not in output
    longer = ("logging.tracker=wandb", f"train.steps={read_timeless(run)[-1]['step'] + 1}")
    launch(*command, *longer, environment=OFFLINE).succeed()
    assert_in_wandb(run)


def test_tensorboard_has_every_line_of_a_resumed_run_once(write_config, launch, tmp_path):
    pytest.importorskip("tensorboardX")
    config = write_config(logging={"log_every": 1, "tracker": "tensorboard"})
    launch("--config", config, "checkpoint.save_every=5").until(
        (tmp_path / "runs/small/step-5").exists
    ).kill()
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


def assert_in_wandb(run: Path) -> None:
    """Every line of a run that was resumed once, under one id."""
    files = sorted((run / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2 and len({file.name for file in files}) == 1
    history = {line["step"]: line for file in files for line in _wandb_history(file)}
    for line in read_timeless(run):
        assert {key: history[line["step"]][key] for key in line if key != "step"} == {
            k: v for k, v in line.items() if k != "step"
        }


def _wandb_history(file: Path) -> list[dict]:
    """The lines of an offline run; a killed run's file ends in the middle of one."""
    from wandb.proto import wandb_internal_pb2

    lines: dict[int, dict] = {}
    for data in _wandb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            values = {
                item.key or item.nested_key[0]: json.loads(item.value_json)
                for item in record.history.item
            }
            lines.setdefault(record.history.step.num, {"step": record.history.step.num}).update(
                values
            )
    return list(lines.values())


def _wandb_records(data: bytes) -> Iterator[bytes]:
    """Records as LevelDB's log lays them out: parts of blocks of 32 KiB, each with checksum (4),
    length (2) and kind (1).
    """
    place, record = 7, b""  # after the file's own header
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768  # no room for another part: the rest is padding
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""
