"""Checkpoints in lm-evaluation-harness itself: on the same documents its perplexities are ours."""

import json
import os
import subprocess
import sys

import pytest
import torch
import yaml
from checkpoints import documents, save_checkpoint

from mixer.checkpoints.pretrained import load_checkpoint
from mixer.evaluation.evaluate import EvalOptions, evaluate_checkpoint

pytest.importorskip(
    "lm_eval", reason="lm-eval is not installed: pip install -c constraints.txt -e .[eval]"
)


# The command `lm_eval`, which else reads the descriptions of all its own tasks first, for ten
# seconds.
WITHOUT_DEFAULT_TASKS = """
import functools
from lm_eval.__main__ import cli_evaluate
from lm_eval.tasks import TaskManager
TaskManager.__init__ = functools.partialmethod(TaskManager.__init__, include_defaults=False)
cli_evaluate()
"""
METRICS = ("word_perplexity", "byte_perplexity", "bits_per_byte")


def harness_numbers(directory, folder) -> dict:
    """What the harness's command finds for a local task of rolling log-likelihoods."""
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
    command += ["--model_args", f"pretrained={directory},trust_remote_code=True"]
    command += ["--include_path", str(folder), "--output_path", str(folder / "results")]
    environment = os.environ | {"HF_MODULES_CACHE": str(folder / "modules")}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (results,) = (folder / "results").rglob("results_*.json")
    return json.loads(results.read_text())["results"]["local_rolling"]


def our_numbers(directory, file, texts: list[str]) -> dict:
    """What eval.py finds for rows, or for a plain file, which is written first."""
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    file.write_text(content if file.suffix == ".jsonl" else "".join(texts), newline="")
    conventions = {"first_token": "eos", "last_window": "full", "device": "cpu"}
    return evaluate_checkpoint(EvalOptions(str(directory), text=[str(file)], **conventions))


@pytest.mark.parametrize("kind", ["masked_mixer", "gpt2"])
def test_numbers_are_those_of_lm_evaluation_harness(tmp_path, kind):
    save_checkpoint(tmp_path / "model", kind)
    ours = our_numbers(tmp_path / "model", tmp_path / "documents.jsonl", documents())
    theirs = harness_numbers(tmp_path / "model", tmp_path)
    for name in METRICS:
        assert ours[name] == pytest.approx(theirs[f"{name},none"], rel=1e-4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint") / "model"
    save_checkpoint(directory, "masked_mixer")
    return directory


def harness_nats(directory, text: str, bos: str | None = None, **options) -> float:
    """The harness's own number for a document, by its model class; bos: of the tokenizer."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model, tokenizer = load_checkpoint(directory, torch.device("cpu"))
    tokenizer.bos_token = bos
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4, **options)
    request = Instance("loglikelihood_rolling", {}, (text,), 0)
    return -harness.loglikelihood_rolling([request], disable_tqdm=True)[0]


REPEATED = " the" * 100  # all windows are the same, but for the first
SPECIAL = "the <|endoftext|> mixer"


ROWS = {
    "CRLF": "the\r\nmixer\r\n",
    "CR": "\r",
    "blank lines": "\n\n \t",
    "a space": " ",
    "one token": "e",
    "repeated windows": REPEATED,
}


@pytest.mark.parametrize("text", ROWS.values(), ids=ROWS)
def test_each_row_has_the_harness_own_number(checkpoint, tmp_path, text):
    ours = our_numbers(checkpoint, tmp_path / "rows.jsonl", [text])
    assert ours["nats"] == pytest.approx(harness_nats(checkpoint, text, logits_cache=False), 1e-5)
    assert ours["bytes"] == len(text)


def test_where_the_numbers_differ_it_is_for_what_docs_evaluation_says(checkpoint, tmp_path):
    rows, tokenizer = tmp_path / "rows.jsonl", load_checkpoint(checkpoint, torch.device("cpu"))[1]
    # Text that spells a special token: the harness takes it for the token.
    theirs, ours = harness_nats(checkpoint, SPECIAL), our_numbers(checkpoint, rows, [SPECIAL])
    assert len(tokenizer(SPECIAL).input_ids) < ours["tokens_scored"]
    assert theirs < ours["nats"] / 2
    # Its cache of logits gives windows that end alike, but are scored in part, another part's.
    assert harness_nats(checkpoint, REPEATED) != pytest.approx(
        harness_nats(checkpoint, REPEATED, logits_cache=False), 1e-5
    )
    # It begins with BOS where the tokenizer has another one than EOS.
    ours = our_numbers(checkpoint, rows, ["the mixer"])["nats"]
    own = {"bos": tokenizer.convert_ids_to_tokens(7)}
    assert harness_nats(checkpoint, "the mixer", **own) != pytest.approx(ours, 1e-5)
    eos = {"prefix_token_id": tokenizer.eos_token_id}
    assert harness_nats(checkpoint, "the mixer", **own, **eos) == pytest.approx(ours, 1e-5)
    # Its words: one more for each end that is white space, and one for an empty row.
    from lm_eval.api.task import Task

    for text, more in (("the mixer", 0), (" the mixer", 1), ("\nthe\n", 2), (" ", 2)):
        assert Task.count_words(text) == our_numbers(checkpoint, rows, [text])["words"] + more
    assert Task.count_words("") == 1
    # Plain files: datasets reads other line ends as \n.
    from datasets import load_dataset

    plain, text = tmp_path / "plain.txt", "the\r\nmixer\r"
    ours = our_numbers(checkpoint, plain, [text])
    how = {"sample_by": "document", "cache_dir": str(tmp_path / "cache"), "split": "train"}
    assert load_dataset("text", data_files=str(plain), **how)[0]["text"] == "the\nmixer\n"
    assert ours["nats"] == pytest.approx(harness_nats(checkpoint, text), 1e-5)
