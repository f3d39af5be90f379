"""Resuming: stopped or killed at any moment, a run ends with the weights of one that nobody
disturbed, to the last bit.
"""

import json
import os
import random
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from accelerate import Accelerator
from launching import ROOT, Launch, run_python
from models import small_model
from runs import FSDP, RECIPE, assert_same, read_losses, read_timeless, state_files
from safetensors.torch import load_file

from mixer.checkpoints import snapshot
from mixer.checkpoints.config import CheckpointConfig
from mixer.checkpoints.format import read_trainer
from mixer.checkpoints.restore import load_optimizer, warn_of_threads
from mixer.checkpoints.writer import CheckpointWriter
from mixer.common.errors import UserError
from mixer.data.manifest import Manifest
from mixer.distributed.hosts import Hosts
from mixer.training.config import load_config
from mixer.training.guard import Guard
from mixer.training.loop import train

KILLS = int(os.environ.get("MIXER_SOAK_KILLS", "3"))


@pytest.mark.parametrize(
    ("settings", "processes"),
    [((), 2), (RECIPE, 1), (RECIPE, 2)],
    ids=["adamw-2", "recipe-1", "recipe-2"],
)
def test_a_run_killed_at_random_ends_as_an_undisturbed_one(
    write_config, launch, tmp_path, settings, processes
):
    kills = max(1, KILLS // 3)  # each case has its share
    # Steps are quick and saves frequent, so that kills fall into start-up, steps, saves and
    # evaluations alike.
    steps = 60 * kills
    train_section = {"steps": steps, "batch_size": 4, "eval_every": 50, "eval_samples": 16}
    config = write_config(train=train_section, checkpoint={"save_every": 5})
    command = ("--config", config, *settings)
    launch(*command, "name=undisturbed", processes=processes).succeed(patience=120 * kills)
    generator = random.Random(2)
    for kill in range(kills):
        ranks = launch(*command, "name=killed", processes=processes)
        _wait_for_news(
            ranks, tmp_path / "runs/killed/metrics.jsonl", patience=generator.uniform(0.5, 10)
        )
        time.sleep(generator.uniform(0, 0.3))
        assert ranks.running(), f"the run ended before kill {kill + 1}: {ranks.output}"
        ranks.kill()
    launch(*command, "name=killed", processes=processes).succeed(patience=120 * kills)
    killed = tmp_path / "runs/killed"
    assert_same(killed, tmp_path / "runs/undisturbed", steps)
    state = load_file(killed / f"step-{steps}/trainer_state/optimizer-1-of-1.safetensors")
    moments = {name.rpartition("/")[2] for name in state}
    of_recipe = {"momentum", "lag_exp_avg", "lag_exp_avg_sq"} if settings else set()
    assert moments == {"exp_avg", "exp_avg_sq", "step"} | of_recipe


def _wait_for_news(ranks: Launch, metrics: Path, patience: float) -> None:
    """Until the run has written to its metrics, or `patience` seconds have passed (then the kill
    hits the start-up).
    """
    before = metrics.stat().st_mtime_ns if metrics.exists() else 0
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and ranks.running():
        if (
            metrics.exists()
            and metrics.stat().st_mtime_ns != before
            and metrics.read_text().count("\n") > 3
        ):
            return
        time.sleep(0.02)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_each_resume_is_as_exact_as_the_first(write_config, launch, tmp_path, processes):
    config = write_config(
        train={"steps": 12, "batch_size": 8 // processes, "eval_every": 6, "eval_samples": 16}
    )
    launch("--config", config, "name=whole", processes=processes).succeed()
    for stop_at in (3, 6, 10, 12):  # three resumes, at steps with and without an evaluation
        arguments = ("--config", config, "name=parts", f"checkpoint.save_every={stop_at}")
        ranks = launch(*arguments, processes=processes)
        if stop_at < 12:
            ranks.until((tmp_path / f"runs/parts/step-{stop_at}").exists)
            ranks.kill()
        else:
            ranks.succeed()
    assert_same(tmp_path / "runs/parts", tmp_path / "runs/whole", 12)


def test_another_number_of_processes_and_batch_size_go_on_with_the_same_samples(
    write_config, launch, tmp_path
):
    config = write_config()
    launch("--config", config, "name=one").succeed()
    # processes, batch_size, accumulation: always 8 samples a step
    changes = [(1, 4, 2), (4, 2, 1), (2, 1, 4), (2, 4, 1)]
    for number, (processes, batch, accumulation) in enumerate(changes):
        options = [f"train.batch_size={batch}", f"train.gradient_accumulation_steps={accumulation}"]
        last = 3 * (number + 1)  # with the schedule of 12 steps, stopped by a kill after a save
        ranks = launch(
            "--config",
            config,
            "name=many",
            *options,
            f"checkpoint.save_every={last}",
            processes=processes,
        )
        if number < 3:
            ranks.until((tmp_path / f"runs/many/step-{last}").exists)
            ranks.kill()
        else:
            ranks.succeed()
    assert read_losses(tmp_path / "runs/many") == pytest.approx(
        read_losses(tmp_path / "runs/one"), rel=1e-5
    )


def test_a_run_killed_before_its_first_checkpoint_has_its_first_evaluation_once(
    write_config, launch, tmp_path
):
    config = write_config(train={"steps": 12, "batch_size": 8, "eval_every": 0, "eval_samples": 8})
    metrics = tmp_path / "runs/small/metrics.jsonl"
    ranks = launch("--config", config, "train.steps=100000", "checkpoint.save_every=0")
    ranks.until(lambda: metrics.exists() and '"step": 3,' in metrics.read_text()).kill()
    launch("--config", config).succeed()
    evaluated = [
        line["step"] for line in read_timeless(tmp_path / "runs/small") if "validation_loss" in line
    ]
    assert evaluated == [0, 12]


def test_unpacked_rows_go_on_exactly_too(write_config, small_run, launch, tmp_path):
    config = write_config(
        data=small_run["data"] | {"directory": str(tmp_path / "rows"), "packed": False}
    )
    launch("--config", config, "name=whole").succeed()
    launch("--config", config, "name=parts", "checkpoint.save_every=5").until(
        (tmp_path / "runs/parts/step-5").exists
    ).kill()
    launch("--config", config, "name=parts").succeed()
    assert_same(tmp_path / "runs/parts", tmp_path / "runs/whole", 12)


def test_a_run_goes_on_from_a_named_checkpoint_with_more_steps(
    write_config, finished, launch, tmp_path
):
    changes = [
        f"checkpoint.resume={finished / 'step-8'}",
        "name=longer",
        "train.steps=14",
        "train.batch_size=4",
    ]
    output = launch("--config", write_config(), *changes, processes=2).succeed()
    assert "step 14/14" in output
    losses, original = read_losses(tmp_path / "runs/longer"), read_losses(finished)
    assert list(losses) == list(range(9, 15))
    # the same samples, on twice the processes
    assert losses[9] == pytest.approx(original[9], rel=1e-5)
    trainer = json.loads((tmp_path / "runs/longer/step-14/trainer_state/trainer.json").read_text())
    assert (trainer["step"], trainer["samples"]) == (14, 14 * 8)
    # the same command again goes on, it does not begin again
    changes[-2:] = ["train.steps=16", "train.batch_size=4"]
    output = launch("--config", write_config(), *changes, processes=2).succeed()
    assert (
        f"going on from these, not from {finished / 'step-8'}" in output
        and "step 13/16" not in output
    )
    assert list(read_losses(tmp_path / "runs/longer")) == list(range(9, 17))


def test_a_changed_model_is_refused_naming_each_field_and_its_key(write_config, finished):
    with pytest.raises(
        UserError,
        match=r"hidden_size is 32 in the checkpoint and 64 in the configuration"
        r".*set these keys \(model",
    ):
        train(load_config(str(write_config()), ["model.hidden_size=64", "model.final_norm=true"]))


def test_changed_data_is_refused_naming_what_differs_unless_allowed(
    write_config, finished, launch, tmp_path
):
    other = [f"data.directory={tmp_path / 'other'}", "data.vocab_size=400", "data.max_documents=20"]
    with pytest.raises(
        UserError,
        match=r"(?s)other data or in another"
        r".*data.max_documents: 30 in the checkpoint, now 20"
        r".*tokenizer: SHA-256",
    ) as error:
        train(load_config(str(write_config()), other))
    assert "train.bin: SHA-256" in str(error.value)
    assert "checkpoint.allow_other_data=true" in str(error.value)
    options = [*other, "checkpoint.allow_other_data=true", "train.steps=14"]
    output = launch("--config", write_config(), *options).succeed()
    assert "going on with other data" in output and "step 14/14" in output


def test_another_seed_is_refused_as_it_would_deal_out_other_samples(write_config, finished):
    with pytest.raises(
        UserError,
        match=r"(?s)in another order:.*seed: 0 in the checkpoint, now 5.*allow_other_data=true",
    ):
        train(load_config(str(write_config()), ["seed=5", "train.steps=14"]))


def test_a_run_that_has_its_steps_already_says_so(write_config, finished, launch):
    output = launch("--config", write_config(), "train.steps=8").succeed()
    assert (
        f"resuming {finished / 'step-12'}, which has 12 steps: train.steps = 8 leaves none to train"
        in output
    )


def test_fresh_starts_over_old_checkpoints_and_going_back_below_newer_ones_are_refused(
    write_config, finished
):
    config = str(write_config())
    with pytest.raises(UserError, match="set checkpoint.resume=auto"):
        train(load_config(config, ["checkpoint.resume=never"]))
    with pytest.raises(
        UserError, match="the run has newer ones.*step-12.*delete these, or choose another name"
    ):
        train(load_config(config, [f"checkpoint.resume={finished / 'step-8'}"]))


def test_the_best_checkpoint_can_be_named_by_its_link_where_none_is_newer(
    write_config, finished, launch
):
    assert (finished / "best").resolve().name == "step-12"
    options = [f"checkpoint.resume={finished / 'best'}", "train.steps=14"]
    output = launch("--config", write_config(), *options).succeed()
    assert f"resuming {finished / 'best'}" in output and "step 13/14" in output


def test_a_refused_resume_leaves_no_run_directory(write_config, tmp_path):
    config, nothing = str(write_config()), tmp_path / "no/checkpoint"
    with pytest.raises(UserError, match="checkpoint .* cannot be used"):
        train(load_config(config, [f"checkpoint.resume={nothing}"]))
    assert not (tmp_path / "runs").exists()
    (tmp_path / "runs/small").mkdir(parents=True)  # of the user's own
    with pytest.raises(UserError, match="checkpoint .* cannot be used"):
        train(load_config(config, [f"checkpoint.resume={nothing}"]))
    assert (tmp_path / "runs/small").is_dir()


def test_another_number_of_cpu_threads_is_said(finished):
    threads = torch.get_num_threads()
    trainer, said = read_trainer(finished / "step-12"), []
    assert trainer["threads"] == threads
    warn_of_threads(trainer, torch.device("cpu"), said.append)
    warn_of_threads(trainer | {"threads": threads + 1}, torch.device("cuda"), said.append)
    assert said == []
    warn_of_threads(trainer | {"threads": threads + 1}, torch.device("cpu"), said.append)
    assert f"start with OMP_NUM_THREADS={threads + 1} to repeat them" in said[0]


def test_the_wandb_run_goes_on_under_its_id_and_holds_every_line(write_config, launch, tmp_path):
    config = write_config(logging={"log_every": 1, "wandb": "offline"})
    launch("--config", config, "checkpoint.save_every=5").until(
        (tmp_path / "runs/small/step-5").exists
    ).kill()
    launch("--config", config).succeed()
    assert_in_wandb(tmp_path / "runs/small")
    origin = tmp_path / "runs/small/step-12"
    launch(
        "--config", config, "name=other", f"checkpoint.resume={origin}", "train.steps=13"
    ).succeed()
    ids = {file.name for file in (tmp_path / "runs").glob("*/wandb/offline-run-*/run-*.wandb")}
    assert len(ids) == 2  # a run that begins from a checkpoint of another one is not that one


def test_a_run_goes_on_without_wandbs_own_process_which_gets_the_lines_when_it_is_resumed(
    write_config, launch, tmp_path
):
    """A signal to all processes of a job ends that one too."""
    config = write_config(
        train={"steps": 100_000, "batch_size": 8, "eval_every": 0, "eval_samples": 8}
    )
    options = ["checkpoint.save_every=0", "logging.wandb=offline"]
    ranks, metrics = launch("--config", config, *options), tmp_path / "runs/small/metrics.jsonl"
    ranks.until(lambda: metrics.exists() and '"step": 5,' in metrics.read_text())
    for child in psutil.Process(ranks.ranks[0].pid).children(recursive=True):
        child.kill()
    output = ranks.until(lambda: "wandb has failed, the run goes on without" in ranks.output).stop()
    assert "stopped by a signal" in output and "Traceback" not in output
    step = read_timeless(tmp_path / "runs/small")[-1]["step"]
    launch("--config", config, *options, f"train.steps={step + 1}").succeed()
    assert_in_wandb(tmp_path / "runs/small")


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


def test_a_run_that_is_being_trained_is_not_trained_twice(write_config, launch, tmp_path):
    config = write_config(train={"steps": 100_000, "batch_size": 8, "eval_every": 0})
    launch("--config", config).until((tmp_path / "runs/small/metrics.jsonl").exists)
    with pytest.raises(UserError, match="is being trained by another process"):
        train(load_config(str(config), []))


def test_a_checkpoint_loads_alone_in_fp32_and_is_readable_as_the_umask_says(finished, tmp_path):
    moved = shutil.copytree(finished / "step-12", tmp_path / "moved")
    shutil.rmtree(moved / "trainer_state")  # what from_pretrained needs is outside of it
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(moved),
        AutoTokenizer.from_pretrained(moved),
    )
    assert all(
        str(t.dtype) == "torch.float32" for t in load_file(moved / "model.safetensors").values()
    )
    text = tokenizer.decode(
        model.generate(tokenizer("def ", return_tensors="pt").input_ids, max_new_tokens=5)[0]
    )
    assert text.startswith("def ")
    assert (finished / "step-12/model.safetensors").stat().st_mode == (
        finished / "metrics.jsonl"
    ).stat().st_mode
    assert Manifest.load(
        json.loads((finished / "step-12/trainer_state/trainer.json").read_text())["data_directory"]
    )


def test_nothing_is_unpickled_from_a_checkpoint(finished):
    kinds = {file.suffix for file in finished.rglob("step-*/**/*") if file.is_file()}
    # the model's own code, for those who have not installed this package
    assert kinds <= {".json", ".safetensors", ".py"}
    grep = subprocess.run(
        ["grep", "-rlE", r"torch\.load|pickle\.load", "mixer"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert grep.stdout == ""


def test_a_run_of_an_earlier_version_resumes_with_the_losses_it_had_there(tmp_path):
    before = shutil.copytree(Path(__file__).parent / "written_before", tmp_path / "before")
    expected = read_timeless(before / "runs/small")
    done = run_python(
        ROOT / "train.py", "--config", "config.yaml", directory=before, output=tmp_path / "printed"
    )
    assert done.returncode == 0, done.stdout
    assert "resuming runs/small/step-4" in done.stdout
    lines = read_timeless(before / "runs/small")
    assert [line.keys() for line in lines] == [line.keys() for line in expected]
    for line, old in zip(lines, expected, strict=True):
        assert line == pytest.approx(old, rel=0, abs=1e-4)


@pytest.mark.parametrize(
    ("written_with", "resumed_with", "named"),
    [
        ([], ["optim.name=muon"], "optim.name: 'adamw' in the checkpoint, now 'muon'"),
        ([], ["optim.shared_lags=true"], "optim.shared_lags: False in the checkpoint, now True"),
        (RECIPE, ["optim.name=adamw"], "optim.name: 'muon' in the checkpoint, now 'adamw'"),
        (RECIPE, ["optim.shared_lags=false"], "optim.shared_lags: True in the checkpoint, now F"),
    ],
)
def test_another_optimizer_is_refused_naming_its_key_and_the_checkpoints_value(
    write_config, tmp_path, written_with, resumed_with, named
):
    config = str(write_config())
    short = ["train.steps=3", "train.eval_every=0", "train.eval_samples=8"]
    train(load_config(config, [*written_with, *short]))
    refused_as_it_is(tmp_path / "runs", [config, *written_with, *resumed_with], named)


def test_another_optimizer_is_refused_where_an_earlier_version_wrote_adamws_state(
    tmp_path, monkeypatch
):
    before = shutil.copytree(Path(__file__).parent / "written_before", tmp_path / "before")
    monkeypatch.chdir(before)
    (before / "runs/small/.lock").touch()  # the one file that every command leaves in a run
    named = "optim.name: 'adamw' in the checkpoint, now 'muon'"
    refused_as_it_is(before, ["config.yaml", "optim.name=muon"], named)


def refused_as_it_is(directory: Path, settings: list[str], named: str) -> None:
    """A run with these settings ends in an error that names what differs, and changes nothing."""
    before = state_files(directory)
    with pytest.raises(UserError) as caught:
        train(load_config(settings[0], settings[1:]))
    assert f"has the state of another optimizer: {named}" in str(caught.value)
    assert "set the checkpoint's values, or choose another name" in str(caught.value)
    assert state_files(directory) == before


class KeepsMore(torch.optim.Optimizer):
    """An optimizer whose state has other keys and shapes than AdamW's."""

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            moment = torch.randn_like(parameter)
            kept = {"momentum": moment, "lags": moment.flatten()[:3], "calls": torch.tensor(2.0)}
            self.state[parameter] = kept


def test_the_best_checkpoint_is_that_of_the_losses_when_it_was_asked_for(tmp_path):
    """A thread links it while training goes on and adds losses, which broke a run now and then."""
    submitted = []
    writer = SimpleNamespace(main=True, directory=tmp_path, say=print)
    writer._submit = lambda job, *arguments: submitted.append(arguments)
    losses = {4: 2.5}
    CheckpointWriter.link_best(writer, losses)
    losses[8] = 2.0
    assert submitted[0][1] == {4: 2.5}


def snapshots_fetched_late() -> None:
    """Snapshots as on a GPU with room for them, in small pieces, and fetched when training has gone
    on.
    """
    real = snapshot.DeviceCopy.fetch
    snapshot.has_room = lambda device, needed: True
    snapshot.STAGE_BYTES, snapshot.QUEUED_BYTES = 1000, 5000

    def fetch(copy):
        time.sleep(0.3)
        return real(copy)

    snapshot.DeviceCopy.fetch = fetch


@pytest.mark.parametrize(
    ("settings", "processes", "environment"),
    [(RECIPE, 1, {}), ((), 2, FSDP)],
    ids=["recipe", "fsdp"],
)
def test_a_snapshot_holds_the_state_of_its_step_however_late_it_is_fetched(
    write_config, launch, tmp_path, settings, processes, environment
):
    command = ("--config", write_config(), *settings)
    options = {"processes": processes, "environment": environment}
    launch(*command, "name=plain", **options).succeed()
    launch(*command, "name=late", before=snapshots_fetched_late, **options).succeed()
    for step in (8, 12):
        assert_same(tmp_path / "runs/late", tmp_path / "runs/plain", step)


def test_a_snapshot_takes_tensors_of_any_type_and_shape_again_and_again(monkeypatch):
    monkeypatch.setattr(snapshot, "has_room", lambda device, needed: True)
    small = torch.arange(6, dtype=torch.int64).view(2, 3)
    copy = snapshot.choose_copy(torch.device("cpu"), snapshot.room_for([small]))
    assert copy.room == 512
    large = [small, torch.tensor(2.5), torch.randn(300, dtype=torch.float64)[::2]]
    copy = snapshot.choose_copy(torch.device("cpu"), snapshot.room_for(large))
    for _ in range(2):
        copy.begin()
        for number, tensor in enumerate(large):
            copy.copy(str(number), tensor)
        copy.finish()
        wanted = [tensor.clone() for tensor in large]
        for tensor in large:
            tensor.add_(1)
        assert all(map(torch.equal, copy.fetch().values(), wanted))


def test_whatever_state_an_optimizer_has_comes_back(tmp_path):
    model = small_model()
    optimizer = KeepsMore(model.parameters(), {})
    optimizer.step()
    accelerator = Accelerator(cpu=True)
    settings = (CheckpointConfig(), accelerator, Hosts(accelerator), model, NoTokenizer(), print)
    writer = CheckpointWriter(tmp_path, *settings)
    (tmp_path / "metrics.jsonl").touch()
    writer.save(optimizer, {"step": 3})
    writer.close()
    fresh = KeepsMore(model.parameters(), {})
    load_optimizer(tmp_path / "step-3", model, fresh)
    assert fresh.state.keys() == optimizer.state.keys()
    for parameter, saved in optimizer.state.items():
        loaded = fresh.state[parameter]
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[key], saved[key]) for key in saved)


class NoTokenizer:
    def save_pretrained(self, directory):
        pass


@pytest.mark.parametrize("room", [True, False])
def test_the_state_is_copied_before_the_run_waits_for_its_step_where_that_costs_no_time(
    write_config, monkeypatch, room
):
    """It does where copies on the device are queued behind the step. Copies to the host take longer
    than it, and a line of metrics would wait for them.
    """
    events, write_on = [], threading.Event()
    real_prepare, real_copy = CheckpointWriter.prepare, CheckpointWriter._copy
    real_look, real_write = Guard.look, CheckpointWriter._write

    def prepare(writer, optimizer):
        if events.count("copy") == 1:
            writer.wait()  # so the second save finds the first one written
        real_prepare(writer, optimizer)

    def copy(*arguments):
        events.append("copy")
        return real_copy(*arguments)

    def look(guard):
        events.append("wait")
        if events.count("wait") == 6:  # the third save's
            write_on.set()
        return real_look(guard)

    def write(*arguments):
        assert events.count("copy") == 1 or write_on.wait(60)
        real_write(*arguments)

    monkeypatch.setattr(CheckpointWriter, "prepare", prepare)
    monkeypatch.setattr(CheckpointWriter, "_copy", copy)
    monkeypatch.setattr(CheckpointWriter, "_write", write)
    monkeypatch.setattr(Guard, "look", look)
    monkeypatch.setattr(snapshot, "has_room", lambda device, needed: room)
    settings = ("train.steps=6", "train.eval_every=0", "checkpoint.save_every=2")
    train(load_config(str(write_config()), [*settings, "logging.log_every=2"]))
    waits = ["wait", "wait"]  # for the metrics, and for the save
    second = ["copy", *waits] if room else [*waits, "copy"]
    # The first makes the memory for the copies, and the third waits for the second.
    assert events == [*waits, "copy", *second, *waits, "copy"]
