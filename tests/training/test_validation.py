"""The validation loss: of a sample that stands for its split, in bits of the text it scores."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from checkpoints import evaluate
from runs import read_lines
from texts import ADDS_A_SPACE, EOS_IN_TEXTS, config_of, made_texts, quiet, save_tokenizer

from mixer.data.prepare import prepare
from mixer.data.samples import TokenFile
from mixer.data.tokenizer import TextBytes, load_tokenizer
from mixer.distributed.world import World
from mixer.objectives.config import ObjectiveConfig
from mixer.objectives.language import Language
from mixer.training.config import load_config
from mixer.training.loop import train

CONTEXT = 16


class OneNat(torch.nn.Module):
    """A loss of one nat for each target; notes which samples it is given."""

    def forward(self, inputs, targets):
        self.inputs = [*getattr(self, "inputs", []), *inputs.tolist()]
        scored = targets != -100
        return scored.float(), scored & (targets % 2 == 0)


@pytest.mark.parametrize("packed", [True, False])
def test_bits_per_byte_are_of_the_tokens_that_are_scored(tmp_path, packed):
    """A validation text in two languages: their tokens stand for different numbers of bytes."""
    config = config_of(tmp_path, made_texts(20), packed=packed)
    other = config_of(tmp_path / "other", made_texts(20) + ["кот сидел на ковре " * 60] * 20)
    config = replace(config, validation_path=other.path, validation_fraction=0.01)
    prepare(config, quiet)
    directory = config.directory
    validation, tokenizer = TokenFile(directory, "validation", CONTEXT), load_tokenizer(directory)
    data, model = SimpleNamespace(validation=validation, manifest=validation.manifest), OneNat()
    data.text_bytes = TextBytes(tokenizer)
    for samples in (7, 50, 0):
        model.inputs = []
        train_options = ObjectiveConfig(eval_samples=samples, batch_size=8)
        language = Language(train_options, config, CONTEXT)
        found, _ = language.validate(model, data, World(Accelerator()))
        chosen = samples or len(validation)
        first = [row[0] for row in model.inputs]
        picked = np.arange(chosen) * len(validation) // chosen
        inputs, targets = validation.batch(picked)
        assert first[:chosen] == inputs[:, 0].tolist()  # spread over the split
        scored = targets[targets != -100]
        text = scored[scored != tokenizer.eos_token_id]
        size = sum(map(len, tokenizer.convert_ids_to_tokens(text)))  # a symbol for each byte
        assert (found["validation_loss"], found["validation_tokens"]) == (1, len(scored))
        bits = len(scored) / math.log(2) / size
        assert found["validation_bits_per_byte"] == pytest.approx(bits)
        even = (scored % 2 == 0).sum().item()
        assert found["validation_accuracy"] == pytest.approx(even / len(scored))


@pytest.mark.parametrize("packed", ["true", "false"])
@pytest.mark.parametrize("kind", [*ADDS_A_SPACE, *EOS_IN_TEXTS])
def test_bits_per_byte_are_those_of_eval_and_of_the_text_whatever_its_tokenizer_adds(
    tmp_path, monkeypatch, kind, packed
):
    """Of texts so short that a space before each counts."""
    monkeypatch.chdir(tmp_path)
    texts = [f"no {number}\n{number}" for number in range(400)]
    Path("rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    given = (
        "model.hidden_size=8 model.num_hidden_layers=1 model.max_position_embeddings=16 "
        "train.steps=1 train.eval_every=0 train.eval_samples=0 optim.warmup_steps=0 name=short "
        "data.source=jsonl data.path=rows.jsonl data.validation_fraction=0.5 data.directory=data "
        f"data.tokenizer={save_tokenizer(tmp_path / 'tokenizer', kind)} data.packed={packed}"
    )
    train(load_config(None, given.split()))
    logged = read_lines(Path("runs/short"))[-1]["validation_bits_per_byte"]
    whole = evaluate("runs/short/step-1")
    # Packed, the end fills no sample; in rows, the first token of each is not scored.
    assert logged == pytest.approx(whole["bits_per_byte"], rel=0.01 if packed == "true" else 1e-6)
    half = evaluate("runs/short/step-1", max_tokens=whole["tokens_scored"] // 2)
    assert half["bytes"] == pytest.approx(whole["bytes"] / 2, rel=0.02)
    read = evaluate("runs/short/step-1", text=["rows.jsonl"])
    assert read["bytes"] == sum(map(len, texts))
    part = evaluate("runs/short/step-1", text=["rows.jsonl"], max_tokens=read["tokens_scored"] // 2)
    assert part["bytes"] == pytest.approx(read["bytes"] / 2, rel=0.02)
