"""The tables of README's verdict."""

import pytest
import verdict

KEYED = {
    "model.num_hidden_layers": 8,
    "model.mixer_key_size": 64,
    "model.mixer_attention": True,
    "model.mixer_keyed_blocks": [2, 5, 8],
    "model.max_position_embeddings": 512,
    "model.mixing_window": 8,
}


def test_the_tables_are_what_the_script_makes_of_the_results_beside_them(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["verdict.py", "--output", str(tmp_path / "verdict")])
    verdict.main()
    written = (verdict.RESULTS / "verdict_512_h200.md").read_text()
    assert (tmp_path / "verdict.md").read_text() == written


@pytest.mark.parametrize("named", [{}, {"model.architecture": "masked_mixer"}])
def test_a_mixer_is_no_transformer_whether_or_not_its_run_names_the_architecture(named):
    assert verdict.blocks(KEYED | named) == "3 of 8"
    assert verdict.window(KEYED | named) == "8"
