"""Promises of `python -m mixer.inspect`: the numbers are what their names say, and every page is
made.
"""

import numpy as np
import pytest
import torch
from checkpoints import documents, save_checkpoint
from launching import run_python
from markdown import tables
from pictures import assert_png

from mixer import MaskedMixerConfig, MaskedMixerForCausalLM
from mixer.analysis.matrices import (
    effective_context,
    mixing_matrices,
    relative_change,
    toeplitz_distance,
    weight_by_lag,
)
from mixer.common.errors import UserError
from mixer.data.tokenizer import train_tokenizer
from mixer.inspect import inspect, main

TRIANGLE = np.tri(20)


def random_matrix(seed: int, context: int = 20) -> np.ndarray:
    return np.tril(np.random.default_rng(seed).standard_normal((context, context)))


def test_weight_by_lag_is_the_mean_of_each_diagonal():
    matrix = random_matrix(0)
    expected = [np.abs(np.diag(matrix, -lag)).mean() for lag in range(20)]
    np.testing.assert_allclose(weight_by_lag(matrix), expected)


def test_effective_context_of_a_row_is_counted_by_hand():
    np.testing.assert_array_equal(effective_context(np.eye(20)), np.ones(20))
    np.testing.assert_array_equal(effective_context(TRIANGLE), np.ceil(0.9 * np.arange(1, 21)))
    matrix = random_matrix(1)
    for row, count in enumerate(effective_context(matrix)):
        recent = np.abs(matrix[row, : row + 1])[::-1]
        assert recent[:count].sum() >= 0.9 * recent.sum() > recent[: count - 1].sum()


def test_distance_from_toeplitz_is_zero_for_a_convolution_and_known_for_random_weights():
    lags = np.subtract.outer(np.arange(20), np.arange(20))
    assert toeplitz_distance(np.tril(0.7 ** np.abs(lags) - 0.2)) == pytest.approx(0, abs=1e-12)
    assert toeplitz_distance(random_matrix(2, 300)) == pytest.approx(np.sqrt(1 - 2 / 301), abs=2e-3)
    assert toeplitz_distance(np.zeros((4, 4))) == 0


def test_relative_change_is_in_units_of_the_earlier_matrix():
    assert relative_change(TRIANGLE, 1.25 * TRIANGLE) == pytest.approx(0.25)


def save(directory, seed: int, **changes) -> str:
    torch.manual_seed(seed)
    tokenizer = train_tokenizer(documents(), 300)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "max_position_embeddings": 24}
    MaskedMixerForCausalLM(
        MaskedMixerConfig(vocab_size=len(tokenizer), **(shape | changes))
    ).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def test_the_matrices_are_the_models_and_never_its_upper_triangle():
    model = MaskedMixerForCausalLM(
        MaskedMixerConfig(
            vocab_size=9, hidden_size=8, num_hidden_layers=1, max_position_embeddings=6
        )
    )
    with torch.no_grad():
        model.model.layers[0].mixing.conv.weight += 1
    (layer,) = mixing_matrices(model)
    expected = model.model.layers[0].mixing.conv.weight[0, 0].tril().detach().numpy()
    np.testing.assert_array_equal(layer["W"], expected)


def test_the_command_writes_an_index_and_a_page_for_each_layer_and_quantity(tmp_path):
    variant = {"mixer_kernel_size": 2, "mixer_expansion": True}
    steps = [save(tmp_path / f"step-{seed}", seed, **variant) for seed in (1, 2)]
    done = run_python("-m", "mixer.inspect", "--checkpoint", *steps, output=tmp_path / "printed")
    assert done.returncode == 0, done.stdout
    index = tmp_path / "inspect-step-2" / "index.md"
    assert done.stdout.strip().splitlines()[-1] == str(index)
    text = index.read_text()
    (first, *_) = tables(text)
    assert [row[:2] for row in first].count(["0", "second W tap 1"]) == 1
    assert {row[0] for row in first[1:]} == {"0", "1"}  # two layers
    pages = ["layer-00.png", "layer-01.png", "by_lag.png", "effective_context.png"]
    assert sorted(pages) == sorted(path.name for path in index.parent.glob("*.png"))
    for page in pages:
        assert f"]({page})" in text
        assert_png(index.parent / page)
    with pytest.raises(UserError, match="--checkpoint has 3 directories; give the one to picture"):
        main(["--checkpoint", *steps, steps[0]])


def test_what_has_no_matrices_or_no_change_is_refused(tmp_path):
    save_checkpoint(tmp_path / "gpt2", "gpt2")
    with pytest.raises(UserError, match="is a gpt2: give one of a masked mixer"):
        inspect([str(tmp_path / "gpt2")], tmp_path / "pages")
    steps = [save(tmp_path / "a", 0), save(tmp_path / "b", 0, max_position_embeddings=12)]
    with pytest.raises(
        UserError,
        match="b has other layers, heads, taps or context than .*a, so there is no change",
    ):
        inspect(steps, tmp_path / "pages")
    (tmp_path / "a" / "tokenizer.json").unlink()  # as a converted model is without --tokenizer
    assert "change" not in inspect(steps[:1], tmp_path / "pages").read_text()
