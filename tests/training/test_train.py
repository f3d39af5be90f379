"""Training as a person starts it: real launches, on made and built-in data."""

import gc
import gzip
import json
import re
import time
from contextlib import nullcontext
from dataclasses import replace
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest
import torch
from launching import run_python
from runs import RECIPE, read_lines, read_losses
from texts import corpus
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from mixer.common.errors import UserError
from mixer.data.samples import SampleOrder, TokenFile
from mixer.training import loop
from mixer.training.config import load_config
from mixer.training.loop import train
from mixer.training.optim import learning_rate
from mixer.training.start import check_run


@pytest.mark.parametrize("packed", (True, False))
def test_a_logged_loss_and_gradient_norm_are_those_of_the_mean_over_the_steps_tokens(
    write_config, small_run, tmp_path, packed
):
    """Computed anew from the initial weights, which a rate of zero leaves as they are."""
    data = small_run["data"] | {"directory": str(tmp_path / "data"), "packed": packed}
    changes = ["optim.lr=0", "train.batch_size=2", "train.gradient_accumulation_steps=3"]
    config = load_config(str(write_config(data=data)), [*changes, "train.steps=3"])
    train(config)
    model = AutoModelForCausalLM.from_pretrained(config.directory / "step-3")
    samples = TokenFile(data["directory"], "train", context=32)
    order = SampleOrder(len(samples), config.seed)
    lines = {line["step"]: line for line in read_lines(config.directory) if "loss" in line}
    for step, line in lines.items():
        inputs, targets = samples.batch(order.indices(6 * (step - 1), 6))
        nats = cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())
        gradients = torch.autograd.grad(nats, list(model.parameters()))
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        assert line["loss"] == pytest.approx(float(nats.detach()), rel=1e-5)
        assert line["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "processes"), [((), 2), ((*RECIPE, "optim.lr=4e-3"), 4)], ids=["adamw", "recipe"]
)
def test_several_processes_have_the_losses_of_one_with_the_same_global_batch(
    write_config, small_run, launch, tmp_path, settings, processes
):
    """Three layers have three matrices of a shape: of four processes one has none for Muon."""
    model = small_run["model"] | {"num_hidden_layers": 3}
    command = ("--config", write_config(model=model), *settings)
    launch(*command, "name=one").succeed()
    batch = f"train.batch_size={8 // processes}"
    launch(*command, "name=several", batch, processes=processes).succeed()
    options = ["train.batch_size=2", "train.gradient_accumulation_steps=4"]
    launch(*command, "name=accumulated", *options).succeed()
    one = read_losses(tmp_path / "runs/one")
    assert list(one) == list(range(1, 13)) and one[12] < one[1] - 0.2
    for name in ("several", "accumulated"):
        assert read_losses(tmp_path / "runs" / name) == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize(
    ("function", "activity"),
    [
        ("start.initial_model", "building the model"),
        ("start.restore.load_matching_model", "loading .*small/step-1"),
        ("start.build_optimizer", "compiling the model, and setting up its optimizer"),
        ("start.restore.load_state", "loading the optimizer's state"),
    ],
)
def test_a_start_that_takes_long_says_what_it_does(
    function, activity, write_config, monkeypatch, capsys
):
    slow = resolve_name(f"mixer.training.{function}")

    def slower(*arguments):
        time.sleep(0.3)
        return slow(*arguments)

    monkeypatch.setattr(f"mixer.training.{function}", slower)
    monkeypatch.setattr("mixer.common.progress.SECONDS", 0.05)
    for steps in (1, 2):
        train(load_config(str(write_config()), [f"train.steps={steps}"]))
    said = capsys.readouterr().out
    assert re.search(rf"^{activity}: \d+ s so far$", said, re.MULTILINE)


