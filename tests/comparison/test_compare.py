"""Models side by side: each trains by the trainer itself, goes on where it was cut, is compared."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import train_plan
import yaml
from launching import run_python, start_python
from markdown import rows as rows_of
from runs import ROOT, read_lines

from mixer.commands.compare import main
from mixer.common.errors import UserError
from mixer.common.files import results_locked
from mixer.common.hardware import commit
from mixer.common.values import read_yaml
from mixer.comparison import study
from mixer.comparison.plan import Model, Run, jobs_of
from mixer.comparison.side_by_side import plan_of
from mixer.data.config import FILE_SOURCES

SCRIPT = ROOT / "benchmarks" / "train_plan.py"
PLANS = ROOT / "benchmarks" / "plans"


@pytest.fixture
def train(small_run, tmp_path):
    """Writes a plan and returns the command that trains it, which writes tmp_path/results."""
    sections = ("model", "data", "train", "optim", "logging")
    common = {f"{part}.{key}": value for part in sections for key, value in small_run[part].items()}
    common |= {"train.non_finite": "skip"}  # as fp16 does: it skips steps to the end

    def command(plan: dict) -> list:
        plan = {"common": common | plan.pop("common", {})} | plan
        (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan, sort_keys=False))
        output = tmp_path / "results"
        return [SCRIPT, tmp_path / "plan.yaml", "--output", output, "--commit", "abc"]

    return command


def runs_in(file: Path) -> dict:
    return json.loads(file.read_text())["runs"]


def test_backends_and_a_transformer_are_compared_by_steps(write_config, tmp_path):
    output = tmp_path / "compared"
    command = ["-m", "mixer", "compare", "--config", write_config(), "--output", output]
    (tmp_path / "mine.json").write_text('{"model_type": "gpt2", "n_layer": 1, "n_embd": 24}')
    command += ["--backends", "dense", "llama", tmp_path / "mine.json", "--seeds", 2]
    command += ["train.gradient_accumulation_steps=2"]  # overrides may follow
    printed = run_python(*command, output=tmp_path / "printed")
    runs, text = runs_in(output / "report.json"), (output / "report.md").read_text()
    assert text.partition("\n![")[0] in printed  # all but the picture
    assert all(len(line) <= 100 for line in text.splitlines() if "/" not in line)  # no paths
    assert runs["dense"]["steps"] == 12 and runs["dense"]["tokens_a_step"] == 16 * 32
    assert runs["dense"]["text_sha256"] == runs["llama"]["text_sha256"]
    mine = runs["mine.json"]
    assert mine["settings"]["model.config"]["n_embd"] == 24  # kept, whatever becomes of the file
    assert mine["parameters"] == 24 * (400 + 32) + 12 * 24**2 + 13 * 24 + 2 * 24
    assert all(runs["dense"][key] > 0 for key in ("useful_tflops", "peak_memory_gb", "parameters"))
    losses = [runs[name]["validation_loss"] for name in ("dense", "dense, seed 1")]
    assert losses[0] != losses[1] and f"{losses[0]:.4f} (0), {losses[1]:.4f} (1)" in text
    (row,) = [row for row in rows_of(text) if row[0] == "dense" and "12" in row]
    assert f"{losses[0]:.4f}" in row

    with pytest.raises(UserError, match="'dense' with other options: train.batch_size"):
        main([*map(str, command[3:]), "train.batch_size=4"])
    other = ["--backends", "auto", "data.source=text", "data.path=b"]
    with pytest.raises(UserError, match="'dense' of other data: data.path None, not b, data.so"):
        main([*map(str, command[3:7]), *other])


def test_a_comparison_goes_on_where_its_output_fails_as_that_of_a_closed_terminal_does(
    train, tmp_path
):
    compared = start_python(*train({"runs": {"one": {}, "two": {}}}), output=Path("/dev/full"))
    compared.join(60)
    assert compared.exitcode == 0 and runs_in(tmp_path / "results.json").keys() == {"one", "two"}


def test_a_mixer_and_a_transformer_are_compared_for_a_time(write_config, tmp_path):
    """Mixing weights by lag are for the mixers of a comparison alone."""
    output, options = tmp_path / "compared", ["optim.name=muon", "model.mixing_weight=lags"]
    command = ["-m", "mixer", "compare", "--config", write_config(), "--output", output]
    command += ["--backends", "dense", "llama", "--seconds", 0.3, *options]
    run_python(*command, output=tmp_path / "printed")
    runs, text = runs_in(output / "report.json"), (output / "report.md").read_text()
    for name in ("dense", "llama"):
        speed, final = (row for row in runs.values() if row["kind"] == name)
        wanted = min(0.3 * speed["tokens_per_second"], 4 * speed["training_tokens"])
        assert final["tokens"] == pytest.approx(wanted, abs=256)
        assert f"{final['validation_loss']:.4f}" in text
    assert (output / "report.png").stat().st_size > 0


def test_a_second_comparison_into_one_output_is_refused(write_config, tmp_path):
    output = tmp_path / "compared"
    command = ["--config", str(write_config()), "--output", str(output), "--backends", "dense"]
    with results_locked(output / "report.json"):
        with pytest.raises(UserError, match="report.json is being written by another command"):
            main(command)
    assert not output.exists()


@pytest.mark.parametrize("content", ['{"runs": {"dense": ', '{"rows": []}'])
def test_results_that_no_plan_wrote_are_refused(write_config, tmp_path, content):
    (tmp_path / "report.json").write_text(content)
    command = ["--config", str(write_config()), "--output", str(tmp_path), "--backends", "dense"]
    with pytest.raises(UserError, match="report.json is damaged .*: give another --output"):
        main(command)
    assert (tmp_path / "report.json").read_text() == content


def test_a_machine_without_git_measures_too(monkeypatch):
    monkeypatch.setenv("PATH", "/none")
    assert commit() == "unknown"


@pytest.mark.parametrize(
    "given, message",
    [
        (["llama", "model.hidden_size=31"], "hidden_size 31 into heads of an even number"),
        (["a/lfm2.json", "b/lfm2.json"], "two files have one name; give them others"),
        (["dens"], "--backends dens; allowed: auto, cuda, dense, llama"),
        (["train.steps=3"], "--backends  --seeds 1 .*; allowed: 1 or more of each"),
        (["dense", "train.stepz=3"], "unknown key train.stepz"),
        (["dense", "optim.lr=["], "optim.lr: '\\[' cannot be read as a YAML value"),
        (["dense", "name=mine"], "a comparison takes no name and no output_dir"),
        (["dense", "--seconds", "inf"], "--seconds inf; allowed: .* finite seconds"),
        (["dense", "--seeds", "0"], "--seeds 0 .*; allowed: 1 or more of each"),
    ],
)
def test_mistakes_show_before_anything_runs(write_config, tmp_path, given, message):
    output = tmp_path / "out"
    with pytest.raises(UserError, match=message):
        main(["--config", str(write_config()), "--output", str(output), "--backends", *given])
    assert not output.exists()


def test_a_plan_of_runs_trains_each_once_and_compares_them(train, tmp_path, monkeypatch):
    recipe = {"recipe": str(ROOT / "configs/recipe.yaml"), "optim.warmup_steps": 3}
    runs = {"paper": {}, "recipe": recipe, "diverged": {"optim.lr": 1e18}}
    command, printed = train({"reference": "paper", "runs": runs}), tmp_path / "printed"
    file = tmp_path / "results.json"

    run_python(*command, "--only", "paper", output=printed)
    assert list(runs_in(file)) == ["paper"]
    first = runs_in(file)["paper"]
    run_python(*command, output=printed)
    rows = runs_in(file)
    assert rows["paper"] == first and list(rows) == list(runs)
    settings = rows["recipe"]["settings"]
    assert settings["optim.name"] == "muon" and settings["model.mixing_init"] == "zero"
    assert rows["recipe"]["loss"][0] != first["loss"][0], "the initial models differ"
    assert "not finite" in rows["diverged"]["failure"]
    text = (tmp_path / "results.md").read_text()
    named = {}
    for row in rows_of(text):  # of several tables, where the columns do not fit into one
        named.setdefault(row[0], []).extend(row)
    assert "diverged" in named["diverged"] and "12" in named["paper"]
    assert " ".join(text.split()).count(" --commit abc") == 2  # the commands of these rows
    assert (tmp_path / "results.png").stat().st_size > 0

    for mistake, said in (
        (["--only", "papre"], "--only papre: not in the plan; allowed: diverged paper recipe"),
        (["train.steps"], "write overrides as section.key=value"),
        (["train.stpes=3"], "train.stpes"),
        (["train.eval_samples=3"], "'paper' with other options: train.eval_samples"),
    ):
        monkeypatch.setattr("sys.argv", [*map(str, command), *mistake])
        with pytest.raises(UserError, match=said):
            train_plan.main()
        assert runs_in(file) == rows


def test_an_interrupted_plan_goes_on_where_it_was_and_a_long_run_resumes(
    train, tmp_path, monkeypatch
):
    plan = {"seconds": 0.4, "seconds_of_best": [1.5], "sweep_share": 0.5}
    plan |= {"rates": [1e18, 3e-3, 6e-3], "seeds": [7]}
    plan |= {"kinds": {"flat mixer": {16: {"model.hidden_size": 16}}}}
    command, printed = train(plan), tmp_path / "printed"
    folder, file = tmp_path / "results-runs", tmp_path / "results.json"
    first = start_python(*command, output=printed)
    while not any("loss" in line for line in lines_of(folder.glob("*-16-1.5-s-*/metrics.jsonl"))):
        assert first.is_alive(), printed.read_text()
        time.sleep(0.01)
    os.kill(first.pid, signal.SIGTERM)
    first.join(60)
    assert first.exitcode == 3, printed.read_text()
    before = runs_in(file)
    assert len(before) in (6, 7)
    assert not any(row["budget"] == 1.5 for row in before.values())

    run_python(*command, output=tmp_path / "printed-2")
    runs = runs_in(file)
    assert {name: runs[name] for name in before} == before, "a finished run was repeated"
    logs = [log.read_text() for log in folder.glob("*-16-1.5-s-*.txt")]
    assert any("a fresh start" in log and "; resuming " in log for log in logs)
    assert not list(folder.glob("*/")), "a finished run's directory is left behind"
    swept, final, long = (
        [row for row in runs.values() if row["budget"] == budget] for budget in (0.2, 0.4, 1.5)
    )
    for rows, shorter, seconds in ((final, swept, 0.4), (long, final, 1.5)):
        earlier = [row for row in runs.values() if 0 < row["budget"] < seconds]
        *rows, seeded = rows
        assert seeded["seed"] == 7 and seeded["settings"]["seed"] == 7
        assert seeded["lr"] == min(rows, key=lambda row: row["validation_loss"])["lr"]
        good = [row for row in shorter if not {"failure", "seed"} & row.keys()]
        best = min(good, key=lambda row: row["validation_loss"])
        # the best rate of shorter runs, and the next lower one
        assert [row["lr"] for row in rows] == [lr for lr in (6e-3, 3e-3) if lr <= best["lr"]]
        fastest = max(row["tokens_per_second"] for row in earlier if "failure" not in row)
        tokens = min(seconds * fastest, 4 * best["training_tokens"])
        for row in [*rows, seeded]:
            assert row["tokens"] == pytest.approx(tokens, abs=256)
    assert "not finite" in runs["flat mixer 16, 0.2 s, lr 1e+18"]["failure"]
    text = (tmp_path / "results.md").read_text()
    losses = {f"{row['validation_loss']:.4f}" for row in (*final, *long) if "seed" not in row}
    assert losses <= {row[3] for row in rows_of(text) if len(row) > 3}
    assert "diverged" in text and (tmp_path / "results.png").stat().st_size > 0

    other = ["--only", "flat mixer 16", "train.batch_size=2"]
    monkeypatch.setattr("sys.argv", [*map(str, command), *other])
    with pytest.raises(UserError, match="with other options: train.batch_size"):
        train_plan.main()
    assert runs_in(file) == runs


def test_models_learn_the_language_first_and_then_to_find_partners(train, tmp_path):
    language = {"train.objective": "language", "train.batch_size": 16}
    plan = {"seconds": 0.4, "sweep_share": 0.5, "rates": [1e-3, 3e-3], "seeds": [7]}
    plan |= {"common": {"train.objective": "contrastive", "train.eval_samples": 64}}
    plan |= {"pretraining": language, "kinds": {"mixer": {32: {}}}, "keep_checkpoints": True}
    command, printed = train(plan), tmp_path / "printed"
    run_python(*command, output=printed)
    runs, text = runs_in(tmp_path / "results.json"), (tmp_path / "results.md").read_text()
    pretraining = "mixer, pretraining 32, 0.4 s, lr 0.002"
    first, again = runs[pretraining], runs[f"{pretraining}, seed 7"]
    assert "top1_of_32" not in first and Path(first["checkpoint"]).is_dir()
    found = {name: row for name, row in runs.items() if row["kind"] == "mixer"}
    starts = {row.get("seed", 0): row["settings"]["train.init_from"] for row in found.values()}
    assert starts == {0: first["checkpoint"], 7: again["checkpoint"]}
    for row in found.values():
        assert 0 <= row["top1_of_32"] <= 1 and row["tokens_a_step"] == 8 * 2 * 32
    shown = {cell for row in rows_of(text.partition("## Seeds")[0]) for cell in row}
    ends = [row for row in found.values() if row["budget"] == 0.4 and "seed" not in row]
    assert {f"{row['top1_of_32']:.1%}" for row in ends} <= shown
    assert not (tmp_path / "results.png").exists()
    kept = list((tmp_path / "results-runs").glob("*/"))
    assert sum("pretraining" in path.name for path in kept) == 2
    longer = [row for row in found.values() if row["budget"] == 0.4]
    assert len(kept) == 2 + len(longer) and all(Path(row["checkpoint"]).is_dir() for row in longer)


def test_a_pretraining_that_diverges_ends_its_model_alone_and_the_report_says_why(train, tmp_path):
    plan = {"seconds": 0.2, "pretraining": {"train.eval_samples": 8}}
    command = train(plan | {"kinds": {"mixer": {"bad": {"optim.lr": 1e18}, "good": {}}}})
    printed = run_python(*command, output=tmp_path / "printed", status=2)
    runs, text = runs_in(tmp_path / "results.json"), (tmp_path / "results.md").read_text()
    speed = "mixer, pretraining bad, speed"
    assert f"error: {speed}: diverged at 1e+18, and others need it" in printed
    assert "not finite" in runs[speed]["failure"]
    assert " ".join(f"{speed}: {runs[speed]['failure']}".split()) in " ".join(text.split())
    assert [row["size"] for row in runs.values()] == ["bad", *4 * ["good"]]
    assert f"{runs['mixer good, 0.2 s, lr 0.002']['validation_loss']:.4f}" in text


def test_what_trains_ends_with_the_command_and_meanwhile_no_other_one_adds_to_its_results(
    train, tmp_path, monkeypatch
):
    command = train({"runs": {"long": {"train.steps": 100_000, "train.eval_every": 0}}})
    folder, process = tmp_path / "results-runs", start_python(*command, output=tmp_path / "printed")
    while not lines_of(folder.glob("long/metrics.jsonl")):
        assert process.is_alive(), (tmp_path / "printed").read_text()
        time.sleep(0.01)
    monkeypatch.setattr("sys.argv", [*map(str, command)])
    with pytest.raises(UserError, match="results.json is being written by another command"):
        train_plan.main()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    saved = folder / "long"
    deadline = time.monotonic() + 30
    while not list(saved.glob("step-*")):
        assert time.monotonic() < deadline, "the run goes on, or was not saved"
        time.sleep(0.05)


def report_lane(connection, run, log, text):
    """Stands for a run's process: waits until there are two of them, and says which GPU it sees."""
    folder, gpu = log.parent, os.environ["CUDA_VISIBLE_DEVICES"]
    (folder / gpu).touch()
    deadline = time.monotonic() + 60
    while run.name in "ab" and len(list(folder.iterdir())) < 2:
        assert time.monotonic() < deadline, "the lanes do not run beside each other"
        time.sleep(0.02)
    if run.name == "b":
        os.kill(os.getpid(), signal.SIGKILL)
    if run.name == "e":
        return connection.send("no space left on device")
    measured = {"validation_loss": 1.0, "steps": 1, "training_seconds": 1.0, "text_sha256": []}
    about = {"settings": {}, "hardware": {"device": "cpu", "torch": "2"}, "gpu": gpu}
    connection.send(measured | about)


