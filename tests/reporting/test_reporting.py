"""Pictures show what the metrics hold, tables keep one form, and damaged metrics are named."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from markdown import rows, tables
from matplotlib.figure import Figure
from pictures import assert_png

from mixer.commands import compare, convert, curves, doctor, eval, inspect, train
from mixer.commands.curves import main as plot
from mixer.common.errors import UserError
from mixer.comparison import report as comparison_report
from mixer.evaluation.config import EvalOptions
from mixer.evaluation.evaluate import evaluate_checkpoint, evaluation_report
from mixer.reporting.curves import compare_runs, plot_training, smooth
from mixer.reporting.figure import plot_loss_by_position
from mixer.reporting.text import WIDTH, format_number, read_metrics

STEPS = list(range(1, 41))
NOT_FINITE = ("{losses: {.inf: 4}}", "{losses: {10: .inf}}", "{losses: {10: .nan}}")
AUTHOR = Path(__file__).parents[2] / "benchmarks/published.yaml"


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


def write_metrics(directory, shift=0.0, seconds=0.5, token_bytes=4.0):
    """A run's metrics: a loss at each step, and a validation loss at every tenth."""
    directory.mkdir()
    with open(directory / "metrics.jsonl", "w") as file:
        for step, loss in zip(STEPS, losses(shift), strict=True):
            line = {"step": step, "loss": loss, "tokens": 64 * step, "seconds": seconds}
            line["tokens_per_second"] = 64 / seconds
            file.write(json.dumps(line) + "\n")
            if step % 10 == 0:
                found = {"step": step, "validation_loss": loss + 0.1}
                found["validation_bits_per_byte"] = (loss + 0.1) / math.log(2) / token_bytes
                file.write(json.dumps(found) + "\n")
    return directory


def drawn_lines(axes) -> dict[str, tuple[list, list]]:
    """The lines of a plot: label -> (x, y)."""
    return {str(line.get_label()): tuple(map(list, line.get_data())) for line in axes.get_lines()}


def test_a_runs_picture_has_its_losses(tmp_path, drawn):
    run = write_metrics(tmp_path / "demo")
    plot_training(run, read_metrics(run), run / "training.png")
    (axes,) = drawn[0].axes
    shown = [curve for name, curve in drawn_lines(axes).items() if not name.startswith("_")]
    assert shown[0] == (STEPS, losses(0.0))
    assert shown[1] == (STEPS[9::10], [y + 0.1 for y in losses(0.0)[9::10]])
    assert axes.get_title(loc="left") == "demo: loss"


def test_published_losses_lie_in_a_runs_picture_as_far_as_the_run_goes(tmp_path, drawn):
    run, file = write_metrics(tmp_path / "demo"), tmp_path / "published.yaml"
    file.write_text("theirs: {source: a page, losses: {10: 4.5, 30: 4, 50: 3.5}}\n")
    curves.main([str(run), "--published", str(file)])
    (axes,) = drawn[0].axes
    assert drawn_lines(axes)["theirs: 4.000 at step 30"] == ([10, 30], [4.5, 4.0])
    curves.main([str(run), "--published", str(AUTHOR)])
    known = {"flat 512": "3.864", "Toeplitz 512": "4.150", "Toeplitz 1024": "3.901"}
    names = {f"published {run}: {loss} at step 4,000" for run, loss in known.items()}
    assert names <= drawn_lines(drawn[1].axes[0]).keys()
    for wrong in ("[3]", "{losses: {}}", "{losses: {10: low}}", *NOT_FINITE):
        file.write_text(f"theirs: {wrong}")
        with pytest.raises(UserError, match="published.yaml is not a file of losses by step"):
            curves.main([str(run), "--published", str(file)])


