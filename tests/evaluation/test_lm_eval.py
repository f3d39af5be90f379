"""Checkpoints in lm-evaluation-harness itself: on the same documents its perplexities are ours."""

import json
import os
import subprocess
import sys

import pytest
import torch
import yaml
from checkpoints import documents, evaluate, save_checkpoint

from mixer.checkpoints.pretrained import load_checkpoint

pytest.importorskip(
    "lm_eval", reason="lm-eval is not installed: pip install -c constraints.txt -e .[eval]"
)


# The command `lm_eval` for each model, in one process, whose start takes ten seconds; else it reads
# the descriptions of all its own tasks first.
WITHOUT_DEFAULT_TASKS = """
import functools, sys
from lm_eval.__main__ import cli_evaluate
from lm_eval.tasks import TaskManager
TaskManager.__init__ = functools.partialmethod(TaskManager.__init__, include_defaults=False)
command = sys.argv[:]
for kind in ("masked_mixer", "gpt2"):
    sys.argv = [word.replace("KIND", kind) for word in command]
    cli_evaluate()
"""
METRICS = ("word_perplexity", "byte_perplexity", "bits_per_byte")


def harness_numbers(folder) -> dict[str, dict]:
    """What the harness's command finds for a local task of rolling log-likelihoods, by kind."""
    files = {"data_files": {"test": str(folder / "documents.jsonl")}}
    task = {
        "task": "local_rolling",
        "dataset_path": "json",
        "dataset_kwargs": files | {"cache_dir": str(folder / "cache")},
        "output_type": "loglikelihood_rolling",
        "test_split": "test",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": name} for name in METRICS],
    }
    (folder / "local_rolling.yaml").write_text(yaml.safe_dump(task))
    command = [sys.executable, "-c", WITHOUT_DEFAULT_TASKS, "run", "--model", "hf"]
    command += ["--device", "cpu", "--batch_size", "2", "--tasks", "local_rolling"]
    command += ["--model_args", f"pretrained={folder}/KIND,trust_remote_code=True"]
    command += ["--include_path", str(folder), "--output_path", str(folder / "results/KIND")]
    environment = os.environ | {"HF_MODULES_CACHE": str(folder / "modules")}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return {
        file.relative_to(folder / "results").parts[0]: json.loads(file.read_text())["results"]
        for file in (folder / "results").rglob("results_*.json")
    }


def our_numbers(directory, file, texts: list[str]) -> dict:
    """What eval.py finds for rows, which are written first."""
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return evaluate(directory, text=[str(file)], first_token="eos", last_window="full")


def test_numbers_are_those_of_lm_evaluation_harness(tmp_path):
    ours = {}
    for kind in ("masked_mixer", "gpt2"):
        save_checkpoint(tmp_path / kind, kind)
        ours[kind] = our_numbers(tmp_path / kind, tmp_path / "documents.jsonl", documents())
    theirs = harness_numbers(tmp_path)
    assert theirs.keys() == ours.keys()
    for kind, found in theirs.items():
        for name in METRICS:
            wanted = found["local_rolling"][f"{name},none"]
            assert ours[kind][name] == pytest.approx(wanted, rel=1e-4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint") / "model"
    save_checkpoint(directory, "masked_mixer")
    return directory


def harness_nats(directory, text: str) -> float:
    """The harness's own number for a document, by its model class."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model, tokenizer = load_checkpoint(directory, torch.device("cpu"))
    tokenizer.bos_token = None
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4, logits_cache=False)
    request = Instance("loglikelihood_rolling", {}, (text,), 0)
    return -harness.loglikelihood_rolling([request], disable_tqdm=True)[0]


ROWS = {
    "CRLF": "the\r\nmixer\r\n",
    "CR": "\r",
    "blank lines": "\n\n \t",
    "a space": " ",
    "one token": "e",
    "repeated windows": " the" * 100,
}


@pytest.mark.parametrize("text", ROWS.values(), ids=ROWS)
def test_each_row_has_the_harness_own_number(checkpoint, tmp_path, text):
    ours = our_numbers(checkpoint, tmp_path / "rows.jsonl", [text])
    assert ours["nats"] == pytest.approx(harness_nats(checkpoint, text), 1e-5)
    assert ours["bytes"] == len(text)
