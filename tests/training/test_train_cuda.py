"""Training on real GPUs: fp16, exact resumes, nothing waited for between logging steps, DDP and
FSDP.

    pytest tests/training/test_train_cuda.py  # on 1, 2 or 4 GPUs; skipped without one
"""

import math
import os
import time
from functools import partial

import pytest
import torch
from runs import FSDP, RECIPE, assert_same, read_lines, read_losses

GPUS = torch.cuda.device_count()
ON_GPU = {"ACCELERATE_USE_CPU": "false"}
pytestmark = pytest.mark.skipif(GPUS == 0, reason="no GPU here")

SECTIONS = {
    "model": {"hidden_size": 128, "num_hidden_layers": 3, "max_position_embeddings": 64},
    "train": {"steps": 24, "batch_size": 8, "eval_every": 6, "eval_samples": 16}
    | {"compile": "no"},  # compiling takes most of a minute
}
DDP = [pytest.param(count, {}, id=f"{count}-ddp") for count in (1, 2, 4)]
LAUNCHES = [*DDP, *(pytest.param(count, FSDP, id=f"{count}-fsdp") for count in (2, 4))]
GRAPHS = ("train.compile=blocks", "train.cuda_graphs=true")  # not with FSDP
RECIPE_GRAPHS = (*RECIPE, *GRAPHS)  # Muon and mixing weights by lag


def launches_with(**kinds: tuple[str, tuple[str, ...]]):
    """Tests of processes, engine, precision and changed: every launch with every kind, graphs with
    those that can have them.
    """
    cases = [
        (name, kind, launch)
        for name, kind in kinds.items()
        for launch in (DDP if GRAPHS[-1] in kind[1] else LAUNCHES)
    ]
    every = [
        pytest.param(*launch.values, *kind, id=f"{name}-{launch.id}")
        for name, kind, launch in cases
    ]
    return pytest.mark.parametrize(("processes", "engine", "precision", "changed"), every)


def options_for(processes: int, engine: dict) -> dict:
    if GPUS < processes:
        pytest.skip(f"{processes} GPUs are needed, {GPUS} are here")
    return {"processes": processes, "environment": ON_GPU | engine}


@pytest.mark.parametrize("precision", ["no", "fp16", "bf16"])
@pytest.mark.parametrize(("processes", "engine"), LAUNCHES)
def test_losses_of_each_precision_and_engine_are_those_of_one_gpu_in_fp32(
    write_config, launch, tmp_path, processes, engine, precision
):
    options = options_for(processes, engine)
    config = write_config(**SECTIONS)
    launch("--config", config, "name=one", "train.tf32=false", environment=ON_GPU).succeed()
    changes = [f"train.mixed_precision={precision}", f"train.batch_size={8 // processes}"]
    changes += ["train.tf32=false"]
    launch("--config", config, "name=many", *changes, **options).succeed()
    lines = [line for line in read_lines(tmp_path / "runs/many") if "loss" in line]
    skipped = {line["step"]: line["skipped_steps"] for line in lines}
    assert skipped[24] == 0 or (precision == "fp16" and skipped[24] < len(lines) / 2)
    # A skipped fp16 step leaves the run a step behind, which losses show while they fall fast.
    compared = [step for step in skipped if skipped[step] == 0 or step > 18]
    one, many = (read_losses(tmp_path / "runs" / name) for name in ("one", "many"))
    one, many = ({step: losses[step] for step in compared} for losses in (one, many))
    tolerance = 1e-4 if precision == "no" else 3e-2 * (1 + skipped[24])
    assert many == pytest.approx(one, rel=tolerance)
    assert all("loss_scale" in line for line in lines) == (precision == "fp16")


