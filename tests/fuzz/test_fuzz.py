"""Nothing wrong is called good: each command, with a file or an option spoiled at random, either
works or ends with a status that is not 0 and a message, without a traceback, and leaves nothing
behind.

`make test` runs a few cases, `make soak` FUZZ_CASES of them (3,000 by default) from FUZZ_SEED on.
One case again: FUZZ_SEED=1234 pytest tests/fuzz -k slice, whose first case it is.
"""

import os
import shutil
from pathlib import Path
from random import Random

import pandas
import pytest
import yaml
from launching import start_python
from matplotlib import get_cachedir
from mutations import MUTATIONS, TEXTS, option
from runs import ROOT

from mixer.training.config import load_config
from mixer.training.loop import train

SECTIONS = ("model", "data", "train", "optim", "logging")
SEED = int(os.environ.get("FUZZ_SEED", "0"))
CASES = int(os.environ.get("FUZZ_CASES", "3000"))
IN_SLICE = 16  # cases of `make test`
AT_ONCE = 100  # cases of one slow test
PATIENCE = 40  # seconds
LAST = "runs/small/step-4"


TRAIN = "train --config config.yaml name=new"
PARQUET = "data.directory=prepared data.source=parquet data.path=text/b.parquet"
LIMITED = str(Path(__file__).with_name("limited.py"))
# Without them an empty configuration, which is allowed, would train the default model for days.
SMALL = "model.hidden_size=8 model.num_hidden_layers=1 model.max_position_embeddings=16"
SMALL += " train.steps=2 train.batch_size=2 data.directory=prepared"
PAIRS = "data.path=text/pairs.jsonl data.pair_field=answer train.objective=contrastive"
TRAIN_PLAN = str(ROOT / "benchmarks/train_plan.py")
OF_LAST = f"{LAST}/*"
TRAINED = f"{LAST}/* {LAST}/trainer_state/*"
# Commands, and the patterns of the files that they read.
COMMANDS = {
    f"{TRAIN} train.steps=2": "config.yaml data/* text/*",
    f"{TRAIN} train.steps=2 data.directory=prepared": "config.yaml text/*",
    f"{TRAIN} train.steps=1 {PARQUET}": "text/b.parquet",
    f"{TRAIN} {SMALL} {PAIRS}": "config.yaml text/pairs.jsonl",
    f"{TRAIN} {SMALL} data.source=copy data.path=": "config.yaml",
    "train_plan plan.yaml --output out": "plan.yaml text/a.jsonl",
    "train_plan kinds.yaml --output out": "kinds.yaml",
    "train --config config.yaml train.steps=6": f"data/* runs/small/* {TRAINED}",
    f"eval --checkpoint {LAST} --device cpu --output out": f"{OF_LAST} data/*",
    f"eval --checkpoint {LAST} --text text/a.jsonl --output out": f"{OF_LAST} text/*",
    f"generate --checkpoint {LAST} --new-tokens 3 --prompt to be": OF_LAST,
    "convert reference.safetensors --output out": "reference.safetensors",
    f"convert {LAST} --back --output out.safetensors": OF_LAST,
    f"export {LAST} --output out --license mit": TRAINED,
    f"inspect --checkpoint {LAST} --output out": OF_LAST,
    f"representation --checkpoint {LAST} --text text/a.jsonl --tokens 4 --steps 2 "
    "--output out": f"{OF_LAST} text/*",
    "report runs/small --output out.png": "runs/small/*",
}


@pytest.fixture(scope="session")
def material(tmp_path_factory) -> Path:
    """A folder with all that the commands read: texts, prepared data, a run, reference weights."""
    folder = tmp_path_factory.mktemp("material")
    (folder / "text").mkdir()
    text = "to be or not to be, that is the question " * 4
    rows = pandas.DataFrame({"text": [f"{text}{number}" for number in range(12)]})
    rows.to_json(folder / "text/a.jsonl", orient="records", lines=True)
    rows.to_parquet(folder / "text/b.parquet")
    rows["answer"] = [f"the answer is {number} of {len(rows)}" for number in range(len(rows))]
    rows["text"] = [f"{number} {text}" for number in range(len(rows))]
    rows.to_json(folder / "text/pairs.jsonl", orient="records", lines=True)
    config = {
        "name": "small",
        "model": {"hidden_size": 8, "num_hidden_layers": 1, "max_position_embeddings": 16},
        "data": {"source": "jsonl", "path": "text/a.jsonl", "directory": "data"},
        "train": {"steps": 4, "batch_size": 2, "eval_every": 2, "eval_samples": 4},
        "optim": {"warmup_steps": 0},
        "checkpoint": {"save_every": 2},
        "logging": {"log_every": 1},
    }
    config["data"] |= {"vocab_size": 300, "validation_fraction": 0.3}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    common = {
        f"{section}.{key}": value for section in SECTIONS for key, value in config[section].items()
    }
    common |= {"train.steps": 2, "optim.lr": 1e-3}
    plan = {"common": common, "runs": {"one": {}, "two": {"model.num_mixer_heads": 2}}}
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan | {"seeds": [1], "reference": "one"}))
    del common["train.steps"]
    plan = {"common": common, "kinds": {"flat": {8: {}}}, "seconds": 0.01, "rates": [1e-3]}
    plan |= {"sweep_share": 0.5, "seeds": []}
    (folder / "kinds.yaml").write_text(yaml.safe_dump(plan))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train(load_config("config.yaml", []))
        back = ("convert", LAST, "--back", "--output", "reference.safetensors")
        assert in_folder(folder, folder / "printed", "-m", f"mixer.{back[0]}", *back[1:]) == 0
    (folder / "printed").unlink()
    return folder


