"""FSDP and several hosts, over gloo on a CPU; the configuration files for GPUs, as accelerate
itself reads them.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from launching import free_port
from runs import FSDP, ROOT, assert_same, killed_after, read_lines, read_losses, read_timeless
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

CONFIGS = sorted((ROOT / "configs/accelerate").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_reads_each_configuration_file_as_it_is_meant(path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    options = ["--config_file", str(path), "--main_process_ip", "host0"]
    options += ["--machine_rank", "1", "train.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(options))
    environment = prepare_multi_gpu_env(arguments)
    hosts, gpus = (int(number) for number in path.stem.split("_")[0].split("x"))
    assert (arguments.num_machines, arguments.num_processes) == (hosts, hosts * gpus)
    if path.stem.endswith("fsdp"):
        found = {name: environment[name].lower() for name in FSDP}
        assert found == {name: value.lower() for name, value in FSDP.items()}
    else:
        assert arguments.multi_gpu and "ACCELERATE_USE_FSDP" not in environment
    assert f"configs/accelerate/{path.name}" in path.read_text().split("compute_environment")[0]


@pytest.mark.parametrize(
    ("optimizer", "precision", "architecture", "tied"),
    [("muon", "no", "llama", False), ("adamw", "bf16", "masked_mixer", True)],
)
def test_a_sharded_run_has_the_losses_of_one_process_resumes_exactly_and_leaves_a_plain_model(
    write_config, small_run, launch, tmp_path, optimizer, precision, architecture, tied
):
    changes = {"mixed_precision": precision, "eval_every": 5, "eval_samples": 9}
    model = small_run["model"] | {"architecture": architecture, "tie_word_embeddings": tied}
    saved = {"save_every": 5, "keep": 3}
    optim = small_run["optim"] | {"name": optimizer}
    train = small_run["train"] | changes
    config = write_config(train=train, model=model, optim=optim, checkpoint=saved)
    launch("--config", config, "name=one").succeed()
    options = ["train.batch_size=2", "train.gradient_accumulation_steps=2"]
    command, sharded = ("--config", config, *options), {"processes": 2, "environment": FSDP}
    output = launch(*command, "name=whole", **sharded).succeed()
    assert "2 processes, FSDP" in output
    one, whole = tmp_path / "runs/one", tmp_path / "runs/whole"
    tolerance = 1e-5 if precision == "no" else 2e-2
    for key in ("loss", "validation_loss"):
        found, wanted = ([line[key] for line in read_lines(x) if key in line] for x in (whole, one))
        assert len(wanted) >= 4 and found == pytest.approx(wanted, rel=tolerance)

    parts = killed_after(whole, 5, "parts")
    assert "resuming" in launch(*command, "name=parts", **sharded).succeed()
    assert_same(parts, whole, 12)
    state = load_file(whole / "step-12/trainer_state/optimizer-1-of-1.safetensors")
    assert state["model.embed_tokens.weight/exp_avg"].shape == (400, 32)

    import mixer  # noqa: F401  registers the model

    model = AutoModelForCausalLM.from_pretrained(whole / "step-12")
    embedding = model.model.embed_tokens.weight
    assert model.lm_head.weight.shape == (400, 32)
    assert (model.lm_head.weight is embedding) == tied
    saved = load_file(whole / "step-12/model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(saved, embedding)


def test_a_sharded_run_begins_with_the_weights_that_one_process_has(write_config, launch, tmp_path):
    # a rate of 0, so that the step changes nothing
    command = ("--config", write_config(), "train.steps=1", "train.eval_every=0", "optim.lr=0")
    runs = tmp_path / "runs"
    launch(*command, "name=one").succeed()
    sharded = {"processes": 2, "environment": FSDP}
    launch(*command, "name=new", **sharded).succeed()
    started = [f"train.init_from={runs}/one/step-1", "seed=1", "name=started"]
    launch(*command, *started, **sharded).succeed()
    weights = [runs / name / "step-1/model.safetensors" for name in ("one", "new", "started")]
    assert weights[0].read_bytes() == weights[1].read_bytes() == weights[2].read_bytes()


def test_a_run_is_what_its_configuration_says_whatever_the_launcher_says(
    write_config, finished, launch, tmp_path
):
    """accelerate would divide each gradient by its own number of accumulated steps."""
    said = {"GRADIENT_ACCUMULATION_STEPS": "4", "MIXED_PRECISION": "bf16"}
    environment = {f"ACCELERATE_{name}": value for name, value in said.items()}
    launch("--config", write_config(), "name=told", environment=environment).succeed()
    assert read_timeless(tmp_path / "runs/told") == read_timeless(finished)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "asked for deepspeed; allowed: DDP, or"),
        ({"FSDP_VERSION": "1"}, "asked for fsdp_version: 1; allowed: DDP, or version 2"),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, "asked for fsdp_offload_params: true; allowed"),
        ({"ACCELERATE_USE_CPU": "maybe"}, "ACCELERATE_USE_CPU = 'maybe'; allowed: true, false"),
    ],
)
def test_a_launch_that_cannot_train_so_is_refused_before_anything_is_written(
    write_config, small_run, launch, tmp_path, environment, message
):
    config = write_config(data=small_run["data"] | {"directory": str(tmp_path / "data")})
    ranks = launch("--config", config, processes=2, environment=FSDP | environment)
    codes = ranks.wait()  # 1 of a process that loses the other one while it still starts
    assert 2 in codes and 0 not in codes
    assert re.search(message, ranks.output, re.DOTALL)
    assert {path.name for path in tmp_path.iterdir()} == {"config.yaml", ranks.file.name}


def main_process_late() -> None:
    from mixer.training import loop

    real = loop.open_run_data

    def late(*arguments):
        time.sleep(3 if os.environ["RANK"] == "0" else 0)
        return real(*arguments)

    loop.open_run_data = late


def test_whichever_process_prepares_the_data_says_how_far_it_is(write_config, launch, tmp_path):
    changes = f"data.directory={tmp_path}/fresh", "train.steps=4"
    ranks = launch("--config", write_config(), *changes, processes=2, before=main_process_late)
    output = ranks.succeed()
    assert output.count("tokenizer: 400 tokens") == output.count("tokenized: ") == 1


@pytest.mark.slow
def test_two_launchers_train_as_two_hosts_do(write_config, launch, tmp_path):
    config = write_config()
    launch("--config", config, "name=one").succeed()
    hosts = [start_host(rank, port, config) for port in [free_port()] for rank in range(2)]
    outputs = [host.communicate(timeout=200)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], outputs
    assert "2 processes" in outputs[0] and "step 12/12" in outputs[0]
    assert "step 12/12" not in outputs[1]
    one, two = (read_losses(tmp_path / "runs" / name) for name in ("one", "small"))
    assert two == pytest.approx(one, rel=1e-5)
    trainer = json.loads((tmp_path / "runs/small/step-12/trainer_state/trainer.json").read_text())
    assert trainer["samples"] == 96


def start_host(rank: int, port: int, config: Path) -> subprocess.Popen:
    """The launcher of one of two hosts with a process each."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
    launcher += [f"--node_rank={rank}", "--master_addr=127.0.0.1", f"--master_port={port}"]
    return subprocess.Popen(
        [*launcher, "-m", "mixer", "train", "--config", str(config), "train.batch_size=4"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def on_its_own_disk() -> None:
    """Each process starts in another directory, as on hosts that share nothing; its text is another
    one too.
    """
    directory = Path(os.environ["DISKS"]) / os.environ["RANK"]
    (directory / "text").mkdir(parents=True)
    text = os.environ["TEXT"].format(**os.environ)
    for number in range(20):
        (directory / f"text/{number}.txt").write_text(f"{text} {number}\n" * 50)
    os.chdir(directory)


@pytest.mark.parametrize(
    ("text", "named"),
    [("the same", "the directory runs/small"), ("{RANK}", "data.directory = data")],
)
def test_hosts_that_do_not_share_their_directories_are_refused(
    write_config, small_run, launch, tmp_path, text, named
):
    data = {"source": "text", "path": "text", "directory": "data", "vocab_size": 260}
    model = small_run["model"] | {"max_position_embeddings": 8}
    config = write_config(data=small_run["data"] | data, model=model)
    environment = {"DISKS": str(tmp_path), "TEXT": text}
    options = {"processes": 2, "environment": environment, "before": on_its_own_disk}
    ranks = launch("--config", config, "output_dir=runs", **options)
    assert 0 not in ranks.wait()
    said = f"error: {named} differs between process 1 and process 0; allowed: one directory"
    assert ranks.output.count(said) == 1
