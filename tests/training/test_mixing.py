"""auto measures before a run's first step: on a CPU, with made-up times in place of a GPU's."""

import dataclasses
import json
import os
import shutil

import pytest
import torch
from runs import assert_same

from mixer.models.masked_mixer import mixing as layers
from mixer.ops import choice
from mixer.ops.measure import Measured
from mixer.ops.timings import Row
from mixer.training import mixing

TAKES = "token mixing: auto takes"


def made_up() -> None:
    """A GPU without our kernels but those of keyed mixing, for mixer.training.mixing alone. TIMES
    has the milliseconds by process, KEYED_TIMES those of keyed mixing; each process prints the
    backends that its convolutions run by.
    """
    rank = int(os.environ.get("RANK", "0"))
    mixing.chooses_on = lambda device: True
    choice.unavailable_reason = lambda x=None: "there is no nvcc"
    choice.keyed_unavailable_reason = lambda *_: None
    choice.keyed_build_name = lambda: "keyed"
    choice.keyed_kernels_serve = lambda *_: False
    torch.cuda.get_device_name = lambda device=None: os.environ.get("GPU", "Tesla V100")
    torch.cuda.reset_peak_memory_stats = lambda device: None

    def time_backends(case, batch, dtype, device, backends, compile):
        assert (case.tokens, case.channels, batch, dtype) == (32, 32, 8, torch.float32)
        if case.key_size:
            assert (case.key_size, case.heads, backends) == (4, 2, ["cuda", "panels"])
            return Measured(json.loads(os.environ["KEYED_TIMES"]), {})
        assert backends == ["panels", "dense"]
        found = json.loads(os.environ["TIMES"])[rank]
        times = {name: ms for name, ms in found.items() if name in backends and ms}
        return Measured(times, {name: "no memory" for name in backends if not found[name]})

    def noted(real, what):
        seen = set()

        def call(*tensors, backend):
            if backend not in seen:
                seen.add(backend)
                print(f"process {rank} runs {what}{backend}", flush=True)
            return real(*tensors, backend=backend)

        return call

    mixing.time_backends = time_backends
    layers.triangular_conv = noted(layers.triangular_conv, "")
    layers.keyed_conv = noted(layers.keyed_conv, "keyed mixing by ")


@pytest.fixture
def begin(write_config, launch, tmp_path):
    """Starts a run on made-up times: (panels, dense) milliseconds of each process."""

    def start(*times, keyed=(), cache="cache", gpu="Tesla V100", changes=(), name="small"):
        backends = [dict(zip(("panels", "dense"), pair, strict=True)) for pair in times]
        environment = {"TIMES": json.dumps(backends), "MIXER_CACHE": str(tmp_path / cache)}
        environment |= {
            "KEYED_TIMES": json.dumps(dict(zip(("cuda", "panels"), keyed, strict=False)))
        }
        return launch(
            *("--config", write_config(), f"name={name}", *changes),
            processes=len(times),
            environment=environment | {"GPU": gpu},
            before=made_up,
        )

    return start


def trainer_of(checkpoint) -> dict:
    return json.loads((checkpoint / "trainer_state/trainer.json").read_text())


def test_processes_that_measure_differently_take_what_the_first_finds_fastest(begin, tmp_path):
    output = begin((2.0, 1.5), (1.0, 9.0)).succeed()
    assert f"{TAKES} dense, the fastest for float32 as tf32, 8 x 32 tokens, 32 channels" in output
    assert "panels 2.000 ms, dense 1.500 ms, measured in 0.0 s" in output
    assert "without cuda: there is no nvcc" in output and output.count(TAKES) == 1
    assert "process 0 runs dense" in output and "process 1 runs dense" in output
    assert "runs panels" not in output and "runs auto" not in output
    saved = trainer_of(tmp_path / "runs/small/step-12")["mixing"]
    assert (saved["backend"], saved["gpu"]) == ("dense", "Tesla V100")
    assert saved["milliseconds"] == {"panels": 2.0, "dense": 1.5}
    config = json.loads((tmp_path / "runs/small/step-12/config.json").read_text())
    assert config["mixing_backend"] == "auto"  # the model stays as it was


def test_a_resume_keeps_the_choice_although_the_times_have_changed(begin, tmp_path):
    begin((2.0, 1.5), name="whole").succeed()
    parts = begin((2.0, 1.5), name="parts", changes=["checkpoint.save_every=5"])
    parts.until((tmp_path / "runs/parts/step-5").exists).kill()
    output = begin((1.0, 9.0), name="parts", cache="another").succeed()
    assert f"{TAKES} dense, as the run did before" in output and "runs panels" not in output
    assert_same(tmp_path / "runs/parts", tmp_path / "runs/whole", 12)
    # Another GPU gives other bits anyway, so it may have another backend.
    changes = ["train.steps=13"]
    output = begin((1.0, 9.0), gpu="Tesla T4", name="parts", changes=changes).succeed()
    assert f"{TAKES} panels, the fastest for float32" in output and "runs dense" not in output


