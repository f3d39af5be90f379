"""The validation loss: of a sample that stands for its split, in bits of the text it scores."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from texts import config_of, made_texts, quiet

from mixer.data.prepare import prepare
from mixer.data.samples import TokenFile
from mixer.data.tokenizer import load_tokenizer, token_bytes
from mixer.distributed.world import World
from mixer.training.metrics import token_scores

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
    data, model = SimpleNamespace(validation=validation), OneNat()
    data.token_bytes = token_bytes(tokenizer)
    for samples in (7, 50, 0):
        model.inputs = []
        found = token_scores(model, data, samples, 8, World(Accelerator()))
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