def test_each_gpu_trains_its_own_runs_and_one_that_fails_is_no_result(monkeypatch, tmp_path):
    def iterate(name):
        yield Run(name, {})

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5")  # the study sets it for each run
    monkeypatch.setattr(study, "report_run", report_lane)
    written = []
    monkeypatch.setattr(study, "write_report", lambda *_: written.append("report"))
    whole = study.Study(tmp_path / "a", {}, "first", "")
    said = "^b: its process was stopped; the same command continues\ne: no space left on device$"
    with pytest.raises(UserError, match=said):
        whole.work([iterate(name) for name in "abcde"])
    rows = runs_in(tmp_path / "a.json")
    assert sorted(rows) == ["a", "c", "d"]  # in the order in which they end, which is by chance
    assert {row["gpu"] for row in rows.values()} <= {"3", "GPU-5"} and rows["a"]["gpu"] == "3"

    second = study.Study(tmp_path / "a", {}, "second", "")
    with pytest.raises(UserError, match="^e: no space left on device$"):
        second.work([iterate("e")])
    assert written == ["report"] and runs_in(tmp_path / "a.json") == rows
    assert {row["command"] for row in rows.values()} == {"first"}


def test_while_runs_train_their_last_lines_are_printed(monkeypatch, tmp_path, capsys):
    def report(connection, run, log, text):
        for step in (1, 2):
            log.write_text(f"step {step}\n")
            time.sleep(0.6)
        connection.send("out of memory")

    def job():
        yield Run("a", {})

    monkeypatch.setattr(study, "SAY_EVERY", 0.1)
    monkeypatch.setattr(study, "report_run", report)
    with pytest.raises(UserError, match="^a: out of memory$"):
        study.Study(tmp_path / "results", {}, "command", "").work([job()])
    started = f"a: started; its output is in {tmp_path / 'results-runs' / 'a.txt'}"
    assert capsys.readouterr().out.splitlines() == [started, "a: step 1", "a: step 2"]
    # A run that has printed nothing for long is said to be at the same line.
    monkeypatch.setattr("mixer.common.progress.SECONDS", 0.3)
    with pytest.raises(UserError):
        study.Study(tmp_path / "others", {}, "command", "").work([job()])
    lines = capsys.readouterr().out.splitlines()
    assert lines.index("a: step 1 (0 s ago)") < lines.index("a: step 2")