def test_a_checkpoint_of_before_runs_measured_goes_on_by_rule(begin, finished, tmp_path):
    shutil.rmtree(finished / "step-12")
    trainer = trainer_of(finished / "step-8")
    del trainer["mixing"]
    write_trainer(finished / "step-8", trainer)
    output = begin((2.0, 1.5)).succeed()
    said = "token mixing: auto goes by rule, as the checkpoint is of before runs measured"
    assert said in output and "runs dense" not in output
    output = begin((2.0, 1.5), changes=["train.steps=13"]).succeed()
    assert "token mixing: auto goes by rule, as the run did before" in output


KEYED = ["model.num_mixer_heads=2", "model.mixer_gate=true", "model.mixer_key_size=4"]
KEYED += ["model.mixer_keyed_every=2"]


def test_keyed_mixing_is_measured_apart_and_a_resume_keeps_that_too(begin, tmp_path):
    output = begin((2.0, 1.5), keyed=(1.0, 3.0), changes=KEYED).succeed()
    assert "keyed mixing: auto takes cuda, the fastest for float32 as tf32, 8 x 32" in output
    assert "keys of 4 on Tesla V100: cuda 1.000 ms, panels 3.000 ms, measured in" in output
    assert f"{TAKES} dense" in output and "runs dense" in output
    assert "process 0 runs keyed mixing by cuda" in output and "by panels" not in output
    saved = trainer_of(tmp_path / "runs/small/step-12")["mixing"]
    assert (saved["backend"], saved["keyed"]["backend"]) == ("dense", "cuda")
    changes = [*KEYED, "train.steps=13"]
    options = {"keyed": (9.0, 3.0), "cache": "another"}
    output = begin((1.0, 9.0), changes=changes, **options).succeed()
    assert "keyed mixing: auto takes cuda, as the run did before" in output
    # A checkpoint of before keyed mixing had kernels goes on without them.
    trainer = trainer_of(tmp_path / "runs/small/step-13")
    del trainer["mixing"]["keyed"]
    write_trainer(tmp_path / "runs/small/step-13", trainer)
    output = begin((1.0, 9.0), changes=[*KEYED, "train.steps=14"], **options).succeed()
    assert f"{TAKES} dense, as the run did before" in output
    assert "keyed mixing: auto goes by rule, as the checkpoint is of before runs measured" in output
    assert "runs keyed mixing by auto" in output


def write_trainer(checkpoint, trainer: dict) -> None:
    """Changes a file of a checkpoint, and what its listing says of it."""
    from mixer.common.checksums import sha256

    file, listing = (
        checkpoint / "trainer_state/trainer.json",
        checkpoint / "trainer_state/files.json",
    )
    file.write_text(json.dumps(trainer))
    files = json.loads(listing.read_text())
    name = "trainer_state/trainer.json"
    files[name] = {"size": file.stat().st_size, "sha256": sha256(file)}
    listing.write_text(json.dumps(files))


def test_the_same_case_is_measured_once_on_a_machine(begin, tmp_path):
    begin((2.0, 1.5), name="first").succeed()
    output = begin((1.0, 9.0), name="second").succeed()
    assert f"{TAKES} dense" in output and "measured by an earlier run" in output
    output = begin((1.0, 9.0), gpu="Tesla T4", name="third").succeed()
    assert f"{TAKES} panels" in output and "measured in" in output


def test_a_backend_that_fails_drops_out_and_is_measured_again_next_time(begin):
    output = begin((3.0, None), name="first").succeed()
    assert f"{TAKES} panels" in output and "without dense: no memory" in output
    assert f"{TAKES} dense" in begin((3.0, 1.0), name="second").succeed()


def test_the_table_comes_first_if_it_has_the_case_and_a_run_takes_the_fastest_of_it(monkeypatch):
    workload = mixing.Workload(
        torch.device("cpu"), mixing.Case("float16", False, 70, 512, 1024, 1, 1), 32,
        torch.float16, None,
    )  # fmt: skip
    row = Row(**vars(workload.case), batch=64, cuda_ms=2.0, panels_ms=3.0, dense_ms=1.0)
    monkeypatch.setattr(choice, "tuned", lambda index, case: row)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    chosen, why = mixing.choose(workload, None)
    assert chosen.backend == "dense" and "python -m mixer.ops.tune" in why
    kept = {"mixing": {"backend": "cuda", "gpu": "Tesla V100", "dtype": "float16"}}
    assert mixing.choose(workload, kept)[0].backend == "cuda"
    monkeypatch.setattr(mixing, "measured", lambda workload: (mixing.Mixing("panels"), ""))
    workload.case = dataclasses.replace(workload.case, tokens=1024)  # the table's nearest is 512
    assert mixing.choose(workload, None)[0].backend == "panels"
    workload.missing = "there is no nvcc"  # on a host that has joined the run
    assert mixing.choose(workload, kept)[0].backend == "panels"