def test_a_run_leaves_its_configuration_metrics_and_checkpoints(
    write_config, launch, small_run, tmp_path
):
    change = "optim.schedule=linear"
    output = launch("--config", write_config(), change).succeed()
    samples = len(TokenFile(small_run["data"]["directory"], "train", 32))
    epochs = f"{12 * 8 / samples:.2f} epochs of {samples:,} samples"
    words = rf"12 steps of 256 tokens, {epochs}\nabout ([\d.]+) GB of memory; a fresh start"
    memory = float(re.search(words, output)[1])
    done, *commands, last = output.splitlines()[-5:]
    assert done == f"{tmp_path}/runs/small is done. Next:" and "a larger train.steps" in last
    told = []
    for command in commands:
        program, *options = command.split()
        assert program == "mixer"
        if options[0] == "generate":
            options += ["--new-tokens", "4", "--prompt", "document"]
        told.append(run_python("-m", "mixer", *options, output=tmp_path / f"{options[0]}.txt"))
    evaluated, generated, drawn = told
    assert "| small/step-" in evaluated and generated.startswith("document")
    assert drawn == f"{tmp_path}/runs/small/training.png\n"
    assert "tokens/s, 0:00:00 left" in output
    directory = tmp_path / "runs/small"
    lines = read_lines(directory)
    assert [line["step"] for line in lines if "validation_loss" in line] == [0, 6, 12]
    first, last = (line for line in lines if line["step"] in (1, 12) and "loss" in line)
    assert last["tokens"] == 12 * 8 * 32
    assert last["peak_memory_gb"] / 2 < memory < 1.1 * last["peak_memory_gb"]
    assert first["lr"] == pytest.approx(2e-3 / 3)
    assert load_config(str(directory / "config.yaml"), []).optim.schedule == "linear"
    assert sorted(p.name for p in directory.glob("step-*")) == ["step-12", "step-8"]  # two are kept
    assert json.loads((directory / "step-12/config.json").read_text())["mixing_backend"] == "auto"
    finished = launch("--config", write_config(), change).succeed()
    assert "step-12, already finished (12 steps); raise train.steps" in finished
    assert read_lines(directory) == lines


def test_a_precision_the_device_lacks_is_refused(monkeypatch):
    run = load_config(None, ["train.mixed_precision=fp16"])
    with pytest.raises(UserError, match="set train.mixed_precision=no"):
        check_run(run, SimpleNamespace(device=torch.device("cpu")))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100-SXM2-32GB")
    run.train.mixed_precision = "bf16"
    with pytest.raises(UserError, match="Tesla V100.* has no bf16 .*mixed_precision=fp16"):
        check_run(run, SimpleNamespace(device=torch.device("cuda")))


ADVICE = ["batch_size", "recompute=block", "mixed_precision=bf16", "a smaller model"]


def test_what_cannot_fit_into_memory_is_refused_with_what_is_not_done_already(
    write_config, tmp_path
):
    for changes, done in (
        (["train.batch_size=1000000"], []),
        (["model.hidden_size=65536", "train.batch_size=1"], ["batch_size"]),
        (["model.hidden_size=65536", "train.mixed_precision=bf16"], ["mixed_precision=bf16"]),
        (["model.hidden_size=65536", "train.recompute=block"], ["recompute=block"]),
    ):
        with pytest.raises(UserError, match=r"needs about [\d.]+ GB .*limit is [\d.]+\.") as error:
            train(load_config(str(write_config()), changes))
        advice = str(error.value).partition(" To need less: ")[2]
        assert [words for words in ADVICE if words not in advice] == done
    assert not (tmp_path / "runs").exists()


def test_a_process_trains_several_runs_also_after_one_that_is_refused(write_config):
    """As a notebook does."""
    config = str(write_config())
    for number, precision in enumerate(("no", "bf16", "no")):
        run = load_config(config, ["train.steps=1", f"name={number}"])
        run.train.mixed_precision = precision
        with pytest.raises(UserError, match="needs about"):
            train(replace(run, train=replace(run.train, batch_size=2**20)))
        train(run)
        assert (run.directory / "step-1").is_dir()


@pytest.mark.parametrize("was_enabled", (True, False))
@pytest.mark.parametrize("fails", (False, True))
def test_garbage_is_collected_between_steps_alone_and_afterwards_as_before(
    write_config, monkeypatch, was_enabled, fails
):
    """A collection during a step would make all other processes wait for this one."""
    enabled, frozen, collections = [], [], []

    def rate(config, step, steps):
        enabled.append(gc.isenabled())
        frozen.append(gc.get_freeze_count())
        if fails and step == 7:
            raise RuntimeError("a step has failed")
        return learning_rate(config, step, steps)

    def count(phase, info):
        if phase == "start" and enabled:  # the first step has begun
            collections.append(len(enabled))

    monkeypatch.setattr(loop, "learning_rate", rate)
    gc.unfreeze()  # what conftest.py has frozen
    gc.callbacks.append(count)
    if not was_enabled:
        gc.disable()
    try:
        with pytest.raises(RuntimeError, match="failed") if fails else nullcontext():
            train(load_config(str(write_config()), []))
        restored, still_frozen = gc.isenabled(), gc.get_freeze_count()
    finally:
        gc.enable()
        gc.callbacks.remove(count)
        gc.freeze()
    steps = 8 if fails else 12
    assert enabled == [False] * steps and min(frozen) > 1000
    # It saves every fourth step and evaluates every sixth; what comes later is no step.
    assert [step for step in collections if step < steps] == ([4, 6] if fails else [4, 6, 8])
    assert restored == was_enabled and still_frozen == 0