def in_folder(folder: Path, output: Path, *arguments: str) -> int | None:
    """The exit status of a command in a forked process; None where it takes too long."""
    # Also what ~ is, but for matplotlib, which lists fonts there.
    cache = str(folder / ".cache")
    process = start_python(
        *arguments,
        output=output,
        directory=folder,
        MIXER_CACHE=cache,
        HOME=cache,
        MPLCONFIGDIR=get_cachedir(),
    )
    process.join(PATIENCE)
    if process.exitcode is None:
        process.kill()
        process.join()
        return None
    return process.exitcode


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def words(command: str) -> list[str]:
    """What Python gets for one of COMMANDS."""
    module, *options = command.split()
    program = [TRAIN_PLAN] if module == "train_plan" else ["-m", f"mixer.{module}"]
    return [*program, *options]


def spoil(folder: Path, command: str, random: Random) -> tuple[list[str], str]:
    """Spoils an option or a file of a command, or the disk; returns its arguments, and what was
    done.
    """
    arguments = words(command)
    module = command.split()[0]
    if random.random() < 0.1 and module != "train_plan":
        size = random.randrange(3_000, 40_000)
        return [LIMITED, str(size), *arguments], f"no file beyond {size} bytes"
    if module == "train" and random.random() < 0.4:
        arguments.append(option(random))
        return arguments, arguments[-1]
    if random.random() < 0.1:
        index = random.randrange(2, len(arguments))
        arguments[index] = random.choice(TEXTS).replace("\0", "")  # which no system passes on
        return arguments, f"argument {index} is {arguments[index]!r:.40}"
    patterns = COMMANDS[command].split()
    read = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    file = random.choice([path for path in read if path.is_file() and path.suffix != ".py"])
    allowed = [*MUTATIONS] if file.suffix in (".json", ".jsonl", ".yaml") else ["bytes", "file"]
    mutation = random.choice(allowed)
    change = MUTATIONS[mutation](file, random)
    return arguments, f"{file.relative_to(folder)}: {mutation}, {change}"


def problem(folder: Path, seed: int) -> str | None:
    """What is wrong with a case, by its seed; None where nothing is."""
    random = Random(seed)
    name = random.choice([*COMMANDS])
    arguments, change = spoil(folder, name, random)
    files_before = files(folder)
    output = folder.with_suffix(".printed")
    status = in_folder(folder, output, *arguments)
    printed = output.read_text(errors="replace") if output.exists() else ""
    new = {path for path in files(folder) - files_before if not path.startswith(".cache")}
    wrong = []
    if status is None:
        wrong.append(f"it took more than {PATIENCE} s")
    elif status < 0:
        wrong.append(f"it died of signal {-status}")
    if "Traceback (most recent call last)" in printed:
        wrong.append("a traceback")
    if status and "error: " not in printed:
        wrong.append(f"status {status} without a message")
    # What was made before training failed may stay: prepared data, and a run that has begun.
    begun = any(path.endswith("metrics.jsonl") for path in new)
    left = {path for path in new if not path.startswith("prepared")} if status else set()
    if status and arguments[0] == LIMITED and in_folder(folder, output, *arguments[2:]) != 0:
        wrong.append("it does not work where there is space")
    # A plan's runs that fail have their output there, which the message names.
    left = {path for path in left if not (path.startswith("out-runs") and "more in" in printed)}
    if left and not begun:
        wrong.append(f"left behind: {', '.join(sorted(left)[:5])}")
    if not wrong:
        return None
    return f"seed {seed}, {name}, {change}: {'; '.join(wrong)}\n{printed[-2000:]}"


def problems(material: Path, folder: Path, seeds: range) -> list[str]:
    descriptions = []
    for seed in seeds:
        case = folder / str(seed)
        shutil.copytree(material, case, symlinks=True)
        if description := problem(case, seed):
            descriptions.append(description)
        shutil.rmtree(case)
    return descriptions


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_works_while_nothing_is_spoiled(material, tmp_path, command):
    folder = tmp_path / "whole"
    shutil.copytree(material, folder, symlinks=True)
    output = tmp_path / "printed"
    assert in_folder(folder, output, *words(command)) == 0, output.read_text()


def test_a_slice_of_all_cases(material, tmp_path):
    descriptions = problems(material, tmp_path, range(SEED, SEED + IN_SLICE))
    assert not descriptions, "\n\n".join(descriptions)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SEED, SEED + CASES, AT_ONCE))
def test_spoiled_input_works_or_is_refused(material, tmp_path, first):
    seeds = range(first, min(first + AT_ONCE, SEED + CASES))
    descriptions = problems(material, tmp_path, seeds)
    assert not descriptions, "\n\n".join(descriptions)