@launches_with(
    fp16=("fp16", ()),
    bf16=("bf16", ()),
    compiled=("bf16", ("train.compile=blocks",)),
    graphs=("fp16", GRAPHS),
    recipe=("bf16", RECIPE_GRAPHS),
    recomputed=("bf16", (*RECIPE, "train.compile=blocks", "train.recompute=block")),
)
def test_a_killed_run_resumes_exactly(
    write_config, launch, tmp_path, processes, engine, precision, changed
):
    options = options_for(processes, engine)
    config = write_config(**SECTIONS)
    changes = [f"train.mixed_precision={precision}", f"train.batch_size={8 // processes}", *changed]
    own_cache = iter(range(4))  # a compiler that begins anew must come to the same kernels

    def begin(*arguments):
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / f"compiled-{next(own_cache)}")}
        how = options | {"environment": options["environment"] | cache}
        return launch("--config", config, *arguments, *changes, **how)

    begin("name=whole").succeed(patience=200)
    # Compiling takes most of a minute.
    for stop_at in (12,) if "train.compile=blocks" in changed else (7, 12):
        ranks = begin("name=parts", f"checkpoint.save_every={stop_at}")
        ranks.until((tmp_path / f"runs/parts/step-{stop_at}").exists, patience=150).kill()
    begin("name=parts").succeed(patience=200)
    assert_same(tmp_path / "runs/parts", tmp_path / "runs/whole", 24)


def late() -> None:
    """The device makes the copies of a checkpoint's state late, and the thread writes them when
    training has gone on.
    """
    from mixer.checkpoints.writer import CheckpointWriter

    real_copy, real_write = CheckpointWriter._copy, CheckpointWriter._write

    def copy(writer, held):
        torch.cuda._sleep(200_000_000)  # cycles
        real_copy(writer, held)

    def write(*arguments):
        time.sleep(0.2)
        real_write(*arguments)

    CheckpointWriter._copy, CheckpointWriter._write = copy, write


@pytest.mark.parametrize(("processes", "engine"), [LAUNCHES[0], LAUNCHES[3]])
def test_a_checkpoint_holds_the_state_of_its_step_however_late_it_is_written(
    write_config, launch, tmp_path, processes, engine
):
    options = options_for(processes, engine)
    config = write_config(**SECTIONS, checkpoint={"save_every": 4}, logging={"log_every": 24})
    launch("--config", config, "name=plain", **options).succeed()
    launch("--config", config, "name=late", before=late, **options).succeed()
    for step in (20, 24):
        assert_same(tmp_path / "runs/late", tmp_path / "runs/plain", step)


def test_a_step_that_does_not_fit_names_the_sizes_and_what_to_lower(write_config, launch):
    """The logits alone have 5 GB."""
    sizes = ("train.batch_size=100000", "train.recompute=activation", "train.compile=no")
    little_memory = partial(torch.cuda.set_per_process_memory_fraction, 0.01)
    options = {"environment": ON_GPU, "before": little_memory}
    ranks = launch("--config", write_config(), *sizes, **options)
    assert ranks.wait() == [2]
    assert "out of memory on cuda (" in ranks.output and "Traceback" not in ranks.output
    assert "train.batch_size = 100000, " in ranks.output
    assert "lower train.batch_size and raise train.grad" in ranks.output
    assert "set train.recompute=block" in ranks.output


def overflowing() -> None:
    """Losses so large that fp16's gradients overflow at its first scale, and always where
    LOSS_FACTOR is infinite.
    """
    from mixer.objectives import language
    from mixer.training import optim

    real, optim.MOST_SKIPPED = language.token_nats, 10
    language.token_nats = lambda *arguments: float(os.environ["LOSS_FACTOR"]) * real(*arguments)


