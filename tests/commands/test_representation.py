"""Promises of `mixer representation`: what a layer keeps of a text is found, what it
drops is not.
"""

import json
from pathlib import Path

import pytest
import torch
from markdown import tables
from models import SMALL, lively_model, small_model
from tokenizers import normalizers
from transformers import (
    BartConfig,
    BartForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LongcatFlashConfig,
    LongcatFlashForCausalLM,
)

from mixer.commands.representation import main
from mixer.common.errors import UserError
from mixer.data.tokenizer import text_encoder, train_tokenizer
from mixer.evaluation import representation
from mixer.evaluation.representation import (
    block_list,
    first_layers,
    hamming_score,
    random_twin,
    reconstruct,
)
from mixer.ops import triangular_conv


def test_tokens_that_the_mixing_reads_are_found_and_those_it_ignores_are_not():
    torch.manual_seed(0)
    texts, length = 6, 12
    embedding = torch.randn(100, 32)
    tokens = torch.randint(100, (texts, length))
    weight = (torch.eye(length) + 0.1 * torch.randn(length, length)).tril()[None, None]
    inverse = torch.linalg.pinv(embedding)

    def score(weight):
        guess, left = reconstruct(
            lambda x: triangular_conv(x, weight), embedding[tokens], slice(None), 500
        )
        return guess, left, hamming_score(guess, tokens, inverse)

    _, left, whole = score(weight)
    assert whole == 0 and left < 0.02
    weight[..., 3:6] = 0  # no output depends on tokens 3, 4 and 5
    guess, left, blind = score(weight)
    assert left < 0.02  # the outputs are matched all the same
    seen = [place for place in range(length) if place not in (3, 4, 5)]
    assert hamming_score(guess[:, seen], tokens[:, seen], inverse) == 0
    assert blind == pytest.approx(3 / length, abs=0.02)  # a guess among 100 tokens may be right


@pytest.mark.parametrize("start", ["zero", "shift", "reference"])
def test_random_weights_mix_at_random_whatever_the_training_began_with(start):
    model = small_model(mixing_init=start, num_mixer_heads=2)
    twin = random_twin(model)
    assert twin.config.mixing_backend == model.config.mixing_backend
    bound = 1 / model.config.max_position_embeddings**0.5
    for layer in twin.model.layers:
        lower = layer.mixing.conv.weight.detach()[..., *torch.tril_indices(12, 12)]
        assert 0.4 * bound < lower.std() < bound and lower.abs().max() <= bound
    assert model.config.mixing_init == start


@pytest.mark.parametrize("kind", ["mixer", "suffix match", "llama", "gpt2", "bart"])
def test_a_layers_output_is_the_models_own(kind):
    torch.manual_seed(0)
    size = SMALL | {"num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "bos_token_id": 0, "eos_token_id": 0}
    model = {
        "mixer": lambda: small_model(num_hidden_layers=3, num_mixer_heads=2),
        "suffix match": lambda: lively_model(num_hidden_layers=3, suffix_match=2),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**size, **heads, intermediate_size=32)),
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**size, **heads)),
        "bart": lambda: BartForCausalLM(BartConfig(vocab_size=50, d_model=16, decoder_layers=3)),
    }[kind]().eval()
    tokens = torch.randint(5, (2, 9))
    embedded = model.get_input_embeddings()(tokens)
    # Of the last block transformers tells only what is normalised.
    wanted = model(tokens, output_hidden_states=True).hidden_states[:-1]
    for layer in range(1, len(wanted)):
        torch.testing.assert_close(first_layers(model, layer)(tokens, embedded), wanted[layer])


