"""benchmarks/repeat.py runs each command once, within the time, and says what failed."""

import re
import time
from pathlib import Path

import psutil
import pytest
import yaml
from launching import run_python, start_python

from mixer.common.yaml_file import read_yaml
from mixer.data.config import DataConfig, check
from mixer.training.config import load_config

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "repeat.py"
TEXTS = "data.source=text data.path=a data.directory=data/books data.validation_path=b"
COUNT = 'python -c "print(1)" >> {output}.count && cat {output}.count'


@pytest.fixture
def repeat(tmp_path):
    plan = {
        "first": {"command": f"{COUNT} && echo {{texts}}", "seconds": 1},
        "broken": {"command": f"{COUNT}; test -e {tmp_path}/mended", "seconds": 1},
        "long": {"command": COUNT, "seconds": 100, "all_gpus": True},
    }
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan, sort_keys=False))

    def run(*options):
        given = ["--plan", tmp_path / "plan.yaml", "--output", tmp_path / "results", *options]
        done = run_python(SCRIPT, *given, output=tmp_path / "printed")
        counts = {file.stem: file.read_text() for file in tmp_path.glob("results/*.count")}
        return done, {name.split("_")[0]: text.count("1\n") for name, text in counts.items()}

    return run


def test_what_has_ended_well_is_not_run_again_and_what_has_not_is(repeat, tmp_path):
    done, counts = repeat("--seconds", "50", "--texts", "my/books")
    assert done.returncode == 1 and counts == {"first": 1, "broken": 1}
    assert "broken: status 1" in done.stdout
    assert "long: left for lack of time: it takes 100 s" in done.stdout
    log = (tmp_path / "results" / "logs" / "first.log").read_text()
    assert "data.path=my/books" in log

    (tmp_path / "mended").touch()
    done, counts = repeat()
    assert done.returncode == 0 and counts == {"first": 1, "broken": 2, "long": 1}, done.stdout
    assert "first: has ended well before" in done.stdout

    done, counts = repeat("last")
    assert done.returncode == 2 and "allowed: first, broken, long" in done.stdout


def test_what_it_runs_ends_with_it(tmp_path):
    pid = tmp_path / "pid"
    plan = {
        "long": {
            "command": f"echo $$ > {pid}.new && mv {pid}.new {pid}; sleep 100; :",
            "seconds": 1,
        }
    }
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    given = ["--plan", tmp_path / "plan.yaml", "--output", tmp_path / "results"]
    process = start_python(SCRIPT, *given, output=tmp_path / "printed")
    wait_until(pid.exists)
    shell = psutil.Process(int(pid.read_text()))
    sleeping = shell.children()
    process.terminate()
    process.join(20)
    wait_until(lambda: not any(one.is_running() for one in (shell, *sleeping)))
    assert process.exitcode == 143


def wait_until(condition, patience: float = 60) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_every_command_names_files_and_options_that_exist():
    for name, row in yaml.safe_load((ROOT / "benchmarks/plans/all.yaml").read_text()).items():
        command = row["command"]
        files = re.findall(r"(?:benchmarks|configs)/[\w/]+\.\w+", command)
        assert files and all((ROOT / file).is_file() for file in files), name
        script = (ROOT / files[0]).read_text()
        if "add_options" in script:
            script += (ROOT / "benchmarks/saving.py").read_text()
        for option in re.findall(r" (--[a-z-]+)", command.partition(files[0])[2]):
            assert f'"{option}"' in script, f"{name}: {option}"


def test_benchmarks_that_share_a_data_directory_prepare_the_same_data():
    seen: dict[str, DataConfig] = {}
    for name, one in yaml.safe_load((ROOT / "benchmarks/plans/all.yaml").read_text()).items():
        command = one["command"].replace("{texts}", TEXTS)
        found = re.search(r"(benchmarks/plans|configs)/\S+", command)
        if found:
            given = re.findall(r" (data\.\w+=\S*)", command)
            settings = read_yaml(ROOT / found[0])
            if "common" in settings:
                common = settings["common"].items()
                given = [f"{key}={value}" for key, value in common if key[:4] == "data"] + given
            data = load_config(None if "common" in settings else str(ROOT / found[0]), given).data
            check(data)
            assert data == seen.setdefault(data.directory, data), name
