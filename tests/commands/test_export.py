"""A checkpoint is exported with its model card, which has no path of the machine that trained it;
weights that are not finite are refused.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from checkpoints import list_files
from huggingface_hub import ModelCard
from models import CODE
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from mixer.checkpoints.checkpoint import TRAINER
from mixer.checkpoints.convert import convert, convert_back
from mixer.checkpoints.export import export
from mixer.commands.export import main as export_command
from mixer.common.errors import UserError
from mixer.models.masked_mixer.configuration import AUTO_MAP


def test_a_checkpoint_is_exported_with_a_card_of_its_run(finished, tmp_path, monkeypatch):
    last, given = finished / "step-12", tmp_path / "given"
    assert {path.name for path in last.iterdir()} >= CODE
    options = ["--output", str(given), "--license", "apache-2.0", "--dtype", "bf16"]
    monkeypatch.setattr("sys.argv", ["export", str(last), *options])
    export_command()
    text = (given / "README.md").read_text()
    card = ModelCard(text)
    assert card.data.license == "apache-2.0" and card.data.library_name == "transformers"
    for said in ("| tokens seen | 3,072 |", "| validation bits per byte | ", "batch_size: 8"):
        assert said in text
    assert str(tmp_path.parent) not in text and "trainer_state" not in os.listdir(given)
    model = AutoModelForCausalLM.from_pretrained(given)
    assert model.dtype == torch.bfloat16 and model.config.auto_map == AUTO_MAP
    with pytest.raises(UserError, match="already exists"):
        export(last, given, "apache-2.0")


def test_the_saved_tokenizer_knows_the_context(finished, tmp_path):
    last, long = finished / "step-12", "def read(self, size): return self.text[:size]\n" * 9
    convert_back(last, tmp_path / "reference.safetensors")
    convert(tmp_path / "reference.safetensors", tmp_path / "converted", str(last))
    export(last, tmp_path / "exported", "mit")
    for directory in (last, tmp_path / "converted", tmp_path / "exported"):
        tokenizer = AutoTokenizer.from_pretrained(directory)
        cut = tokenizer(long, truncation=True).input_ids
        assert len(tokenizer(long).input_ids) > len(cut) == 32
    writer = pipeline("text-generation", model=str(last))
    how = {"max_new_tokens": 8, "do_sample": False, "handle_long_generation": "hole"}
    (text,) = writer(long, return_tensors=True, **how)
    # the prompt's end, as much as leaves room for the new tokens
    assert len(text["generated_token_ids"]) == 32


def test_an_export_into_the_directory_one_stands_in_has_its_name(finished, tmp_path, monkeypatch):
    (tmp_path / "my-mixer").mkdir()
    monkeypatch.chdir(tmp_path / "my-mixer")
    export(finished / "step-12", Path("."), "apache-2.0")
    assert "# my-mixer\n" in Path("README.md").read_text()


def test_weights_that_are_not_finite_are_refused(finished, tmp_path):
    checkpoint = shutil.copytree(finished / "step-12", tmp_path / "changed")
    shutil.rmtree(checkpoint / "trainer_state")  # with what its files were
    weights = load_file(checkpoint / "model.safetensors")

    def export_with(value: float, dtype: str) -> None:
        weights["lm_head.weight"][3, 5] = value
        save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
        export(checkpoint, tmp_path / dtype, "mit", dtype)

    for value in (float("nan"), float("-inf")):
        with pytest.raises(UserError, match="not finite in lm_head.weight.*: its training div"):
            export_with(value, "fp32")
    with pytest.raises(UserError, match="in lm_head.weight.*: fp16 does not reach that far: give"):
        export_with(1e6, "fp16")
    assert not (tmp_path / "fp32").exists() and not (tmp_path / "fp16").exists()
    export_with(1e6, "fp32")


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
