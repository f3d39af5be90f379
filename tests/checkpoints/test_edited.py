"""Checkpoints that someone has changed: every command, and a resume, refuses them in one line."""

import importlib
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import change_config, continuations, evaluate, list_files, save_checkpoint
from runs import refusal
from safetensors.torch import load_file, save_file

from mixer.checkpoints import model_files
from mixer.checkpoints.checkpoint import LISTING, OPTIMIZER
from mixer.checkpoints.export import export
from mixer.checkpoints.pretrained import load_checkpoint, load_masked_mixer
from mixer.common.errors import UserError

CPU = torch.device("cpu")


def uses(checkpoint: Path) -> list[Callable]:
    return [
        lambda: evaluate(checkpoint),
        lambda: continuations(checkpoint, ["def"], 2, 0.0, 0),
        lambda: load_masked_mixer(checkpoint),
        lambda: export(checkpoint, checkpoint.parent / "exported", "mit"),
    ]


def change_weights(file: Path, part: str, change: Callable) -> None:
    """Changes the tensors with `part` in their names; None removes them."""
    weights = load_file(file)
    changed = {name: change(weights[name]) for name in weights if part in name}
    assert changed
    kept = {name: x for name, x in (weights | changed).items() if x is not None}
    save_file(kept, file, {"format": "pt"})


def gone(tensor: torch.Tensor) -> None:
    return None


def test_a_file_that_was_added_changed_or_removed_is_named(finished, tmp_path, monkeypatch):
    monkeypatch.setenv("MIXER_CACHE", str(tmp_path / "cache"))
    checkpoint = finished / "step-12"
    (checkpoint / "README.md").write_text("notes, which nothing reads")
    (checkpoint / OPTIMIZER).unlink()  # which only a resume reads
    load_masked_mixer(checkpoint)  # so that its files are known to be good

    def refuse(problem: str) -> None:
        for use in uses(checkpoint):
            with pytest.raises(UserError, match=f"step-12 is damaged: .*{problem}.*: copy the ch"):
                use()

    for name in ("adapter_config.json", "model.safetensors.index.json", "trainer_state/x.bin"):
        (checkpoint / name).write_text("{}")
        refuse(f"{name} was added, which may change what is loaded")
        (checkpoint / name).unlink()
    for name in ("model.safetensors", "config.json"):
        content = (checkpoint / name).read_bytes()
        changed = content[:-1] + bytes([content[-1] ^ 8])
        if name == "config.json":  # which stays JSON
            changed = content.replace(b'"hidden_size": 32', b'"hidden_size": 64')
        (checkpoint / name).write_bytes(changed)
        refuse(f"{name} is not what was written")
        (checkpoint / name).write_bytes(content)
    (checkpoint / LISTING).unlink()
    refuse("files.json cannot be read")
    shutil.rmtree(checkpoint / "trainer_state")  # then it is a model as any other
    load_checkpoint(checkpoint, CPU)


