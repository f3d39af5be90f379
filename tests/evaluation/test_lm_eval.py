"""Checkpoints in lm-evaluation-harness itself: on the same documents its perplexities are ours, and
it chooses answers.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
import yaml
from checkpoints import WORDS, documents, save_checkpoint

from mixer.checkpoints.pretrained import load_checkpoint
from mixer.evaluation.evaluate import EvalOptions, evaluate_checkpoint

pytest.importorskip(
    "lm_eval", reason="lm-eval is not installed: pip install -c constraints.txt -e .[eval]"
)


def harness_numbers(directory, folder) -> dict:
    """The harness's own numbers for a local task of rolling log-likelihoods."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    task = {
        "task": "local_rolling",
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(folder / "documents.jsonl")},
            "cache_dir": str(folder / "cache"),
        },
        "output_type": "loglikelihood_rolling",
        "test_split": "test",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [
            {"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")
        ],
    }
    (folder / "local_rolling.yaml").write_text(yaml.safe_dump(task))
    model, tokenizer = load_checkpoint(directory, torch.device("cpu"))
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2)
    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    results = simple_evaluate(
        model=harness, tasks=["local_rolling"], task_manager=tasks, bootstrap_iters=0
    )
    return results["results"]["local_rolling"]


@pytest.mark.parametrize("kind", ["masked_mixer", "gpt2"])
def test_numbers_are_those_of_lm_evaluation_harness(tmp_path, kind):
    rows = "".join(json.dumps({"text": text}) + "\n" for text in documents())
    (tmp_path / "documents.jsonl").write_text(rows)
    save_checkpoint(tmp_path / "model", kind)
    theirs = harness_numbers(tmp_path / "model", tmp_path)
    text = [str(tmp_path / "documents.jsonl")]
    conventions = {"first_token": "eos", "last_window": "full"}
    ours = evaluate_checkpoint(
        EvalOptions(checkpoint=str(tmp_path / "model"), text=text, device="cpu", **conventions)
    )
    for name in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        assert ours[name] == pytest.approx(theirs[f"{name},none"], rel=1e-4)


CHOICE = {
    "task": "local_choice",
    "dataset_path": "json",
    "output_type": "multiple_choice",
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}],
}


# The command `lm_eval`, which else reads the descriptions of all its own tasks first, for ten
# seconds.
WITHOUT_DEFAULT_TASKS = """
import functools
from lm_eval.__main__ import cli_evaluate
from lm_eval.tasks import TaskManager
TaskManager.__init__ = functools.partialmethod(TaskManager.__init__, include_defaults=False)
cli_evaluate()
"""


def choice_rows() -> list[dict]:
    generator = torch.Generator().manual_seed(4)
    rows = []
    for answer in range(12):
        words = [WORDS[word] for word in torch.randint(len(WORDS), (8,), generator=generator)]
        rows.append({"question": " ".join(words[:5]), "choices": words[5:], "answer": answer % 3})
    return rows


@torch.no_grad()
def share_chosen_rightly(directory, rows: list[dict]) -> float:
    """How often the answer is the most probable choice after its question and a space."""
    model, tokenizer = load_checkpoint(directory, torch.device("cpu"))

    def log_probability(question: str, choice: str) -> float:
        ids, begin = tokenizer(f"{question} {choice}").input_ids, len(tokenizer(question).input_ids)
        logs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return sum(logs[place - 1, ids[place]].item() for place in range(begin, len(ids)))

    chosen = [
        max(range(3), key=lambda n, row=row: log_probability(row["question"], row["choices"][n]))
        for row in rows
    ]
    return sum(n == row["answer"] for n, row in zip(chosen, rows, strict=True)) / len(rows)


def test_the_harness_runs_a_multiple_choice_task_on_a_saved_checkpoint(tmp_path):
    save_checkpoint(tmp_path / "model", "masked_mixer")
    rows = choice_rows()
    (tmp_path / "choices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kwargs = {
        "data_files": {"test": str(tmp_path / "choices.jsonl")},
        "cache_dir": str(tmp_path / "cache"),
    }
    (tmp_path / "local_choice.yaml").write_text(yaml.safe_dump(CHOICE | {"dataset_kwargs": kwargs}))
    command = [
        sys.executable,
        "-c",
        WITHOUT_DEFAULT_TASKS,
        "run",
        "--model",
        "hf",
        "--device",
        "cpu",
        "--batch_size",
        "4",
    ]
    command += [
        "--model_args",
        f"pretrained={tmp_path / 'model'},trust_remote_code=True",
        "--tasks",
        "local_choice",
    ]
    command += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "results")]
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (results,) = (tmp_path / "results").rglob("results_*.json")
    accuracy = json.loads(results.read_text())["results"]["local_choice"]["acc,none"]
    assert accuracy == pytest.approx(share_chosen_rightly(tmp_path / "model", rows))