def test_gpus_that_are_named_are_not_counted_which_may_take_cuda_from_forks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: pytest.fail("counted"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    assert study.visible_gpus() == ["MIG-a", "MIG-b"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")  # two runs share it
    assert study.visible_gpus() == ["0", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert study.visible_gpus() == [""]


def test_a_plan_of_tasks_ends_with_their_accuracies(train, tmp_path):
    tasks = {name: {"data.source": name} for name in ("copy", "recall")}
    command = train({"seconds": 0.2, "kinds": {"flat": tasks}})
    run_python(*command, output=tmp_path / "printed")
    runs, text = runs_in(tmp_path / "results.json"), (tmp_path / "results.md").read_text()
    for name in tasks:
        accuracy = f"{runs[f'flat {name}, 0.2 s, lr 0.002']['accuracy']:.2%}"
        assert [row[0] for row in rows_of(text) if accuracy in row] == [f"flat {name}"]


def test_options_of_the_command_line_hold_where_the_file_has_others_or_none(tmp_path):
    config = tmp_path / "text.yaml"
    config.write_text("data: {source: text}\nseed: 3\n")  # without data.path
    overrides = {"data.path": "texts", "seed": 7, "model.num_attention_heads": 4}
    plan = plan_of(str(config), ["dense", "qwen3"], seeds=3, seconds=None, overrides=overrides)
    assert plan["common"]["seed"] == 7 and plan["seeds"] == [8, 9]
    assert len(jobs_of(plan, {}, [], {})) == 2


@pytest.mark.parametrize("plan", sorted(PLANS.glob("*.yaml")), ids=lambda plan: plan.stem)
def test_every_run_of_the_plans_can_be_trained(plan, monkeypatch):
    monkeypatch.chdir(ROOT)
    plan = read_yaml(plan)
    given = {"data.path": "texts"} if plan["common"].get("data.source") in FILE_SOURCES else {}
    assert len(jobs_of(plan, given, [], {})) == len(plan.get("runs", plan.get("kinds")))


def lines_of(files) -> list[dict]:
    found = []
    for file in files:
        try:
            found += read_lines(file.parent)
        except (OSError, ValueError):  # not there any more, or half a line
            pass
    return found


KINDS = {"common": {}, "seconds": 1, "kinds": {"a": {512: {}}}}


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({}, "has neither `runs` nor `kinds`; allowed: `common` and `runs`, or `common`, `second"),
        ({"common": {}, "runs": {}}, "has neither `runs` nor `kinds`"),
        (KINDS | {"runs": {"b": {}}}, "has both `runs` and `kinds`"),
        ({"runs": {"a": {}}}, "has no `common`"),
        ({"common": {}, "kinds": {"a": {512: {}}}}, "has no `seconds`"),
        (KINDS | {"kinds": {"b": {}}}, "the plan.kinds.b = {}; allowed: one or more sizes"),
        (KINDS | {"rates": [1e-3]}, "has one of `rates` and `sweep_share`; allowed: both"),
        (KINDS | {"rates": [], "sweep_share": 0.5}, r"the plan.rates = \[\]; allowed: one or"),
    ],
)
def test_an_incomplete_plan_is_refused_with_what_it_lacks(plan, said):
    with pytest.raises(UserError, match=said):
        jobs_of(plan, {}, [], {})


def test_a_seed_is_not_trained_twice():
    plan = {"common": {}, "runs": {"a": {}}, "seeds": [1, 2]}
    with pytest.raises(UserError, match="^a: seed 1 is its first seed already"):
        jobs_of(plan, {"seed": 1}, [], {})
    assert len(jobs_of(plan, {}, [], {})) == 1


def test_a_plan_that_goes_on_with_another_pretraining_is_refused():
    plan = KINDS | {"pretraining": {"optim.lr": 1e-3}}
    speed = next(jobs_of(plan, {}, [], {})[0])
    results = {speed.name: ROW | speed.identity | {"settings": speed.settings}}
    jobs_of(plan, {}, [], results)
    with pytest.raises(UserError, match="'a, pretraining 512, speed' with .*: optim.lr 0.001, not"):
        jobs_of(plan | {"pretraining": {"optim.lr": 2e-3}}, {}, [], results)


def train_all(plan: dict, results: dict, measure) -> None:
    """Does the only job of a plan as a study does; `measure` says what a run adds to its row."""
    (job,) = jobs_of(plan, {}, [], results)
    run = next(job)
    while True:
        if run.name not in results:
            results[run.name] = run.identity | {"settings": run.settings} | measure(run)
        try:
            run = job.send(results[run.name])
        except StopIteration:
            return


SPEED = {"tokens_per_second": 100.0, "training_tokens": 10**6, "tokens_a_step": 10}


def test_nothing_starts_from_a_pretraining_that_diverged():
    plan = KINDS | {"common": {"optim.lr": 1e-3}, "pretraining": {}, "seeds": [1, 2]}
    diverging = "a, pretraining 512, 1 s, lr 0.001, seed 1"

    def measure(run: Run) -> dict:
        if run.name == diverging:
            return {"failure": "not finite"}
        return SPEED | {"validation_loss": 1.0, "checkpoint": "weights"}

    results = {}
    train_all(plan, results, measure)
    seeds = [row.get("seed") for row in results.values() if row["kind"] == "a" and row["budget"]]
    assert seeds == [None, 2]
    diverging, results = "a, pretraining 512, 1 s, lr 0.001", {}
    with pytest.raises(UserError, match=f"^{diverging}: diverged at 0.001"):
        train_all(plan, results, measure)
    assert list(results) == ["a, pretraining 512, speed", diverging]


def test_steps_follow_a_models_fastest_run_so_far_and_are_the_same_in_all_runs_of_a_time():
    """The run that measures the speed is short, and slowed by what starts beside it."""
    plan = KINDS | {"common": {"optim.lr": 1e-3}, "kinds": {"a": {512: {"seconds": [10, 20]}}}}
    names = ["a 512, speed", "a 512, 10 s, lr 0.001", "a 512, 20 s, lr 0.001"]
    speeds = dict(zip(names, [100.0, 150.0, 140.0], strict=True))

    def measure(run: Run) -> dict:
        return SPEED | {"validation_loss": 1.0, "tokens_per_second": speeds.get(run.name, 300.0)}

    results = {}
    train_all(plan, results, measure)
    assert [results[name]["settings"]["train.steps"] for name in names] == [40, 100, 300]
    # The study goes on with another seed, whose runs are faster.
    train_all(plan | {"seeds": [1]}, results, measure)
    seeded = [results[f"{name}, seed 1"] for name in names[1:]]
    assert [row["settings"]["train.steps"] for row in seeded] == [100, 300]


def test_a_rate_of_zero_is_trained_as_zero():
    (job,) = jobs_of(KINDS | {"common": {"optim.lr": 0}}, {}, [], {})
    assert next(job).settings["optim.lr"] == 0


def test_what_a_size_or_a_run_has_wrong_begins_with_its_name():
    for entry, said in (
        ({"model.hidden_sizze": 3}, "mixer small: 1 problem .*\n.*unknown key model.hidden_sizze"),
        ({"recipe": "none.yaml"}, "mixer small: no configuration file none.yaml"),
        ({"model.config": "none.json"}, "mixer small: none.json cannot be read"),
    ):
        plan = KINDS | {"kinds": {"mixer": {"large": {}, "small": entry}}}
        with pytest.raises(UserError, match=f"^{said}"):
            jobs_of(plan, {}, [], {})
        with pytest.raises(UserError, match=f"^{said}"):
            jobs_of({"common": {}, "runs": {"b": {}, "mixer small": entry}}, {}, [], {})


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"common": []}, r"the plan.common = \[\]; allowed: keys with values"),
        ({"runs": [1]}, r"the plan.runs = \[1\]; allowed: keys with values"),
        ({"runs": None}, "the plan.runs = None; allowed: keys with values"),
        ({"runs": {"b": 3}}, "the plan.runs.b = 3; allowed: keys with values or null"),
        ({"kinds": {512: {"a": {}}}}, "the plan.kinds has the key 512; allowed: text in quotes"),
        ({"kinds": {"a": {512: {1: 2}}}}, "plan.kinds.a.512 has the key 1; allowed: text"),
        ({"kinds": {"a": {512: {"recipe": 3}}}}, "plan.kinds.a.512.recipe = 3; allowed"),
        ({"seconds": "x"}, "the plan.seconds = 'x'; allowed: a finite number"),
        ({"seconds": -1}, "the plan.seconds has -1; allowed: above 0"),
        ({"kinds": {"a": {512: {"seconds": 20}}}}, "plan.kinds.a.512.seconds = 20; allowed: a"),
        (
            {"kinds": {"a": {512: {"seconds": [9, 0]}}}},
            "kinds.a.512.seconds has 0; allowed: above 0",
        ),
        ({"kinds": {"a": {512: {"seconds": []}}}}, "kinds.a.512.seconds = ..; allowed: one"),
        (
            {"kinds": {"a": {512: {"seconds": [15, 60]}}}, "rates": [1e-3], "sweep_share": 0.25},
            "a time twice: 15 s is the time of a sweep",
        ),
        ({"seconds_of_best": [0]}, "the plan.seconds_of_best has 0; allowed: above 0"),
        ({"rates": [1e-3], "sweep_share": 2}, "the plan.sweep_share = 2; allowed: above 0, below"),
        ({"seeds": ["x"]}, r"the plan.seeds\[0\] = 'x'; allowed: a whole number"),
        ({"seeds": [-1]}, "seed = -1; allowed: a whole number, 0 or more"),
        ({"refrence": "a"}, "the plan has the key 'refrence'; allowed: common, recipe"),
        ({"reference": "b"}, "the plan.reference = 'b'; allowed: none, as it has no `runs`"),
        ({"recipe": "plan.yaml"}, "recipe: plan.yaml has no section optim"),
        ({"common": {"optim.lr": "x"}}, "optim.lr = 'x'; allowed: a finite number"),
        ({"common": {"optim.warmup_steps": "x"}}, "optim.warmup_steps = 'x'; allowed: a whole"),
        ({"pretraining": {"train.stepz": 1}}, "unknown key train.stepz"),
        ({"kinds": {"a b": {"c": {}}, "a": {"b c": {}}}}, "'a b c' and 'a b c' would share"),
        ({"kinds": {"a b": {"": {}}, "a-b": {"": {}}}}, "'a b' and 'a-b' would share results"),
        ({"kinds": {"..": {"": {}}}}, "name = '..'; allowed: a directory name"),
        ({"seeds": [1, 1]}, "'a 512, seed 1' and 'a 512, seed 1' would share results"),
        (
            {"common": {"logging.log_every": "1"}},
            "logging.log_every = '1'; allowed: a whole number",
        ),
        ({"common": {"data.path": [1]}}, r"data.path = \[1\]; allowed: text"),
    ],
)
def test_odd_values_of_a_plan_are_named(parts, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(KINDS | parts))
    monkeypatch.setattr("sys.argv", ["train_plan", "plan.yaml", "--output", "results"])
    with pytest.raises(UserError, match=said):
        train_plan.main()
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]