def test_fp16_overflows_are_skipped_counted_and_end_the_run_where_they_do_not_end(
    write_config, launch, tmp_path
):
    config = write_config(**SECTIONS)
    changes = ["train.mixed_precision=fp16", "train.max_grad_norm=1"]
    environment = ON_GPU | {"LOSS_FACTOR": "4096"}
    launch("--config", config, *changes, environment=environment, before=overflowing).succeed()
    lines = [line for line in read_lines(tmp_path / "runs/small") if "loss" in line]
    assert 0 < lines[-1]["skipped_steps"] < 20
    before, counted = 65536.0, 0
    for line in lines:  # a skipped step halves the scale
        assert (line["loss_scale"] == before / 2) == (line["skipped_steps"] == counted + 1)
        before, counted = line["loss_scale"], line["skipped_steps"]
    how = {"environment": ON_GPU | {"LOSS_FACTOR": str(math.inf)}, "before": overflowing}
    ranks = launch("--config", config, "name=never", *changes, **how)
    assert ranks.wait() == [2]
    assert "10 steps in a row were skipped, up to step 10" in ranks.output


def forbid_waiting() -> None:
    """Anything that waits for the GPU is an error, except in steps that log, save or evaluate (each
    4th here).
    """
    from mixer.training import loop

    real = loop.learning_rate

    def rate(config, step, steps):
        torch.cuda.set_sync_debug_mode("error" if step >= 4 and (step + 1) % 4 else "default")
        return real(config, step, steps)

    loop.learning_rate = rate


@launches_with(
    fp16=("fp16", ()), bf16=("bf16", ()), graphs=("bf16", GRAPHS), recipe=("fp16", RECIPE_GRAPHS)
)
def test_nothing_waits_for_the_gpu_between_logging_steps(
    write_config, launch, processes, engine, precision, changed
):
    options = options_for(processes, engine)
    config = write_config(**SECTIONS, logging={"log_every": 4}, checkpoint={"save_every": 12})
    changes = [f"train.mixed_precision={precision}", f"train.batch_size={8 // processes}", *changed]
    changes += ["train.eval_every=12"]
    ranks = launch("--config", config, *changes, before=forbid_waiting, **options)
    ranks.succeed(patience=200)


@pytest.mark.parametrize(("processes", "precision"), [(2, "no"), (2, "bf16"), (4, "bf16")])
def test_graphs_change_no_loss(write_config, launch, tmp_path, processes, precision):
    """Not even a bit of two processes', whose order of summing cannot differ, except with bf16, in
    which only graphs sum gradients.
    """
    options = options_for(processes, {})
    config = write_config(**SECTIONS)
    changes = [f"train.mixed_precision={precision}", f"train.batch_size={8 // processes}"]
    launch("--config", config, "name=plain", *changes, "train.compile=blocks", **options).succeed()
    output = launch("--config", config, "name=graphs", *changes, *GRAPHS, **options).succeed()
    assert ", replayed as a CUDA graph" in output
    plain, graphs = (read_losses(tmp_path / "runs" / name) for name in ("plain", "graphs"))
    assert graphs == (plain if precision == "no" else pytest.approx(plain, rel=1e-3))


def kernels_of_older_gpus() -> None:
    """Ampere's or Volta's kernels in place of this GPU's own, as KERNELS says."""
    from mixer.ops import cuda, selftest

    capability, facts = int(os.environ["KERNELS"]), cuda.device_facts(0)
    selftest.fault(0)  # by the GPU's own
    cuda.device_facts = lambda index: (capability, facts[1])


@pytest.mark.parametrize("capability", [80, 70])
def test_kernels_of_older_gpus_have_the_losses_of_plain_pytorch(
    write_config, launch, tmp_path, capability
):
    command = ("--config", write_config(**SECTIONS), "train.mixed_precision=fp16")
    environment = ON_GPU | {"KERNELS": str(capability)}
    options = {"environment": environment, "before": kernels_of_older_gpus}
    output = launch(*command, "name=kernels", **options).succeed()
    assert "uses 'dense'" not in output
    dense = ("name=dense", "model.mixing_backend=dense")
    launch(*command, *dense, environment=ON_GPU).succeed()
    kernels, dense = (read_losses(tmp_path / "runs" / name) for name in ("kernels", "dense"))
    assert kernels == pytest.approx(dense, rel=3e-2)
