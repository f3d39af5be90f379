"""What a comparison takes from a run's metrics."""

import pytest

from mixer.common.errors import NotFinite
from mixer.comparison import training
from mixer.comparison.plan import Run
from mixer.comparison.training import measured, train_run
from mixer.training.config import load_config


def line(step: int, seconds: float, steps: int = 10) -> dict:
    """A line of metrics, `seconds` after the last line, or after `steps` steps of a run that has
    gone on since then.
    """
    return {
        "step": step,
        "loss": 2.0,
        "seconds": seconds,
        "tokens": 100 * step,
        "tokens_per_second": 100 * steps / seconds,
        "peak_memory_gb": 1.0,
    }


def test_speed_and_time_are_those_of_the_median_step_and_the_first_steps_do_not_count():
    config = load_config(None, ["name=x", "train.batch_size=4", "train.steps=40"])
    # After step 28, the run was stopped and went on.
    lines = [line(10, 60.0), line(20, 5.0), line(30, 0.8, steps=2), line(40, 2.0)]
    lines.append({"step": 40, "validation_loss": 1.5})
    row = measured(lines, config, samples=80, is_speed=False)
    assert row["tokens_per_second"] == pytest.approx(100 / 0.4)
    assert row["training_seconds"] == pytest.approx(40 * 0.4)
    assert row["passes"] == 2.0 and row["validation_loss"] == 1.5
    assert row["training_tokens"] == 40 * 100 / 2
    fastest = measured(lines, config, samples=80, is_speed=True)
    assert fastest["tokens_per_second"] == pytest.approx(100 / 0.2)


def test_a_run_that_a_signal_stops_before_its_first_line_of_metrics_goes_on(
    small_run, tmp_path, monkeypatch
):
    def stopped(config):
        config.directory.mkdir()
        (config.directory / "metrics.jsonl").touch()

    monkeypatch.setattr(training, "train", stopped)
    # In a process of its own, a run ignores signals at its end; later tests would inherit that.
    monkeypatch.setattr(training.signal, "signal", lambda number, handler: None)
    settings = {f"data.{key}": value for key, value in small_run["data"].items()}
    assert train_run(Run("cut", settings), tmp_path, None) is None
    assert (tmp_path / "cut/metrics.jsonl").exists()


def test_a_run_that_diverges_has_no_checkpoint_to_start_from(small_run, tmp_path, monkeypatch):
    def diverging(config):
        config.directory.mkdir()
        raise NotFinite("the gradient of step 3 is not finite")

    monkeypatch.setattr(training, "train", diverging)
    settings = {f"data.{key}": value for key, value in small_run["data"].items()}
    row = train_run(Run("diverging", settings, keeps_checkpoint=True), tmp_path, None)
    assert row is not None and row["failure"] == "the gradient of step 3 is not finite"
    assert "checkpoint" not in row and not list(tmp_path.iterdir())