def test_smoothing_means_stretches_of_a_long_run_and_does_not_lag_behind():
    assert smooth([1, 2, 3], [5.0, 3.0, 4.0]) == ([1, 2, 3], [5.0, 3.0, 4.0])
    steps = list(range(1000))
    noisy = [10 - step / 100 + (-1) ** step for step in steps]
    at, means = smooth(steps, noisy)
    assert len(at) == 50
    np.testing.assert_allclose(means, [10 - step / 100 for step in at])
    for count in (51, 60, 99, 130):  # no stretch is much noisier than another
        at, means = smooth(steps[:count], [(-1) ** step for step in steps[:count]])
        assert 20 < len(at) <= 50 and np.abs(means).max() <= 1 / 3


def evaluated(label: str, losses: list) -> dict:
    """Of an evaluation with windows beyond the trained context."""
    about = {"label": label, "context": 8, "loss_second_half": 1.0}
    return about | {"loss_by_position": losses, "count_by_position": [9] * len(losses)}


DRAW = {
    "training": lambda run, file: plot_training(run, read_metrics(run), file),
    "comparison": lambda run, file: compare_runs({str(run): read_metrics(run)}, file),
    "position": lambda run, file: plot_loss_by_position([evaluated(run.name, losses(0))], file),
    "rising": lambda run, file: plot_loss_by_position([evaluated(run.name, STEPS)], file),
}


def pixels(line) -> np.ndarray:
    """Points (count, 2) close together along a line."""
    points = line.get_transform().transform(line.get_xydata())
    return np.concatenate([np.linspace(*pair, 200) for pair in itertools.pairwise(points)])


@pytest.mark.parametrize("kind", DRAW)
def test_no_picture_cuts_a_curve_off_or_covers_it(tmp_path, drawn, kind):
    """Whatever a run is called: its curves have room. The legend is inside if it has room there."""
    run = write_metrics(tmp_path / ("_$x^{" + 20 * "long"))
    lines = (run / "metrics.jsonl").read_text()
    first = {"step": 0, "loss": 90.0, "seconds": 0.1}
    more = [json.dumps(first | {"step": step, "loss": 3.0}) for step in range(41, 200)]
    (run / "metrics.jsonl").write_text("\n".join([json.dumps(first), lines.strip(), *more]) + "\n")
    DRAW[kind](run, tmp_path / "drawn.png")
    assert_png(tmp_path / "drawn.png")
    axes = drawn[0].axes[0]
    low, high = axes.get_ylim()
    drawn_losses = [
        y for _, y in drawn_lines(axes).values() if y != [0, 1]
    ]  # but for upright lines
    assert drawn_losses and all(np.nanmin(y) >= low for y in drawn_losses)
    assert all(np.nanmax(y) <= high for y in drawn_losses)
    legend, box = axes.get_legend(), axes.get_window_extent()
    assert box.width > 800 and legend.get_texts()  # pixels
    place = legend.get_window_extent()
    assert not any(place.count_contains(pixels(line)) for line in axes.get_lines())
    assert (place.x0 > box.x1) == (kind != "training") and place.x1 < drawn[0].bbox.width


def test_a_loss_by_position_begins_at_the_first_token_and_leaves_out_what_is_unknown(
    tmp_path, drawn
):
    losses = [None, 3.0, 2.5], [5.0, 3.5, 2.5]  # of two runs with one name
    results = [evaluated("a", each) for each in losses]
    plot_loss_by_position(results, tmp_path / "position.png")
    _, a, _, b, context = [line.get_data() for line in drawn[0].axes[0].get_lines()]
    assert list(context[0]) == [8, 8]  # marked once
    np.testing.assert_array_equal(a, ([2, 3], [3.0, 2.5]))
    np.testing.assert_array_equal(b, ([1, 2, 3], [5.0, 3.5, 2.5]))