@pytest.mark.parametrize("output", ["", "/", "a/.."])
def test_results_need_a_name(output):
    with pytest.raises(UserError, match="names no file; allowed: a path without suffix"):
        study.Study(Path(output), {}, "command", "commit")


ROW = {"settings": {}, "commit": "a", "hardware": {"device": "cpu", "torch": "2"}}
ROW |= {"validation_loss": 4.0, "training_seconds": 1.0, "steps": 3}


@pytest.mark.parametrize(
    ("row", "said"),
    [(None, "runs.b = None"), (ROW | {"steps": "3"}, "runs.b.steps = '3'; allowed: a whole number")]
    + [(ROW | {"hardware": {}}, "runs.b has no hardware.device"), ({}, "runs.b has no settings")]
    + [({name: ROW[name] for name in list(ROW)[:4]}, "runs.b has no training_seconds")]
    + [(ROW | {"accuracy": "high"}, "runs.b.accuracy = 'high'; allowed")]
    + [(ROW | {"hardware": {"device": 1}}, "runs.b.hardware.device = 1; allowed: text")],
)
def test_results_that_were_cut_are_refused(row, said, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"runs": {"a": ROW, "b": row}}))
    with pytest.raises(UserError, match=f"a.json is damaged .{said}.*: give another --output"):
        study.Study(tmp_path / "a", {}, "command", "commit")


