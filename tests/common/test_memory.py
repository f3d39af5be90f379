"""Out of memory: one message with the sizes and what to lower, and all processes end."""

import os
import re

import pytest
import torch
from checkpoints import continuations

from mixer import MaskedMixerForCausalLM
from mixer.common.errors import UserError
from mixer.common.hardware import is_out_of_memory
from mixer.evaluation.config import EvalOptions
from mixer.evaluation.evaluate import evaluate_checkpoint
from mixer.training.config import load_config
from mixer.training.loop import train


def ask_for_too_much() -> None:
    """The last process asks for more memory than any machine has, in its third forward pass."""
    real, calls = MaskedMixerForCausalLM.forward, []

    def forward(*arguments, **options):
        calls.append(1)
        if int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1:
            torch.empty(1 << 60 if len(calls) > 2 else 1)
        return real(*arguments, **options)

    MaskedMixerForCausalLM.forward = forward


def check(output: str, *named: str) -> None:
    (said,) = re.findall("out of memory on .*", output)
    assert "Traceback" not in output
    assert re.search(r"the peak was \d+\.\d\d GiB", said)
    for words in named:
        assert words in said


def test_training_names_the_sizes_and_the_settings_that_need_less(write_config, launch):
    sizes = ("train.batch_size=4", "train.recompute=activation")
    ranks = launch("--config", write_config(), *sizes, processes=2, before=ask_for_too_much)
    assert set(ranks.wait(patience=60)) <= {1, 2}
    named = ("train.batch_size = 4", "model.max_position_embeddings = 32", "model.hidden_size = 32")
    check(ranks.output, *named, "raise train.gradient_accum", "set train.recompute=block")


def test_evaluation_and_generation_too(finished, launch, tmp_path, monkeypatch):
    checkpoint = finished / "step-12"
    arguments = ("--checkpoint", checkpoint, "--device", "cpu", "--batch-size", 3)
    ranks = launch(*arguments, program="eval", processes=2, before=ask_for_too_much)
    assert set(ranks.wait(patience=60)) <= {1, 2}
    check(ranks.output, "--batch-size 3, --window the context's", "Give a smaller --batch-size")
    monkeypatch.setattr(MaskedMixerForCausalLM, "forward", MaskedMixerForCausalLM.forward)
    ask_for_too_much()
    with pytest.raises(UserError) as raised:
        continuations(checkpoint, ["def", "class"], 9, 0.0, 0)
    check(str(raised.value), "--new-tokens 9", "Give a smaller --new-tokens")


def test_the_advice_is_what_was_not_done_already(finished, write_config, monkeypatch):
    """Training's is in test_train."""
    monkeypatch.setattr(MaskedMixerForCausalLM, "forward", MaskedMixerForCausalLM.forward)
    ask_for_too_much()
    checkpoint = finished / "step-12"
    with pytest.raises(UserError, match=r"\. Give a smaller --window$"):
        evaluate_checkpoint(EvalOptions(str(checkpoint), device="cpu", batch_size=1, dtype="bf16"))
    with pytest.raises(UserError, match=r"\. Give a smaller --new-tokens$"):
        continuations(checkpoint, ["def"], 9, 0.0, 0)
    run = load_config(str(write_config()), ["name=out", "train.recompute=block"])
    with pytest.raises(UserError, match="out of memory .* To need less: .*") as raised:
        train(run)
    assert "recompute=block" not in str(raised.value)


def test_other_errors_are_not_taken_for_it():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    for other in (ValueError("out of memory"), RuntimeError("bad shape"), OSError(28, "full")):
        assert not is_out_of_memory(other)