def test_a_profile_is_of_five_steps_or_of_those_that_there_are_and_changes_no_loss(write_config):
    options = ["train.steps=16", "train.eval_every=0", "checkpoint.save_last=false"]
    run = load_config(str(write_config()), options)
    train(run)
    assert not (run.directory / "trace.json.gz").exists()
    losses = read_losses(run.directory)
    for steps, traced in ((16, range(9, 14)), (11, range(9, 11))):  # torch counts from 0
        options = [*options, f"name=profiled-{steps}", f"train.steps={steps}"]
        run = load_config(str(write_config()), [*options, "logging.profile=true"])
        train(run)
        with gzip.open(run.directory / "trace.json.gz") as file:
            names = {event["name"] for event in json.load(file)["traceEvents"]}
        assert names >= {"aten::mm", *(f"ProfilerStep#{step}" for step in traced)}
        assert "ProfilerStep#8" not in names and "ProfilerStep#14" not in names
        if steps == 16:
            assert read_losses(run.directory) == losses


def test_a_run_of_few_steps_needs_no_other_option_and_its_warm_up_is_cut(write_config, capsys):
    run = load_config(str(write_config(optim={})), ["train.steps=4"])
    train(run)
    assert "optim.warmup_steps = 500 is cut to train.steps, 4\n" in capsys.readouterr().out
    rates = [line["lr"] / run.optim.lr for line in read_lines(run.directory) if "lr" in line]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1])


def test_a_run_that_reads_its_text_too_often_says_so(write_config, tmp_path, capsys):
    for name in "ab":
        (tmp_path / f"texts/{name}").mkdir(parents=True)
        (tmp_path / f"texts/{name}/text.txt").write_text(f"{name} short text. " * 40)
    data = {"source": "text", "path": str(tmp_path / "texts"), "vocab_size": 257}
    config = str(write_config(data=data | {"directory": str(tmp_path / "data")}))
    train(load_config(config, ["train.steps=1"]))
    samples = len(TokenFile(str(tmp_path / "data"), "train", 32))
    assert "less and less" not in capsys.readouterr().out
    for name, epochs in (("often", 4.1), ("enough", 3.9)):
        options = [f"name={name}", "train.steps=1", f"train.batch_size={int(epochs * samples)}"]
        train(load_config(config, options))
        says_so = "beyond 4 epochs a text is worth less and less" in capsys.readouterr().out
        assert says_so == (name == "often")


def test_a_run_that_evaluates_only_at_the_end_does_not_before_its_first_step(write_config):
    run = load_config(str(write_config()), ["train.eval_every=0", "train.steps=3"])
    train(run)
    lines = read_lines(run.directory)
    assert [line["step"] for line in lines if "validation_loss" in line] == [3]


def test_kernels_without_a_gpu_are_refused_before_anything_is_written(write_config, tmp_path):
    with pytest.raises(UserError, match="is cuda, but training is on the cpu; allowed .* dense"):
        train(load_config(str(write_config()), ["model.mixing_backend=cuda"]))
    assert not (tmp_path / "runs").exists()


def test_a_context_longer_than_the_data_is_refused(write_config, tmp_path):
    corpus(tmp_path / "texts", [f"A lazy dog number {number}. " * 5 for number in range(4)])
    data = {"source": "text", "path": str(tmp_path / "texts"), "vocab_size": 300}
    data |= {"directory": str(tmp_path / "data"), "validation_fraction": 0.3}
    config = load_config(str(write_config(data=data)), ["model.max_position_embeddings=512"])
    with pytest.raises(UserError, match="context of 512 needs at least 513"):
        train(config)