def test_a_comparison_for_a_time_that_goes_on_at_another_rate_is_refused():
    plan = KINDS | {"common": {"optim.lr": 1e-3}}
    run = Model("a", "512", plan["common"], (1.0,)).timed(1.0, 1e-3, 5)
    results = {run.name: ROW | run.identity | {"settings": run.settings}}
    jobs_of(plan, {}, [], results)
    with pytest.raises(UserError, match="the results have 'a 512, 1 s.*optim.lr 0.001, not 0.002"):
        jobs_of(plan, {"optim.lr": 2e-3}, [], results)
    jobs_of(plan | {"rates": [2e-3], "sweep_share": 0.5}, {}, [], results)


def test_a_comparison_that_goes_on_after_its_text_was_changed_is_refused(train, tmp_path):
    command = train({"runs": {"one": {}, "two": {"optim.lr": 1e-3}}})
    plan, file = read_yaml(tmp_path / "plan.yaml"), tmp_path / "results.json"
    first = next(jobs_of(plan, {}, ["one"], {})[0])
    of_another = ROW | {"settings": first.settings, "text_sha256": ["0" * 64] * 2}
    file.write_text(json.dumps({"runs": {"one": of_another}}))
    printed = run_python(*command, output=tmp_path / "printed", status=2)
    said = r"error: two: UserError: \S+ has other tokens than the results: restore the text"
    assert re.search(said, printed)
    assert list(runs_in(file)) == ["one"]