def test_the_command_draws_one_run_or_compares_several(tmp_path, drawn, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [write_metrics(Path("slow")), write_metrics(Path("fast"), -0.5, 0.25)]
    curves.main([str(runs[1] / "metrics.jsonl")])
    curves.main([*map(str, runs), "--output", "."])
    pictures = [runs[1] / "training.png", Path("comparison.png")]
    for picture in pictures:
        assert_png(picture)
    assert not list(runs[0].glob("*.png"))
    text = capsys.readouterr().out
    assert [text.splitlines()[n] for n in (0, -1)] == list(map(str, pictures))
    header, slow, fast = rows(text)
    assert header == ["run", "steps", "seconds", "validation loss", "bits/byte"]
    assert slow[:4] == [str(runs[0]), "40", "20.0", f"{losses(0)[-1] + 0.1:.4f}"]
    assert fast[:4] == [str(runs[1]), "40", "10.0", f"{losses(-0.5)[-1] + 0.1:.4f}"]
    assert fast[4] == f"{(losses(-0.5)[-1] + 0.1) / math.log(2) / 4:.4f}"
    times = ([5, 10, 15, 20], [2.5, 5, 7.5, 10])
    shown = drawn_lines(drawn[1].axes[0]).values()
    for curve, shift, seconds in zip(shown, (0, -0.5), times, strict=True):
        np.testing.assert_allclose(curve[0], seconds)
        np.testing.assert_allclose(curve[1], [y + 0.1 for y in losses(shift)[9::10]])
    (runs[1] / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0, "seconds": 1.0}\n')
    with pytest.raises(UserError, match="fast has no validation loss yet"):
        curves.main([*map(str, runs)])
    with pytest.raises(UserError, match="^runs/none does not exist: give a run"):
        curves.main(["runs/none"])
    assert not Path("runs").exists()
    (runs[0] / "step-4/trainer_state").mkdir(parents=True)  # as a checkpoint has
    (runs[0] / "best").symlink_to("step-4")
    for name in ("step-4", "best"):
        with pytest.raises(
            UserError, match=f"^slow/{name}/metrics.jsonl does not exist: give slow$"
        ):
            curves.main([f"slow/{name}"])
    with pytest.raises(UserError, match="^metrics.jsonl does not exist: give .* or slow$"):
        curves.main(["."])


@pytest.mark.parametrize("start", [0, 20], ids=["at once", "after a slow start"])
def test_the_time_of_a_run_that_went_on_between_two_lines_is_that_of_all_its_steps(
    tmp_path, drawn, capsys, monkeypatch, start
):
    monkeypatch.chdir(tmp_path)
    runs = [write_metrics(Path("whole")), write_metrics(Path("resumed"))]
    lines = read_metrics(runs[1])
    window = next(line for line in lines if line["step"] == 30 and "loss" in line)
    # nine of ten of its steps were done before the run was stopped
    trained = window["tokens_per_second"] * window["seconds"] / 10
    window["seconds"] = window["seconds"] / 10 + start
    window["tokens_per_second"] = trained / window["seconds"]
    (runs[1] / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    curves.main([*map(str, runs)])
    whole, resumed = drawn_lines(drawn[-1].axes[0]).values()
    assert resumed[1] == whole[1]
    assert resumed[0][:2] == whole[0][:2]  # at steps 10 and 20
    assert resumed[0][2:] == pytest.approx([seconds + start for seconds in whole[0][2:]])


def test_losses_of_other_tokens_are_not_to_be_compared(tmp_path, drawn, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_metrics(Path("one"))
    for name, token_bytes in (("same", 4.0), ("other", 3.0)):
        write_metrics(Path(name), -0.5, token_bytes=token_bytes)
        curves.main(["one", name])
        differs = "texts differ: compare bits" in capsys.readouterr().out
        assert differs == (name == "other")
        ends = [y[-1] for _, y in drawn_lines(drawn[-1].axes[0]).values()]
        measured = [read_metrics(run)[-1] for run in ("one", name)]
        key = "validation_bits_per_byte" if differs else "validation_loss"
        assert ends == [line[key] for line in measured]
        assert ("bits per byte" in drawn[-1].axes[0].get_ylabel()) == differs


def test_a_cell_has_four_decimals_where_a_number_is_neither_large_nor_tiny():
    shown = [format_number(value) for value in (0.25, -0.00123, 1.5, 0.000123, 12345.6, 7, 2e9)]
    assert shown == ["0.2500", "-0.0012", "1.5000", "0.0001", "12,346", "7", "2.000e+09"]


def test_a_quantity_has_the_same_form_in_every_report(finished, tmp_path):
    measured = {"accuracy": 0.4494, "tokens_per_second": 639.3135, "peak_memory_gb": 0.5913}
    measured |= {"bits_per_byte": 1.3, "top1_of_32": 0.5}
    compared = comparison_report.cells(measured)
    (tmp_path / "text.txt").write_text("a few words of a text " * 9)
    texts = [str(tmp_path / "text.txt")]
    options = EvalOptions(str(finished / "step-12"), text=texts, window=16, device="cpu")
    perplexities = {"token_perplexity": 12.4718, "word_perplexity": 80812.7}
    report = evaluation_report([evaluate_checkpoint(options) | measured | perplexities])
    evaluated = {}
    for titles, cells in tables(report):
        evaluated |= dict(zip(titles, cells, strict=True))
    assert (evaluated["word ppl"], evaluated["token ppl"]) == ("80,812.70", "12.47")
    for title, cell in (("accuracy", "44.94%"), ("tokens/s", "639"), ("bits/byte", "1.3000")):
        assert evaluated[title] == compared[title] == cell
    assert evaluated["top1 of 32"] == compared["top1 of 32"] == "50.0%"
    assert evaluated["peak memory, GB"] == compared["memory, GB"] == "0.6"


DAMAGED = [
    b'{"step": 2, "lo',
    b"[" * 100_000,
    b'{"step": 2, "loss": 1}\xff',
    b"[1, 2]",
    b"7",
    b'{"loss": 3.0}',
    b'{"step": true}',
    b'{"step": 2, "loss": NaN}',
    b'{"step": 2, "loss": "3"}',
    b'{"step": 2, "loss": [1]}',
    b'{"step": 2, "loss": ' + b"9" * 400 + b"}",
    b'{"step": 2, "loss": ' + b"9" * 5000 + b"}",
]


def test_damaged_lines_of_metrics_are_left_out_and_counted(tmp_path, capsys):
    good = [b'{"step": 1, "loss": 2.0}', b'{"step": 3, "loss": null}']
    lines = [good[0], *DAMAGED, b"", good[1], b'{"step": 4']  # the last one is being written
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
    assert read_metrics(tmp_path) == [*map(json.loads, good)]
    plot([str(tmp_path)])
    said = capsys.readouterr().err.splitlines()
    line = f"{tmp_path / 'metrics.jsonl'}: left out {len(DAMAGED)} lines, no JSON object"
    assert len(said) == 2 and all(line in each for each in said)  # once each time it is read


def test_what_commands_print_fits_into_the_terminal_and_reports_into_100_columns(
    finished, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")  # of the terminal
    checkpoint = ["--checkpoint", str(finished / "step-12")]
    eval.main([*checkpoint, "--stride", "9", "--device", "cpu"])
    inspect.main(checkpoint)
    for command in (train.main, compare.main, convert.main, lambda _: doctor.main([])):
        with pytest.raises(SystemExit):
            command(["--help"])
    printed = capsys.readouterr().out.replace(str(tmp_path), "")
    assert [line for line in printed.splitlines() if len(line) > 80] == []
    (written,) = finished.glob("eval-step-12*/report.md")
    reports = written.read_text() + (finished / "inspect-step-12/index.md").read_text()
    lengths = [len(line) for line in reports.replace(str(tmp_path), "").splitlines()]
    assert 80 < max(lengths) <= WIDTH
