"""Training as a person starts it: real launches, on made and built-in data."""

import json
import os
import re
import shutil

import pytest
import torch
from models import small_model
from runs import ROOT, read_lines, read_losses
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from mixer.common.errors import UserError
from mixer.common.hardware import check_precision
from mixer.data.order import SampleOrder
from mixer.data.prepare import prepare
from mixer.data.token_file import TokenFile
from mixer.models.architecture import model_config
from mixer.models.masked_mixer.modeling import MaskedMixerForCausalLM
from mixer.training.config import load_config
from mixer.training.loop import train
from mixer.training.optim import (
    OPTIMIZERS,
    OptimConfig,
    build_optimizer,
    learning_rate,
    set_learning_rate,
)


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


def test_two_processes_have_the_losses_of_one_with_the_same_global_batch(
    write_config, launch, tmp_path
):
    config = write_config()
    launch("--config", config, "name=one").succeed()
    launch("--config", config, "name=two", "train.batch_size=4", processes=2).succeed()
    options = ["train.batch_size=2", "train.gradient_accumulation_steps=4"]
    launch("--config", config, "name=accumulated", *options).succeed()
    one, two, accumulated = (
        read_losses(tmp_path / "runs" / name) for name in ("one", "two", "accumulated")
    )
    assert list(one) == list(range(1, 13))
    assert two == pytest.approx(one, rel=1e-5)
    assert accumulated == pytest.approx(one, rel=1e-5)


def test_unpacked_rows_of_unequal_length_count_each_token_once_on_two_processes(
    write_config, launch, tmp_path
):
    (tmp_path / "texts").mkdir()
    for number in range(60):
        (tmp_path / f"texts/{number:02}.txt").write_text("a few words " * (number % 20 + 1))
    data = {"source": "text", "path": str(tmp_path / "texts"), "vocab_size": 260}
    data |= {"directory": str(tmp_path / "rows"), "packed": False, "validation_fraction": 0.1}
    config = write_config(data=data)
    launch("--config", config, "name=one").succeed()
    launch("--config", config, "name=two", "train.batch_size=4", processes=2).succeed()
    one, two = (read_lines(tmp_path / "runs" / name) for name in ("one", "two"))
    assert read_losses(tmp_path / "runs/two") == pytest.approx(
        read_losses(tmp_path / "runs/one"), rel=1e-5
    )
    assert [line["tokens"] for line in two] == [line["tokens"] for line in one]
    assert 0 < one[-1]["tokens"] < 12 * 8 * 32  # some rows are padded
    for lines in (one, two):
        steps = [{"tokens": 0}, *(line for line in lines if "loss" in line)]
        for before, line in zip(steps, steps[1:], strict=False):
            trained = line["tokens"] - before["tokens"]
            assert line["tokens_per_second"] == pytest.approx(trained / line["seconds"])
    validated = [
        [line["validation_loss"] for line in lines if "validation_loss" in line]
        for lines in (one, two)
    ]
    assert validated[1] == pytest.approx(validated[0], rel=1e-5)


def test_the_loss_falls(write_config, launch, tmp_path):
    launch("--config", write_config(), "train.steps=40").succeed()
    losses = read_losses(tmp_path / "runs/small")
    assert losses[40] < losses[1] - 0.5


def test_a_run_leaves_its_configuration_metrics_and_checkpoints(
    write_config, launch, small_run, tmp_path
):
    output = launch(
        "--config", write_config(), "train.mixed_precision=bf16", "optim.schedule=linear"
    ).succeed()
    samples = len(TokenFile(small_run["data"]["directory"], "train", 32))
    epochs = f"{12 * 8 / samples:.2f} epochs of {samples:,} samples"
    words = (
        rf"12 steps of 256 tokens, {epochs}\nabout ([\d.]+) GB of memory, at least 0:00:00; a fr"
    )
    memory = float(re.search(words, output)[1])
    assert "tokens/s, 0:00:00 left" in output
    directory = tmp_path / "runs/small"
    lines = read_lines(directory)
    assert [line["step"] for line in lines if "validation_loss" in line] == [0, 6, 12]
    first, last = (line for line in lines if line["step"] in (1, 12) and "loss" in line)
    assert {
        "tokens",
        "lr",
        "grad_norm",
        "tokens_per_second",
        "useful_tflops",
        "data_wait_share",
    } <= set(last)
    assert last["tokens"] == 12 * 8 * 32
    assert last["peak_memory_gb"] / 2 < memory < 1.1 * last["peak_memory_gb"]
    assert first["lr"] == pytest.approx(2e-3 / 3)
    assert load_config(str(directory / "config.yaml"), []).train.mixed_precision == "bf16"
    assert sorted(p.name for p in directory.glob("step-*")) == ["step-12", "step-8"]  # two are kept
    assert json.loads((directory / "step-12/config.json").read_text())["mixing_backend"] == "auto"


