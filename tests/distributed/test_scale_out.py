"""FSDP and several hosts, over gloo on a CPU; the configuration files for GPUs, as accelerate
itself reads them.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from launching import free_port
from runs import FSDP, ROOT, read_losses, read_timeless
from safetensors.torch import load_file

CONFIGS = sorted((ROOT / "configs/accelerate").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_reads_each_configuration_file_as_it_is_meant(path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    options = [
        "--config_file",
        str(path),
        "--main_process_ip",
        "host0",
        "--machine_rank",
        "1",
        "train.py",
    ]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(options))
    environment = prepare_multi_gpu_env(arguments)
    hosts, gpus = (int(number) for number in path.stem.split("_")[0].split("x"))
    assert (arguments.num_machines, arguments.num_processes) == (hosts, hosts * gpus)
    if path.stem.endswith("fsdp"):
        assert {name: environment[name].lower() for name in FSDP} == {
            name: value.lower() for name, value in FSDP.items()
        }
    else:
        assert arguments.multi_gpu and "ACCELERATE_USE_FSDP" not in environment
    assert f"configs/accelerate/{path.name}" in path.read_text().split("compute_environment")[0]


@pytest.mark.parametrize(
    ("precision", "architecture"),
    [("no", "masked_mixer"), ("bf16", "masked_mixer"), ("no", "llama")],
)
def test_sharded_training_has_the_losses_of_one_process(
    write_config, small_run, launch, tmp_path, precision, architecture
):
    train = {
        "steps": 12,
        "batch_size": 8,
        "eval_every": 5,
        "eval_samples": 9,
        "mixed_precision": precision,
    }
    config = write_config(train=train, model=small_run["model"] | {"architecture": architecture})
    launch("--config", config, "name=one").succeed()
    options = ["train.batch_size=2", "train.gradient_accumulation_steps=2"]
    output = launch(
        "--config", config, "name=sharded", *options, processes=2, environment=FSDP
    ).succeed()
    assert "2 process(es), FSDP" in output
    one, sharded = tmp_path / "runs/one", tmp_path / "runs/sharded"
    tolerance = 1e-5 if precision == "no" else 2e-2
    assert read_losses(sharded) == pytest.approx(read_losses(one), rel=tolerance)
    key = "validation_loss"
    validation = [
        [line[key] for line in read_timeless(run) if key in line] for run in (one, sharded)
    ]
    assert len(validation[0]) == 4 and validation[1] == pytest.approx(validation[0], rel=tolerance)


def test_a_run_is_what_its_configuration_says_whatever_the_launcher_says(
    write_config, finished, launch, tmp_path
):
    """accelerate would divide each gradient by its own number of accumulated steps."""
    said = {"GRADIENT_ACCUMULATION_STEPS": "4", "MIXED_PRECISION": "bf16"}
    environment = {f"ACCELERATE_{name}": value for name, value in said.items()}
    launch("--config", write_config(), "name=told", environment=environment).succeed()
    assert read_timeless(tmp_path / "runs/told") == read_timeless(finished)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there torchrun's processes are for GPUs")
def test_torchrun_on_a_cpu_starts_one_run_of_several_processes(write_config, launch):
    as_torchrun = {"ACCELERATE_USE_CPU": "false"}  # which nobody sets beside accelerate's launcher
    ranks = launch("--config", write_config(), processes=2, environment=as_torchrun)
    assert "2 process(es) on cpu" in ranks.succeed()


@pytest.mark.parametrize("tied", [False, True])
def test_a_sharded_run_resumes_exactly_and_its_checkpoint_is_a_plain_model(
    write_config, small_run, launch, tmp_path, tied
):
    config = write_config(model=small_run["model"] | {"tie_word_embeddings": tied})
    options = {"processes": 2, "environment": FSDP}
    launch("--config", config, "name=whole", **options).succeed()
    launch("--config", config, "name=parts", "checkpoint.save_every=5", **options).until(
        (tmp_path / "runs/parts/step-5").exists
    ).kill()
    launch("--config", config, "name=parts", **options).succeed()
    parts, whole = (tmp_path / "runs" / name / "step-12" for name in ("parts", "whole"))
    files = [file.relative_to(whole) for file in whole.rglob("*") if file.is_file()]
    assert [
        file for file in files if (parts / file).read_bytes() != (whole / file).read_bytes()
    ] == []
    assert read_timeless(parts.parent) == read_timeless(whole.parent)
    shards = [
        load_file(whole / f"trainer_state/optimizer-{rank}-of-2.safetensors") for rank in (1, 2)
    ]
    assert (
        shards[0]["model.embed_tokens.weight/exp_avg"].shape
        == shards[1]["model.embed_tokens.weight/exp_avg"].shape
        == (200, 32)
    )

    from transformers import AutoModelForCausalLM

    import mixer  # noqa: F401  registers the model

    model = AutoModelForCausalLM.from_pretrained(whole)
    assert model.lm_head.weight.shape == (400, 32)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert torch.equal(
        load_file(whole / "model.safetensors")["model.embed_tokens.weight"],
        model.model.embed_tokens.weight,
    )


def test_a_run_goes_on_between_one_process_ddp_and_fsdp(write_config, launch, tmp_path):
    config = write_config()
    launch("--config", config, "name=one").succeed()
    stages = [(2, FSDP), (1, {}), (4, FSDP), (2, {})]
    for number, (processes, environment) in enumerate(stages):
        last = 3 * (number + 1)
        options = [f"train.batch_size={8 // processes}", f"checkpoint.save_every={last}"]
        ranks = launch(
            "--config", config, "name=many", *options, processes=processes, environment=environment
        )
        if last < 12:
            ranks.until((tmp_path / f"runs/many/step-{last}").exists).kill()
        else:
            ranks.succeed()
    assert read_losses(tmp_path / "runs/many") == pytest.approx(
        read_losses(tmp_path / "runs/one"), rel=1e-5
    )


@pytest.mark.parametrize(
    "asked, message",
    [
        ({"FSDP_VERSION": "1"}, "version 1 was asked for; allowed: 2; set fsdp_version: 2"),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params: true .* allowed: false. For less"),
    ],
    ids=["version-1", "offload"],
)
def test_forms_of_fsdp_that_do_not_work_are_refused(write_config, launch, asked, message):
    ranks = launch("--config", write_config(), processes=2, environment=FSDP | asked)
    assert ranks.wait() == [2, 2]
    assert re.search(message, ranks.output, re.DOTALL)


def test_what_needs_gpus_or_whole_weights_is_refused_without_them(write_config, launch):
    graphs = ("train.compile=blocks", "train.cuda_graphs=true")
    for asked, environment, message in (
        (graphs, {}, "train.cuda_graphs = true on a CPU; allowed on CUDA GPUs"),
        (
            graphs,
            FSDP,
            "train.cuda_graphs = true with FSDP, whose weights move; allowed on CUDA GPUs",
        ),
    ):
        ranks = launch("--config", write_config(), *asked, processes=2, environment=environment)
        assert ranks.wait() == [2, 2]
        assert message in ranks.output


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ("optim.name=muon", "error: optim.name = muon with FSDP, which shards"),
        ("optim.shared_lags=true", "error: optim.shared_lags = true with FSDP, which shards"),
    ],
)
def test_an_optimizer_that_needs_whole_matrices_is_refused_before_anything_is_written(
    write_config, small_run, launch, tmp_path, asked, named
):
    config = write_config(data=small_run["data"] | {"directory": str(tmp_path / "data")})
    ranks = launch("--config", config, asked, processes=2, environment=FSDP)
    assert ranks.wait() == [2, 2]
    assert named in ranks.output
    assert "allowed with FSDP: optim.name=adamw and optim.shared_lags=false" in ranks.output
    assert {path.name for path in tmp_path.iterdir()} == {"config.yaml", ranks.file.name}


@pytest.mark.slow
def test_two_launchers_train_as_two_hosts_do(write_config, launch, tmp_path):
    config = write_config()
    launch("--config", config, "name=one").succeed()
    hosts = [start_host(rank, port, config) for port in [free_port()] for rank in range(2)]
    outputs = [host.communicate(timeout=200)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], outputs
    assert (
        "2 process(es)" in outputs[0]
        and "step 12/12" in outputs[0]
        and "step 12/12" not in outputs[1]
    )
    assert read_losses(tmp_path / "runs/small") == pytest.approx(
        read_losses(tmp_path / "runs/one"), rel=1e-5
    )
    trainer = json.loads((tmp_path / "runs/small/step-12/trainer_state/trainer.json").read_text())
    assert trainer["samples"] == 96


def start_host(rank: int, port: int, config: Path) -> subprocess.Popen:
    """The launcher of one of two hosts with a process each."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
    launcher += [f"--node_rank={rank}", "--master_addr=127.0.0.1", f"--master_port={port}"]
    return subprocess.Popen(
        [*launcher, "-m", "mixer.train", "--config", str(config), "train.batch_size=4"],
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
    for number in range(20):
        (directory / f"text/{number}.txt").write_text(
            f"{os.environ['TEXT'].format(**os.environ)} {number}\n" * 50
        )
    os.chdir(directory)


@pytest.mark.parametrize(
    ("text", "named"),
    [("the same", "the directory runs/small"), ("{RANK}", "data.directory = data")],
)
def test_hosts_that_do_not_share_their_directories_are_refused(
    write_config, small_run, launch, tmp_path, text, named
):
    data = small_run["data"] | {
        "source": "text",
        "path": "text",
        "directory": "data",
        "vocab_size": 260,
    }
    model = small_run["model"] | {"max_position_embeddings": 8}
    environment = {"DISKS": str(tmp_path), "TEXT": text}
    config = write_config(data=data, model=model)
    ranks = launch(
        "--config",
        config,
        "output_dir=runs",
        processes=2,
        environment=environment,
        before=on_its_own_disk,
    )
    assert 0 not in ranks.wait()
    assert (
        ranks.output.count(
            f"error: {named} is not for process 1 what it is for process 0; allowed: one directory"
        )
        == 1
    )
