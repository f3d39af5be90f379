"""Where the package is meant to be extended, one class is enough: a token mixing that is defined
here is trained, saved, loaded, generated from and counted, and nothing in the package knows it. The
code of docs/add_a_mixing_variant.md runs as it stands there.
"""

import re
import sys

import pytest
import torch
from models import generate, lively_model, tokens
from runs import ROOT, read_losses
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from mixer.checkpoints.pretrained import load_checkpoint
from mixer.common.errors import UserError
from mixer.evaluation.matrices import mixing_matrices
from mixer.models.masked_mixer import mixing, modeling
from mixer.models.masked_mixer.cache import MixingCache
from mixer.models.masked_mixer.convolution import TriangularConv
from mixer.training.optim import kinds_of

PAGE = (ROOT / "docs/add_a_mixing_variant.md").read_text()
VARIANT, LOW_RANK = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def run_page(code: str, write_config, monkeypatch, *overrides: str) -> None:
    """Runs code of the page as a file of one's own, with a configuration and overrides."""
    monkeypatch.setattr(sys, "argv", ["mine.py", str(write_config()), "name=mine", *overrides])
    monkeypatch.setattr(mixing, "VARIANTS", list(mixing.VARIANTS))
    exec(compile(code, "mine.py", "exec"), {"__name__": "__main__"})


def test_the_pages_variant_trains(write_config, monkeypatch, tmp_path):
    run_page(VARIANT, write_config, monkeypatch, "optim.lr=1e-2")
    losses = read_losses(tmp_path / "runs/mine")
    assert losses[12] < losses[1] - 0.2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "runs/mine/step-12")
    assert type(model.model.layers[0].mixing).__name__ == "Mine"
    assert all(map(mixing_matrices, model.model.layers))
    monkeypatch.undo()
    with pytest.raises(UserError, match="has weights .*If its mixing variant is yours, add it to"):
        load_checkpoint(tmp_path / "runs/mine/step-12", torch.device("cpu"))


@pytest.mark.parametrize(
    ("optimizer", "initial", "form"), [("adamw", "reference", "full"), ("muon", "zero", "lags")]
)
def test_the_pages_convolution_trains_and_its_weight_stays_narrow(
    optimizer, initial, form, write_config, monkeypatch, tmp_path
):
    """Whatever mixing_weight says, which it replaces."""
    code = LOW_RANK + VARIANT.replace("= convolution(config)", "= LowRank(config)")
    overrides = [
        "train.compile=no",
        f"optim.name={optimizer}",
        "optim.lr=1e-2",
        f"model.mixing_init={initial}",
        f"model.mixing_weight={form}",
    ]
    run_page(code, write_config, monkeypatch, *overrides)
    losses = read_losses(tmp_path / "runs/mine")
    assert losses[12] < losses[1] - 0.2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "runs/mine/step-12")
    saved = load_file(tmp_path / "runs/mine/step-12/model.safetensors")
    factors = {
        name: parameter
        for name, parameter in model.named_parameters()
        if name.endswith(("left", "right"))
    }
    assert len(factors) == 2 * len(model.model.layers)
    assert set(kinds_of(model).lags) == set(factors.values())
    assert all(torch.equal(factor, saved[name]) for name, factor in factors.items())
    for conv in (block.mixing.conv for block in model.model.layers):
        weight = conv.mixing_weight()[0, 0]
        x = torch.randn(2, conv.context, conv.channels)
        assert torch.linalg.matrix_rank(weight).item() == 8
        torch.testing.assert_close(conv(x), weight.tril() @ x + conv.bias.T)
    ids = tokens(batch=2, length=4)
    assert torch.equal(generate(model, ids), generate(model, ids, use_cache=False))


class Uneven(nn.Module):
    """As many convolutions, one after another, as its subclasses say."""

    def __init__(self, config):
        super().__init__()
        self.convs = nn.ModuleList(TriangularConv(config) for _ in range(self.count))

    def forward(self, x, residual, past=None):
        for conv in self.convs:
            x = conv(x, None, past)
        return residual + x


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("counts", [(1, 2), (2, 1, 1), (1, 0, 3)])
def test_blocks_may_have_different_numbers_of_convolutions(counts, static, monkeypatch):
    kinds = [type(f"Uneven{count}", (Uneven,), {"count": count}) for count in counts]
    monkeypatch.setattr(modeling, "mixing_class", lambda config, block: kinds[block])
    model = lively_model(num_hidden_layers=len(counts))
    ids = tokens(batch=2, length=4)
    cache = MixingCache(model.config, static)
    written = generate(model, ids, past_key_values=cache)
    assert torch.equal(written, generate(model, ids, use_cache=False))
    assert len(cache.memories) == sum(counts)
