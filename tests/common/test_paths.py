"""Each option that names a path means what a shell would: ~ is the home directory. What cannot be
written or opened is refused before any work.
"""

import os
import sys
from pathlib import Path

import pytest
from texts import made_texts

import mixer.commands.convert
import mixer.commands.curves
import mixer.commands.eval
import mixer.commands.export
import mixer.commands.generate
import mixer.commands.inspect
import mixer.commands.representation
from mixer.common.errors import UserError
from mixer.common.files import as_path
from mixer.data.config import DataConfig
from mixer.data.prepare import prepare
from mixer.training.config import load_config
from mixer.training.loop import train

SMALL = (
    "model.hidden_size=8 model.num_hidden_layers=1 model.max_position_embeddings=16 train.steps=2 "
    "train.batch_size=2 train.eval_samples=2 optim.warmup_steps=0 checkpoint.save_every=1 "
    "output_dir=~/runs data.source=text data.path=~/texts/*.txt data.vocab_size=300 "
    "data.validation_path=~/held-out.txt"
)
RUNS = (
    "name=first data.directory=~/data",
    "name=branch data.directory=~/data checkpoint.resume=~/runs/first/step-1",
    "name=tuned data.directory=~/other data.tokenizer=~/data/tokenizer "
    "train.init_from=~/runs/first/best",
)
COMMANDS = (
    "generate --checkpoint ~/runs/first/best --prompt document --new-tokens 1",
    "eval --checkpoint ~/runs/first/best --device cpu",
    "eval --checkpoint ~/runs/first/best --device cpu --data ~/data --output ~/out/data",
    "eval --checkpoint ~/runs/first/best --device cpu --text ~/held-out.txt --output ~/out/text",
    "eval --checkpoint ~/runs/first/best --device cpu --pairs ~/data --output ~/out/pairs",
    "inspect --checkpoint ~/runs/first/best --output ~/out/inspect",
    "representation --checkpoint ~/runs/first/best --text ~/held-out.txt --tokens 2 --steps 1 "
    "--output ~/out/representation",
    "export ~/runs/first/best --output ~/out/export --license mit",
    "convert ~/runs/first/best --output ~/out/full --mixing-weight full",
    "convert ~/runs/first/best --output ~/out/back.safetensors --back",
    "convert ~/out/back.safetensors --output ~/out/converted --tokenizer ~/data/tokenizer",
    "curves ~/runs/first --output ~/out/report.png",
    "curves ~/runs/first --output ~/out/published.png --published ~/published.yaml",
)


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A home directory with texts, and another current one."""
    for name in ("home/texts", "here"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    for number, text in enumerate(made_texts(3)):
        (tmp_path / f"home/texts/{number}.txt").write_text(text)
    (tmp_path / "home/held-out.txt").write_text("held out " * 40)
    (tmp_path / "home/published.yaml").write_text("one: {losses: {1: 3.5}}")
    return tmp_path / "home"


def test_the_home_directory_is_meant_by_a_tilde_in_each_path(home, monkeypatch):
    Path("config.yaml").write_text("seed: 1")
    (home / "config.yaml").write_text("seed: 2")
    for settings in RUNS:
        run = load_config("~/config.yaml", f"{SMALL} {settings}".split())
        assert run.seed == 2
        train(run)
    for command in COMMANDS:
        name, *arguments = command.split()
        monkeypatch.setattr(sys, "argv", ["mixer", *arguments])
        getattr(mixer.commands, name).main()
    assert [path.name for path in Path().iterdir()] == ["config.yaml"]
    assert {path.name for path in (home / "runs").iterdir()} == {"first", "branch", "tuned"}
    outputs = [command.split("--output ~/out/")[1] for command in COMMANDS if "--output" in command]
    made = {path.name for path in (home / "out").iterdir()}
    assert made == {output.split()[0] for output in outputs}


@pytest.mark.parametrize(
    "name, problem",
    [
        ("~nobody-of-this-name/x", "there is no home directory of ~nobody-of-this-name; give the"),
        (os.fsdecode(b"caf\xe9.txt"), r"'caf\\udce9.txt' is not UTF-8 text: rename it"),
    ],
)
def test_a_path_that_cannot_be_is_refused(name, problem):
    with pytest.raises(UserError, match=problem):
        as_path(name)


@pytest.mark.parametrize("place", ["scratch", "scratch/new/data"])
def test_a_link_to_nothing_is_refused_before_any_work(home, place):
    """A scratch disk that was cleaned: before the text is tokenized, or a step is trained."""
    Path("scratch").symlink_to("gone")
    said = []
    config = DataConfig(source="text", path="~/texts", vocab_size=300, directory=place)
    with pytest.raises(UserError, match="scratch is not a directory; choose another data.direct"):
        prepare(config, said.append)
    run = load_config(None, [*SMALL.split(), "data.directory=~/data", f"output_dir={place}"])
    with pytest.raises(UserError, match="scratch is not a directory; choose another output_dir"):
        train(run)
    assert not said and not (home / "data").exists()


def test_a_folder_whose_name_is_no_text_is_refused_for_all_that_is_below(home, monkeypatch):
    """tokenizers cannot write there, and would end in a traceback."""
    folder = Path(os.fsdecode(b"caf\xe9"))
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=r"caf\\udce9/data': its name is not UTF-8 text; choose"):
        prepare(DataConfig(source="text", path="~/texts", directory="data"), print)