def test_a_second_launch_beside_a_misspelt_key_starts_nothing(write_config, launch, tmp_path):
    ranks = launch("--config", write_config(), "train.stepz=3")
    assert 0 not in ranks.wait()
    assert "unknown key train.stepz = 3; did you mean train.steps?" in ranks.output
    assert not os.path.exists(tmp_path / "runs")


def test_weight_decay_is_for_matrices_alone():
    run_config = load_config(
        None,
        ["model.hidden_size=16", "model.num_hidden_layers=1", "model.max_position_embeddings=8"],
    )
    model = MaskedMixerForCausalLM(model_config(run_config.model, 20, 0))
    for name in ("adamw", "muon"):
        groups = build_optimizer(model, OptimConfig(name=name)).param_groups
        assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
        kept = [p for group in groups if group["weight_decay"] == 0 for p in group["params"]]
        found = {n for n, p in model.named_parameters() if any(p is q for q in kept)}
        assert found == {
            n for n, _ in model.named_parameters() if n.endswith("bias") or "norm" in n
        }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_kind_of_parameter_has_the_rate_that_is_given_for_it(name):
    model = small_model(num_mixer_heads=2)
    given = {"matrices_lr": 2.0, "vectors_lr": 3.0, "mixing_lr": 0.5, "shared_lags_lr": 4.0}
    optimizer = build_optimizer(model, OptimConfig(name=name, shared_lags=True, **given))
    set_learning_rate(optimizer, 0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    rates = {names[id(p)]: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert rates.keys() == set(names.values())
    for name, rate in rates.items():
        of_matrix = name.endswith(("_proj.weight",))
        vector = name.endswith("bias") or "norm" in name
        mixing = name.endswith("conv.weight")
        expected = 0.2 if of_matrix else 0.3 if vector else 0.05 if mixing else 0.1
        assert rate == pytest.approx(expected), name
    lags = [group for group in optimizer.param_groups if "shared_lags" in group]
    assert [group["lr"] * group["shared_lags"] for group in lags] == [pytest.approx(0.4)]


def test_the_learning_rate_warms_up_and_falls_to_its_floor():
    rates = [
        learning_rate(OptimConfig(lr=1.0, warmup_steps=10, min_lr_ratio=0.1), step, 110)
        for step in range(111)
    ]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == 1.0
    assert rates[60] == pytest.approx(0.55) and rates[110] == pytest.approx(0.1)
    linear = OptimConfig(lr=1.0, warmup_steps=0, schedule="linear")
    assert learning_rate(linear, 25, 100) == pytest.approx(0.75)
    assert learning_rate(OptimConfig(lr=1.0, warmup_steps=0, schedule="constant"), 99, 100) == 1.0


def test_a_precision_the_device_lacks_is_refused(monkeypatch):
    with pytest.raises(UserError, match="set train.mixed_precision=no"):
        check_precision(torch.device("cpu"), "fp16")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100-SXM2-32GB")
    with pytest.raises(
        UserError, match="Tesla V100.* has no bf16 arithmetic.*mixed_precision=fp16"
    ):
        check_precision(torch.device("cuda"), "bf16")


def test_what_cannot_fit_into_memory_is_refused_before_the_first_step(write_config, tmp_path):
    for changes in (["train.batch_size=1000000"], ["model.hidden_size=65536"]):
        with pytest.raises(UserError, match=r"needs about [\d.]+ GB .*there are [\d.]+\. To need"):
            train(load_config(str(write_config()), changes))
    assert not (tmp_path / "runs").exists()


def test_the_laptops_configuration_trains_on_a_folder_of_ones_own(launch, tmp_path):
    (tmp_path / "texts").mkdir()
    for file in sorted((ROOT / "mixer").rglob("*.py"))[:60]:
        shutil.copy(file, tmp_path / f"texts/{file.parent.name}-{file.stem}.txt")
    own = ["name=mine", f"data.path={tmp_path}/texts", f"data.directory={tmp_path}/data/mine"]
    short = ["train.steps=2", "optim.warmup_steps=1", "train.eval_samples=16"]
    config = ("--config", ROOT / "configs/laptop.yaml", f"output_dir={tmp_path}/runs")
    output = launch(*config, *own, *short).succeed()
    assert "2 steps of 2,048 tokens" in output and (tmp_path / "runs/mine/step-2").is_dir()


def test_a_context_longer_than_the_data_is_refused(small_run, tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(4):
        (text / f"{number}.txt").write_text(
            f"The quick brown fox number {number} jumps over the lazy dog. " * 3
        )
    overrides = [
        f"data.directory={tmp_path / 'data'}",
        f"data.path={text}",
        "data.source=text",
        "data.vocab_size=300",
    ]
    run_config = load_config(
        None, [*overrides, "data.validation_fraction=0.3", f"output_dir={tmp_path / 'runs'}"]
    )
    assert prepare(run_config.data).splits["train"].tokens < 512
    with pytest.raises(UserError, match="context of 512 needs at least 513"):
        train(run_config)
