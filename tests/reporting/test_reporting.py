"""Pictures show what the metrics hold, tables keep one form, and damaged metrics are named."""

import json
import math

import numpy as np
import pytest
from launching import run_python
from matplotlib.figure import Figure
from pictures import assert_png

from mixer import report
from mixer.reporting.curves import plot_comparison, plot_loss_by_position, plot_training, smooth
from mixer.reporting.metrics_file import read_metrics
from mixer.reporting.tables import table

STEPS = list(range(1, 41))


@pytest.fixture
def drawn(monkeypatch) -> list[Figure]:
    """The figures that were saved."""
    figures, save = [], Figure.savefig

    def savefig(figure, *arguments, **settings):
        figures.append(figure)
        save(figure, *arguments, **settings)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return figures


def losses(shift: float) -> list[float]:
    return [2 + 7 * math.exp(-step / 40) + shift for step in STEPS]


def write_metrics(directory, shift=0.0):
    """A run's metrics: a loss at each step, and a validation loss at every tenth."""
    directory.mkdir()
    with open(directory / "metrics.jsonl", "w") as file:
        for step, loss in zip(STEPS, losses(shift), strict=True):
            line = {"step": step, "loss": loss, "lr": 1e-3 * step, "tokens_per_second": 9e3 + step}
            file.write(json.dumps(line) + "\n")
            if step % 10 == 0:
                file.write(json.dumps({"step": step, "validation_loss": loss + 0.1}) + "\n")
    return directory


def curves(axes) -> dict[str, tuple[list, list]]:
    """The lines of a plot: label -> (x, y)."""
    return {
        str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata()))
        for line in axes.get_lines()
    }


def test_a_runs_picture_has_its_losses_its_learning_rate_and_its_speed(tmp_path, drawn):
    run = write_metrics(tmp_path / "demo")
    assert_png(plot_training(run, run / "training.png"))
    left, rate, speed = drawn[0].axes
    assert curves(left)["training"] == (STEPS, losses(0.0))
    assert curves(left)["validation"] == (STEPS[9::10], [y + 0.1 for y in losses(0.0)[9::10]])
    assert [list(axes.get_lines()[0].get_ydata()) for axes in (rate, speed)] == [
        [1e-3 * step for step in STEPS],
        [9e3 + step for step in STEPS],
    ]
    assert left.get_title(loc="left") == "demo: loss"


def test_smoothing_does_not_lag_behind():
    assert smooth([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], span=4) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert smooth([0.0, 0.0, 6.0, 0.0, 0.0], span=2) == [0.0, 2.0, 2.0, 2.0, 0.0]


def test_a_comparisons_picture_has_each_loss_and_the_gaps_to_the_first(tmp_path, drawn):
    runs = {name: write_metrics(tmp_path / name, shift) for name, shift in (("a", 0), ("b", 0.02))}
    plot_comparison(runs, tmp_path / "gap.png")
    above, below = drawn[0].axes
    assert curves(above) == {"a": (STEPS, losses(0)), "b": (STEPS, losses(0.02))}
    gaps = below.get_lines()[0].get_ydata()
    np.testing.assert_allclose(gaps, [2 / loss for loss in losses(0)])  # in percent


def test_a_loss_by_position_begins_at_the_first_token_and_leaves_out_what_is_unknown(
    tmp_path, drawn
):
    plot_loss_by_position({"a": [None, 3.0, 2.5], "b": [5.0, 3.5, 2.5]}, tmp_path / "position.png")
    shown = curves(drawn[0].axes[0])
    assert shown["a"] == ([2, 3], [3.0, 2.5]) and shown["b"] == ([1, 2, 3], [5.0, 3.5, 2.5])


def test_the_command_draws_one_run_or_compares_several(tmp_path, capsys):
    runs = [write_metrics(tmp_path / name) for name in ("cuda", "dense")]
    report.main([str(runs[1] / "metrics.jsonl")])
    assert_png(runs[1] / "training.png")
    report.main([*map(str, runs), "--output", str(tmp_path)])
    assert_png(tmp_path / "comparison.png")
    written = [str(runs[1] / "training.png"), str(tmp_path / "comparison.png")]
    assert capsys.readouterr().out.splitlines() == written


def test_a_table_has_text_on_the_left_and_numbers_in_one_form():
    rows = [
        {"name": "a", "x": 1234567.0, "y": 0.5, "z": 3e-7},
        {"name": "b", "x": 2} | dict.fromkeys("yz"),
    ]
    assert table(rows).splitlines() == [
        "| name | x | y | z |",
        "| --- | ---: | ---: | ---: |",
        "| a | 1,234,567 | 0.5000 | 3e-07 |",
        "| b | 2 | over 1e308 | over 1e308 |",
    ]


DAMAGED = {
    b'{"step": 2, "lo': "is not JSON",
    b"[" * 100_000: "is not JSON",
    b'{"step": 2, "loss": 1}\xff': "is not UTF-8",
    b"[1, 2]": "is not an object",
    b"7": "is not an object",
    b'{"loss": 3.0}': "is not an object",
    b'{"step": true}': "is not an object",
    b'{"step": 2, "loss": NaN}': "holds a number that is not finite",
    b'{"step": 2, "loss": "3"}': "holds a value that is not a number",
    b'{"step": 2, "loss": [1]}': "holds a value that is not a number",
    b'{"step": 2, "loss": ' + b"9" * 400 + b"}": "holds a value that is not a number",
    b'{"step": 2, "loss": ' + b"9" * 5000 + b"}": "holds a value that is not a number",
}


@pytest.mark.parametrize(("damaged", "problem"), DAMAGED.items(), ids=range(len(DAMAGED)))
def test_a_damaged_line_of_metrics_is_left_out_and_named(tmp_path, damaged, problem):
    good = b'{"step": 1, "loss": 2.0}\n', b'{"step": 3, "loss": null}\n'
    (tmp_path / "metrics.jsonl").write_bytes(good[0] + damaged + b"\n\n" + good[1] + b'{"step": 4')
    said = []
    assert read_metrics(tmp_path, said.append) == [
        {"step": 1, "loss": 2.0},
        {"step": 3, "loss": None},
    ]
    assert said == [f"{tmp_path / 'metrics.jsonl'}: left out line 2 {problem}"] or (
        problem == "is not an object" and f"left out line 2 {problem} with an" in said[0]
    )


def test_the_report_command_says_error_and_exits_2(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "lo')
    done = run_python("-m", "mixer.report", tmp_path, output=tmp_path / "printed")
    assert done.returncode == 2
    assert "error:" in done.stdout and "no line that can be read" in done.stdout
    assert "Traceback" not in done.stdout
