"""What an exported model's card says, and does not say, of the machine that trained it."""

import json

import yaml
from checkpoints import list_files

from mixer.checkpoints.checkpoint import TRAINER
from mixer.export import export

NO_PATHS = {"source": "builtin", "path": "", "validation_path": "", "tokenizer": "train"}
# Settings of a run's data, and what the card has under these keys: None where it has none.
DATA = [
    (
        {"source": "text", "path": "/home/ann's/*", "validation_path": "own/a.txt"},
        {"path": None, "directory": None, "validation_path": None},
    ),
    ({"source": "hub", "path": "ann's/rows"}, {"source": "hub", "path": None}),
    ({"tokenizer": "/home/ann's/bpe"}, {"tokenizer": None}),
]


def test_no_path_of_the_training_machine_is_in_the_card(finished, tmp_path):
    last = finished / "step-12"
    for number, (data, shown) in enumerate(DATA):
        trainer = json.loads((last / TRAINER).read_text())
        trainer["settings"]["data"] |= NO_PATHS | data
        trainer["settings"]["train"]["init_from"] = "/home/ann's/run"
        (last / TRAINER).write_text(json.dumps(trainer))
        list_files(last)
        output = tmp_path / f"exported-{number}"
        export(last, output, "apache-2.0")
        text = (output / "README.md").read_text()
        assert not [place for place in ("ann's", "own/", str(tmp_path.parent)) if place in text]
        printed = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])["data"]
        assert {key: printed.get(key) for key in shown} == shown
