"""Promises of `mixer inspect`: the numbers are what their names say, and every page is
made.
"""

import numpy as np
import pytest
import torch
from checkpoints import save_checkpoint
from launching import run_python
from markdown import tables
from matplotlib.figure import Figure
from pictures import assert_png

from mixer import MaskedMixerConfig, MaskedMixerForCausalLM
from mixer.commands.inspect import main
from mixer.common.errors import UserError
from mixer.evaluation.matrices import (
    by_lag,
    effective_context,
    mixing_matrices,
    plot_by_lag,
)


def test_effective_context_is_counted_by_hand():
    assert effective_context(np.eye(20)) == 1 and effective_context(np.tri(20)) == 18
    for context in range(1, 20):
        matrix = np.tril(np.random.default_rng(1).standard_normal((context, context)))
        recent, count = np.abs(matrix[-1])[::-1], effective_context(matrix)
        assert recent[:count].sum() >= 0.9 * recent.sum() > recent[: count - 1].sum()


def test_the_matrices_are_the_models_and_never_its_upper_triangle():
    model = MaskedMixerForCausalLM(
        MaskedMixerConfig(
            vocab_size=9, hidden_size=8, num_hidden_layers=1, max_position_embeddings=6
        )
    )
    with torch.no_grad():
        model.model.layers[0].mixing.conv.weight += 1
    layer = mixing_matrices(model.model.layers[0])
    expected = model.model.layers[0].mixing.conv.weight[0, 0].tril().detach().numpy()
    np.testing.assert_array_equal(layer["W"], expected)


def test_the_command_writes_an_index_and_a_page_for_each_layer(tmp_path):
    """Of a model without a tokenizer too, as a converted one is."""
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "max_position_embeddings": 24}
    shape |= {"vocab_size": 300, "mixer_kernel_size": 2, "mixer_expansion": True}
    MaskedMixerForCausalLM(MaskedMixerConfig(**shape)).save_pretrained(tmp_path / "step-2")
    command = ["-m", "mixer", "inspect", "--checkpoint", tmp_path / "step-2"]
    printed = run_python(*command, output=tmp_path / "printed")
    index = tmp_path / "inspect-step-2" / "index.md"
    assert printed.strip().splitlines()[-1] == str(index)
    text = index.read_text()
    first = tables(text)[0]
    assert [row[:2] for row in first].count(["1", "W2 tap 2"]) == 1
    assert {row[0] for row in first[1:]} == {
        "1",
        "2",
    }  # two layers, as model.mixer_keyed_blocks counts them
    for page in ("layer-01.png", "layer-02.png", "by_lag.png"):
        assert f"]({page})" in text
        assert_png(index.parent / page)


@pytest.mark.parametrize("span", [1.05, 1.5, 9, 80, 1e4])
def test_sizes_by_lag_are_marked_in_plain_numbers_whatever_their_range(tmp_path, monkeypatch, span):
    marks, save = [], Figure.savefig

    def savefig(figure, output):
        save(figure, output)
        axis = figure.axes[0].yaxis
        low, high = axis.get_view_interval()
        ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        marks.extend(tick.label1.get_text() for tick in ticks if low <= tick.get_loc() <= high)

    monkeypatch.setattr(Figure, "savefig", savefig)
    lags = np.subtract.outer(np.arange(24), np.arange(24)).clip(0)
    curve = by_lag({"W": 0.031 * float(span) ** (-lags / 23)})
    plot_by_lag({0: curve}, tmp_path / "by_lag.png")
    assert 2 <= len([float(mark.replace("\N{MINUS SIGN}", "-")) for mark in marks if mark]) <= 12


@pytest.mark.parametrize("every", [2, 1])
def test_attention_has_no_matrices(every, tmp_path):
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "max_position_embeddings": 24}
    shape |= {"vocab_size": 30, "mixer_key_size": 4, "mixer_attention": True}
    config = MaskedMixerConfig(mixer_keyed_every=every, **shape)
    MaskedMixerForCausalLM(config).save_pretrained(tmp_path / "step-2")
    command = ["--checkpoint", str(tmp_path / "step-2")]
    if every == 1:
        with pytest.raises(UserError, match="step-2 has attention in all blocks"):
            main(command)
    else:
        main(command)
        assert "](layer-02.png)" not in (tmp_path / "inspect-step-2/index.md").read_text()


def test_what_has_no_matrices_is_refused(tmp_path):
    save_checkpoint(tmp_path / "gpt2", "gpt2")
    with pytest.raises(UserError, match="is a gpt2: give a masked mixer"):
        main(["--checkpoint", str(tmp_path / "gpt2")])