def test_the_parts_of_a_block_are_no_layers():
    """Each block of LongCat has two attentions."""
    sizes = {"hidden_size": 16, "ffn_hidden_size": 16, "num_layers": 1, "num_attention_heads": 2}
    sizes |= {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
    sizes |= {"v_head_dim": 8, "head_dim": 4, "expert_ffn_hidden_size": 16, "moe_topk": 2}
    model = LongcatFlashForCausalLM(LongcatFlashConfig(vocab_size=50, **sizes)).eval()
    assert list(block_list(model)) == list(model.model.layers)
    tokens = torch.randint(5, (2, 9))
    output = first_layers(model, 1)(tokens, model.get_input_embeddings()(tokens))
    expected = model(tokens, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(model.model.norm(output), expected)


def test_a_model_without_blocks_is_refused():
    heads = {"num_attention_heads": 2, "intermediate_size": 32}
    model = LlamaForCausalLM(LlamaConfig(**SMALL | heads | {"num_hidden_layers": 0}))
    with pytest.raises(UserError, match="this llama has no list of blocks: give another model"):
        block_list(model)


def test_a_text_goes_into_the_layers_as_it_is_embedded(tmp_path, monkeypatch):
    """Gemma's embedding multiplies its rows."""
    monkeypatch.setattr(representation, "TEXTS", 1)
    outputs = []

    def recorded(layers, embedded, read, steps):
        outputs.append(layers(embedded)[:, read])
        return embedded, 0.0

    monkeypatch.setattr(representation, "reconstruct", recorded)
    size = {"intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = Gemma3ForCausalLM(Gemma3TextConfig(**SMALL | size | {"vocab_size": 400}, head_dim=8))
    model.save_pretrained(tmp_path / "model")
    tokenizer = train_tokenizer(["A text of a few tokens."], 400)
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("A text of a few tokens.")
    how = f"--text {tmp_path}/text.txt --layers 1 --tokens 6 --steps 1"
    run(tmp_path / "model", tmp_path / "pages", how)
    ids = torch.from_numpy(text_encoder(tokenizer)("A text of a few tokens.")[:6].astype("int64"))
    expected = model.eval()(ids[None], output_hidden_states=True).hidden_states[1]
    torch.testing.assert_close(outputs[0], expected)


def test_a_document_of_which_the_tokenizer_leaves_nothing_is_passed_over(tmp_path):
    small_model(vocab_size=400).save_pretrained(tmp_path / "model")
    tokenizer = train_tokenizer(["A text of a few tokens."], 400)
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("\u200b", "")
    tokenizer.save_pretrained(tmp_path / "model")
    texts = [{"text": text} for text in ("\u200b", "A text of a few tokens.")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, texts)))
    how = f"--text {tmp_path}/rows.jsonl --layers 0 --tokens 6 --steps 1"
    run(tmp_path / "model", tmp_path / "pages", how)
    assert (tmp_path / "pages/representation.md").is_file()


def run(checkpoint: Path, output: Path, options: str) -> None:
    about = ["--checkpoint", checkpoint, "--device", "cpu", "--output", output]
    main([*map(str, about), *options.split()])


def test_the_command_finds_a_text_in_all_outputs_and_its_last_token_alone_in_the_last(
    finished, tmp_path
):
    how = "--layers 0 2 --tokens 12 --steps 300"
    run(finished / "step-12", tmp_path / "pages", how)
    rows = json.loads((tmp_path / "pages/representation.json").read_text())["rows"]
    measured = {(row["weights"], row["layer"]) for row in rows}
    assert measured == {(w, n) for w in ("trained", "random") for n in (0, 2)}
    for row in rows:
        expected = 0 if row["outputs"] == "all" else 11 / 12
        # a guess among 400 tokens may be right
        assert row["hamming"] == pytest.approx(expected, abs=0.02), row
        assert row["distance_left"] < 0.05
    (table,) = tables((tmp_path / "pages/representation.md").read_text())
    assert [row[3][:3] for row in table if row[:3] == ["last", "trained", "2"]] == ["0.9"]


def test_what_the_checkpoint_does_not_have_is_refused_saying_what_it_has(finished, tmp_path):
    for given, allowed in (
        ("--layers 3", "--layers is 3; allowed here: 0 to 2"),
        ("--tokens 33", "--tokens is 33; allowed here: 1 to 32"),
        ("--steps 0", "--steps is 0; allowed here: 1 to"),
    ):
        with pytest.raises(UserError, match=allowed):
            run(finished / "step-12", tmp_path, given)
