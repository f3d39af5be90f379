"""Where the package is meant to be extended, one class is enough: a token mixing that is defined
here is trained, saved, loaded, generated from and counted, and nothing in the package knows it.
"""

import pytest
import torch
from models import generate, small_model, tokens
from runs import read_losses
from torch import nn
from transformers import AutoModelForCausalLM

from mixer.analysis.matrices import mixing_matrices
from mixer.models.masked_mixer import mixing
from mixer.models.masked_mixer.cache import MixingCache
from mixer.models.masked_mixer.mixing import TokenMixing, TriangularConv
from mixer.training.config import load_config
from mixer.training.loop import train


class Product(TokenMixing):
    """Two convolutions of the same input; one of them, through a sigmoid, gates the other."""

    convolutions = 2

    def __init__(self, config):
        super().__init__()
        self.value = TriangularConv(config)
        self.gate = TriangularConv(config)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def mix(self, x, residual, memories, positions):
        value = self.value(x, None, memories[0], positions)
        gate = self.gate(x, None, memories[1], positions).sigmoid()
        return residual + self.out_proj(gate * value)


@pytest.fixture
def product(monkeypatch):
    variants = [(lambda config: True, Product), *mixing.VARIANTS]
    monkeypatch.setattr(mixing, "VARIANTS", variants)


def test_a_new_variant_is_trained_and_loaded(product, write_config, tmp_path):
    train(load_config(str(write_config()), ["name=product", "optim.lr=1e-2"]))
    losses = read_losses(tmp_path / "runs/product")
    assert losses[12] < losses[1] - 0.2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "runs/product/step-12")
    assert type(model.model.layers[0].mixing) is Product
    assert len(mixing_matrices(model)[0]) == 2


@pytest.mark.parametrize("static", [False, True])
def test_a_new_variant_is_generated_from_with_a_cache(product, static):
    model, ids = small_model(), tokens(batch=2, length=4)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, TriangularConv):  # so that a wrong row changes the tokens
                module.set_mixing_weight(8 * module.mixing_weight())
    cache = MixingCache(model.config, static)
    assert len(cache.layers) == 4
    written = generate(model, ids, past_key_values=cache)
    assert cache.get_seq_length() == 11
    assert torch.equal(written, generate(model, ids, use_cache=False))


def test_a_new_variant_is_counted_by_its_parts(product):
    counts = small_model().flops_per_token()
    mixing = 2 * (2 * 2 * 16 * 13 / 2)  # two blocks of two triangles of 12 tokens
    linear = 2 * (2 * 16 * 16 + 2 * 2 * 16 * 64) + 2 * 16 * 50  # out_proj, MLP; lm_head
    assert counts["token_mixing"] == 3 * mixing
    assert counts["useful"] == 3 * (mixing + linear)


class Softmax(TriangularConv):
    """A mixing weight whose rows are positive and sum to 1."""

    def mixing_weight(self):
        later = torch.ones_like(self.weight, dtype=torch.bool).triu(1)
        return self.weight.masked_fill(later, -torch.inf).softmax(-1)


def test_another_parametrisation_of_the_weight_is_one_method(monkeypatch):
    monkeypatch.setattr(mixing, "TriangularConv", Softmax)
    model, ids = small_model(), tokens(batch=2, length=4)
    ones = torch.ones(1, 12, 16)
    conv = model.model.layers[0].mixing.conv
    expected = ones + conv.bias[0][:, None]
    torch.testing.assert_close(conv(ones), expected)  # a mean of ones
    for matrices in mixing_matrices(model):
        assert matrices["W"].sum(1) == pytest.approx(1)
    assert torch.equal(generate(model, ids), generate(model, ids, use_cache=False))