def test_a_model_from_elsewhere_is_read_from_the_files_that_are_hashed(tmp_path):
    save_checkpoint(tmp_path, "gpt2")
    for name in ("other.safetensors", "model-1-of-1.safetensors"):
        (tmp_path / name).write_text("not weights")
    index = {"weight_map": {"lm_head.weight": "model-1-of-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    change_config(tmp_path, transformers_weights="other.safetensors")
    load_checkpoint(tmp_path, CPU)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="has an adapter, adapter_config.json"):
        load_checkpoint(tmp_path, CPU)


def test_what_is_no_complete_checkpoint_is_not_taken_for_one(finished, tmp_path):
    for name in ("step-12.partial", "step-12.old.partial"):
        for use in uses(shutil.copytree(finished / "step-12", tmp_path / name)):
            with pytest.raises(UserError, match="was being written or deleted: copy"):
                use()


def test_a_link_that_moves_while_a_command_reads_is_followed_once(finished, monkeypatch):
    """Training moves `best`; here to where nothing is."""
    best, damage = finished / "best", model_files.damage

    def point(to: str) -> None:
        best.unlink(missing_ok=True)
        best.symlink_to(to)

    def read(checkpoint: Path, **how) -> str | None:
        point("elsewhere")
        return damage(checkpoint, **how)

    monkeypatch.setattr(model_files, "damage", read)
    copy = ["--output", str(finished / "copy")]
    for program, arguments in {
        "eval": ["--checkpoint", str(best), "--device", "cpu"],
        "inspect": ["--checkpoint", str(best), *copy],
        "generate": ["--checkpoint", str(best), "--prompt", "def", "--new-tokens", "2"],
        "export": [str(best), "--output", str(finished / "exported"), "--license", "mit"],
        "convert": [str(best), "--output", str(finished / "back.safetensors"), "--back"],
    }.items():
        point("step-8")
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        importlib.import_module(f"mixer.commands.{program}").main()
        assert not best.exists()
    assert (finished / "eval-step-8/report.md").exists()


@pytest.mark.parametrize(("kind", "dtype"), [("mixer", torch.int64), ("gpt2", torch.bool)])
def test_weights_that_are_no_floating_point_numbers_are_refused(tmp_path, kind, dtype):
    save_checkpoint(tmp_path / "saved", kind)
    file = tmp_path / "saved" / "model.safetensors"
    name = next(name for name in load_file(file) if name.endswith("bias"))
    change_weights(file, name, lambda weight: weight.to(dtype))
    with pytest.raises(UserError, match=f"not floating-point numbers, {name} of type"):
        load_checkpoint(tmp_path / "saved", CPU)


@pytest.mark.parametrize("model_type", ["masked_mixer", "qwen3"])
def test_more_layers_than_tensors_are_refused_before_they_are_built(tmp_path, model_type):
    save_checkpoint(tmp_path, "mixer")
    change_config(tmp_path, model_type=model_type, num_hidden_layers=10**12)
    with pytest.raises(UserError, match="has num_hidden_layers 1000000000000 in its config.json"):
        load_checkpoint(tmp_path, CPU)


def pickle_weights(checkpoint: Path) -> None:
    torch.save(load_file(checkpoint / "model.safetensors"), checkpoint / "pytorch_model.bin")
    (checkpoint / "model.safetensors").unlink()


def edit(file: str, part: str, change: Callable) -> Callable:
    return lambda checkpoint: change_weights(checkpoint / file, part, change)


HEAD = "lm_head.weight"


def rename_moment(checkpoint: Path) -> None:
    moments = load_file(checkpoint / OPTIMIZER)
    moments["another"] = moments.pop(f"{HEAD}/exp_avg")
    save_file(moments, checkpoint / OPTIMIZER)


EDITS = {
    "no lm_head": (edit("model.safetensors", HEAD, gone), f"lacks the weights {HEAD}"),
    "type": (lambda c: change_config(c, model_type="64"), "config.json that cannot be used"),
    "pickled": (pickle_weights, "no file named model.safetensors"),
    "optimizer": (
        lambda c: (c / OPTIMIZER).write_text("junk"),
        "step-12 has a trainer_state/ that is not what training wrote .*SafetensorError",
    ),
    "no moments": (edit(OPTIMIZER, HEAD, gone), f"lacks {HEAD}/"),
    "that moment of all": (edit(OPTIMIZER, "/exp_avg_sq", gone), "lacks .*/exp_avg_sq"),
    "another name": (rename_moment, "also has another"),
    "cut moment": (edit(OPTIMIZER, HEAD, lambda x: x[:-1] if x.ndim else x), f"{HEAD}/.* of shape"),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_resume_never_begins_anew_what_a_checkpoint_lacks(write_config, finished, name):
    change, message = EDITS[name]
    change(finished / "step-12")
    list_files(finished / "step-12")
    before = (finished / "metrics.jsonl").read_text()
    assert re.search(message, refusal(write_config(), "train.steps=14"))
    assert (finished / "metrics.jsonl").read_text() == before
