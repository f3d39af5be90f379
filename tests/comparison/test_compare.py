"""The comparison, with its runs in real processes."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from launching import run_python
from markdown import rows, tables
from runs import file_limit, read_losses, state_files

from mixer.common.errors import UserError
from mixer.common.locks import run_locked
from mixer.compare import main
from mixer.comparison import runs
from mixer.comparison.entrants import entrants_of
from mixer.comparison.report import speed_table
from mixer.comparison.result import Measured, Timing, gap, mixing_share, spread
from mixer.reporting.tables import WIDTH
from mixer.training.config import load_config


def options(config: Path, output: Path) -> list[str]:
    return ["--config", str(config), "--output", str(output)]


@pytest.fixture
def forked_runs(monkeypatch):
    """The commands of the runs as they are, in processes that need not import first."""

    def run(command, stdout, stderr):
        assert command[0] == sys.executable
        return run_python(*command[1:], output=Path(stdout.name))

    monkeypatch.setattr(runs, "subprocess", SimpleNamespace(run=run, STDOUT=subprocess.STDOUT))


def test_backends_are_compared_by_steps_and_a_transformer_gets_its_time(
    write_config, tmp_path, forked_runs, capsys
):
    output = tmp_path / "compared"
    common = ["--config", write_config(), "--output", output, "--repeats", 1, "--timing-steps", 4]
    common = [*map(str, common), "checkpoint.save_last=false", "checkpoint.save_every=0"]
    twice = ["train.gradient_accumulation_steps=2"]
    main([*common, "--backends", "dense", "auto", *twice])
    text, result = (output / "report.md").read_text(), read_report(output)
    agree = "dense and auto agree: training losses apart by"
    said = capsys.readouterr().out
    assert agree in said and agree in text
    assert max(map(len, (said + text).replace(str(tmp_path), "").splitlines())) <= WIDTH
    shown, shortest = rows(text), result["equal_seconds"]
    for name, model in result["models"].items():  # the same losses, so the slower one is behind
        (row,) = [row for row in shown if row[0] == name and row[1] == "12"]
        assert row[5:7] == [
            f"{model[key]:.4f}" for key in ("validation_loss", "validation_loss_at_equal_time")
        ]
        ends = model["training_seconds"] == shortest
        assert ends == (model["validation_loss"] == model["validation_loss_at_equal_time"])
    dense, auto = (read_losses(output / f"runs/{name}") for name in ("dense", "auto"))
    assert list(dense) == list(range(1, 13))
    largest = max(abs(auto[step] / loss - 1) for step, loss in dense.items())
    assert result["gaps"][0]["largest"] == pytest.approx(largest, abs=1e-12)
    assert "16 x 32 tokens a step" in text
    assert result["limit"]["median"] > 0 and "no mixing (limit)" in text
    for model in result["models"].values():
        speed = model["tokens_per_second"]["median"]
        share = 1 - speed / result["limit"]["median"]
        assert model["token_mixing_share"]["median"] == pytest.approx(share)
        assert model["tokens_per_second"]["lowest"] == model["tokens_per_second"]["highest"] > 0
        assert model["flops_per_token"]["executed"] > model["flops_per_token"]["useful"]
    for name in ("losses.png", "throughput.png", "budgets.png", "dense.jsonl", "auto.jsonl"):
        assert (output / name).stat().st_size > 0

    # Overrides may follow the backends, and shared lags are for the mixers of a comparison alone.
    muon = ["optim.name=muon", "optim.shared_lags=true"]
    llama = [*common, "--seconds", "0.5", "--backends", "llama:32x2", *muon]
    with pytest.raises(UserError, match="exists already; choose another --output"):
        main(llama)
    main([*llama, "--resume"])
    result, metrics = read_report(output), output / "runs/llama-32x2/metrics.jsonl"
    (model,) = result["models"].values()
    steps = round(0.5 * model["tokens_per_second"]["median"] / (8 * 32))
    assert model["steps"] == max(1, steps) and not result["gaps"]
    assert model["token_mixing_share"] is None
    shape = (
        "llama:32x2: transformers' LlamaForCausalLM, hidden 32, 2 heads of 16, 2 layers, "
        "gated MLP of 64, no norms of queries and keys."
    )
    assert shape in " ".join((output / "report.md").read_text().split())
    timing = output / "runs/llama-32x2-timing-1/metrics.jsonl"
    timed = timing.stat().st_mtime_ns
    metrics.write_text("")  # as a run leaves it that is killed before its first line
    main([*llama, "--resume"])
    assert len(read_losses(metrics.parent)) == model["steps"] and timing.stat().st_mtime_ns == timed
    few = r"--seconds 1e-06 gives llama:32x2 1 steps; allowed: optim.warmup_steps = 3 or more"
    with pytest.raises(UserError, match=few):
        main([*llama, "--resume", "--seconds", "1e-6"])

    written = metrics.stat().st_mtime_ns
    command = ["-m", "mixer.compare", *llama, "--resume"]  # what is complete is not repeated
    done = run_python(*command, output=tmp_path / "printed")
    assert done.returncode == 0 and str(output / "report.md") in done.stdout, done.stdout
    assert metrics.stat().st_mtime_ns == written
    before = state_files(output)
    with file_limit(9_000), pytest.raises(UserError, match=f"{output}.* could not be written"):
        main([*llama, "--resume"])
    assert state_files(output) == before


def test_each_model_trains_with_several_seeds_at_the_best_of_the_same_rates(
    write_config, tmp_path, forked_runs
):
    output, models = tmp_path / "compared", tmp_path / "models.yaml"
    models.write_text(
        "wide: {model.hidden_size: 64, train.gradient_accumulation_steps: 2}\n"
        "llama: {model.architecture: llama, model.num_attention_heads: 2}\n"
    )
    command = ["--config", write_config(), "--models", models, "--output", output, "--repeats", 1]
    command += ["--timing-steps", 2, "--tune", "lr", "--tune-share", 0.5, "--seeds", 2]
    command = [*map(str, command), "--rates", "1e-3", "1e-2", "1e30", "optim.schedule=linear"]
    main([*command, "train.max_grad_norm=0"])
    result, text = read_report(output), (output / "report.md").read_text()
    assert result["settings"]["optim"]["schedule"] == "linear"
    for name, model in result["models"].items():
        runs = output / "runs"
        tried = {rate: runs / f"{name}-lr-{rate}" for rate in ("0.001", "0.01")}
        losses = {float(rate): last_validation(run) for rate, run in tried.items()}
        assert len(read_losses(tried["0.01"])) == model["sweep"]["steps"] == 6
        assert model["sweep"]["losses"].pop("1e+30") is None
        assert {float(rate): loss for rate, loss in model["sweep"]["losses"].items()} == losses
        assert model["lr"] == min(losses, key=losses.get) == 0.01
        assert f"**{losses[0.01]:.4f}**" in text
        seeds = [last_validation(runs / name), last_validation(runs / f"{name}-seed-1")]
        assert seeds[0] != seeds[1] and len(read_losses(runs / name)) == 12
        assert list(model["validation_loss_by_seed"].values()) == seeds
        assert model["validation_loss"] == pytest.approx(sum(seeds) / 2)
        assert model["token_mixing_share"] is None  # the limit would be a model of its own size
        config = load_config(str(runs / f"{name}-seed-1/config.yaml"), [])
        assert config.optim.lr == 0.01 and config.seed == 1
    assert result["models"]["wide"]["parameters"] > 2 * result["models"]["llama"]["parameters"]
    assert "diverged" in text and "seeds 0, 1" in text
    assert "- 16 x 32 (wide), 8 x 32 (llama) tokens a step" in text
    assert "wide: the best rate" not in text  # it is not the last on its side
    assert (output / "budgets.png").stat().st_size > 0

    runs = [output / "runs" / name / "metrics.jsonl" for name in ("wide", "wide-lr-1e+30")]
    written = [run.stat().st_mtime_ns for run in runs]
    main([*command, "train.max_grad_norm=0", "--resume"])
    assert [run.stat().st_mtime_ns for run in runs] == written, "a run that had ended is repeated"


def last_validation(run: Path) -> float:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if "validation_loss" in line][-1]["validation_loss"]


def read_report(output: Path) -> dict:
    return json.loads((output / "report.json").read_text())


def test_the_share_of_token_mixing_is_the_speed_missing_to_the_limit():
    def timings(*speeds):
        return [Timing(speed, peak_memory_gb=1.0) for speed in speeds]

    limit = spread(timings(1000, 800, 900))
    model = Measured("dense", True, None, timings(600, 720, 640), None, {})
    share = mixing_share(model, limit)
    expected = {"median": 1 - 640 / 900, "lowest": 1 - 720 / 800, "highest": 1 - 600 / 1000}
    assert share == pytest.approx(expected)
    assert mixing_share(model, None) is None
    assert mixing_share(Measured("llama", False, None, timings(600), None, {}), limit) is None

    counted = {"parameters": 1e6, "useful_tflops": 1.0, "executed_tflops": 2.0}
    counted |= {"useful_share_of_peak": None, "peak_memory_gb": 1.0}
    counted |= {"start_up_seconds": 1.0}
    counted |= {"tokens_per_second": spread(model.timings)}
    models = {name: counted | {"token_mixing_share": s} for name, s in (("a", share), ("b", None))}
    titles, *shown, _ = tables(speed_table({"models": models, "limit": limit}))[0]
    column = titles.index("token mixing")
    assert [row[column] for row in shown] == ["28.9% (10.0% to 40.0%)", "-"]


@pytest.mark.parametrize(
    ("factors", "within"),
    (([1.0] * 20, True), ([1.0] * 19 + [1.006], False), ([1.0] * 18 + [1.002] * 2, False)),
)
def test_losses_of_backends_must_agree_at_every_step_and_closer_at_the_end(factors, within):
    """0.5% at each logged step, and 0.1% between the means of the last tenth."""
    lines = [{"step": step, "loss": 3.0} for step in range(1, 21)]
    others = [
        line | {"loss": line["loss"] * factor} for line, factor in zip(lines, factors, strict=True)
    ]
    models = [
        Measured(name, True, None, [], None, {0: of}) for name, of in (("a", lines), ("b", others))
    ]
    assert gap(*models)["within_tolerance"] is within


@pytest.mark.parametrize(
    "backends, message",
    [
        (
            ["dense", "llama:30x4"],
            "num_attention_heads is 4; allowed: 1 or more, that divide hidden_size 30",
        ),
        (["dens"], "--backends dens; allowed: auto, cuda, dense, llama"),
        (["dense", "dense"], "one is named twice"),
        (["dense", "train.stepz=3"], "unknown key train.stepz"),
        (["dense", "--seeds", "0"], "--seeds is 0; allowed: 1 or more"),
        (["dense", "--rates", "1e-3"], "--rates is for --tune lr"),
        (
            ["dense", "--tune", "lr", "--rates", "0"],
            r"--rates has \[0.0\]; allowed: numbers above 0",
        ),
        (["dense", "--tune", "lr", "--rates", "x"], "--rates x; allowed: numbers above 0"),
        (["dense", "--tune-share", "nan"], "--tune-share is nan; allowed: above 0, at most 1"),
        (["dense", "--seconds", "-1"], "--seconds is -1; allowed: above 0"),
        *(
            (["dense", "--seconds", value], f"--seconds is {value}; allowed: above 0 and finite")
            for value in ("nan", "inf", "0")
        ),
    ],
)
def test_mistakes_show_before_anything_runs(write_config, tmp_path, backends, message):
    with pytest.raises(UserError, match=message):
        main([*options(write_config(), tmp_path / "out"), "--backends", *backends])
    assert not (tmp_path / "out").exists()


def test_a_run_whose_last_checkpoint_could_not_be_saved_is_run_again(finished):
    run = load_config(str(finished / "config.yaml"), [f"output_dir={finished.parent}"])
    assert runs.reached_end(run)
    (finished / "step-12/model.safetensors").unlink()
    assert not runs.reached_end(run)


def test_a_model_of_a_file_may_be_named_by_its_size(tmp_path):
    file = tmp_path / "models.yaml"
    file.write_text("512: {model.hidden_size: 512}")
    (who,) = entrants_of(str(file))
    assert who.folder == who.name == "512"


def test_runs_that_a_comparison_did_not_make_are_never_replaced(write_config, tmp_path):
    output = tmp_path / "mine"
    weights = output / "runs" / "auto" / "step-9" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"weeks of training")
    command = [*options(write_config(), output), "--resume", "--backends", "dense", "auto"]
    refused = "--resume: .*mine is not a comparison's, which has comparison-logs in it"
    with pytest.raises(UserError, match=refused):
        main(command)
    # A comparison that was begun, and a run of the user's that has an entrant's name.
    (output / "comparison-logs").mkdir()
    refused = "runs/auto is not a run of this comparison, .*; move it, or choose another --output"
    with pytest.raises(UserError, match=refused):
        main(command)
    assert weights.read_bytes() == b"weeks of training"
    assert not (output / "runs" / "dense-timing-1").exists()


def test_a_run_that_outlives_a_killed_comparison_is_not_begun_beside_itself(write_config, tmp_path):
    command = [*options(write_config(), tmp_path / "out"), "--backends", "dense", "--resume"]
    log = tmp_path / "out/comparison-logs/dense-timing-1.txt"
    log.parent.mkdir(parents=True)
    log.write_text("of the run that goes on")
    run = tmp_path / "out/runs/dense-timing-1"
    with run_locked(run):
        with pytest.raises(UserError, match="dense-timing-1 is being trained by another process"):
            main(command)
        assert run.exists() and log.read_text() == "of the run that goes on"


def test_divergence_is_found_above_what_torchrun_prints_after_it(tmp_path):
    log = tmp_path / "run.txt"
    log.write_text("error: the gradient of step 2 is not finite\n" + 30 * "of torchrun\n")
    assert runs.has_diverged(log)


def test_a_run_that_fails_ends_the_comparison_with_its_own_words(
    write_config, tmp_path, forked_runs
):
    keys = ["data.source=text", "data.path=none.txt", f"data.directory={tmp_path / 'data'}"]
    words = r"dense-timing-1 ended with status 2(.|\n)*'none.txt' is no file"
    with pytest.raises(UserError, match=words):
        main([*options(write_config(), tmp_path / "out"), "--backends", "dense", *keys])


def test_a_run_that_a_signal_stopped_is_not_taken_for_a_whole_one(
    write_config, tmp_path, launch, monkeypatch
):
    metrics = tmp_path / "out/runs/dense-timing-1/metrics.jsonl"

    def run(command, stdout, stderr):  # stops it in the middle
        assert command[:3] == [sys.executable, "-m", "mixer.train"]
        training = launch(*command[3:])
        training.until(lambda: metrics.exists() and '"step": 40,' in metrics.read_text()).stop()
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(runs, "subprocess", SimpleNamespace(run=run, STDOUT=subprocess.STDOUT))
    command = [*options(write_config(), tmp_path / "out"), "--timing-steps", "40"]
    stopped = "dense-timing-1 was stopped before its last step .--resume does it again.; all of"
    with pytest.raises(UserError, match=stopped):
        main([*command, "--backends", "dense"])
