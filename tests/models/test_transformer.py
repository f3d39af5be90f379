"""Transformers to compare with are trained, saved and counted as masked mixers are."""

import pytest
import torch
import torch.nn.functional as F
from runs import read_losses
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, AutoModelForCausalLM, Qwen3ForCausalLM, masking_utils

from mixer.common.errors import UserError
from mixer.models.architecture import flops_per_token, model_config, new_model
from mixer.training.config import load_config
from mixer.training.loop import train

LLAMA = "model.architecture=llama"
QWEN3 = "model.architecture=qwen3"
SHIFTED = "model.architecture=shifted_qwen3"
every = pytest.mark.parametrize("architecture", [LLAMA, QWEN3, SHIFTED])


def build(architecture: str, *overrides: str):
    model = load_config(
        None,
        [architecture, "model.num_hidden_layers=2", "model.max_position_embeddings=64", *overrides],
    ).model
    config = model_config(model, vocab_size=500, eos_token_id=0)
    return new_model(config)


@pytest.mark.parametrize(
    ("architecture", "name"), [(QWEN3, "Qwen3ForCausalLM"), (SHIFTED, "ShiftedQwen3ForCausalLM")]
)
def test_it_is_trained_resumed_and_saved_for_transformers(
    architecture, name, write_config, launch, tmp_path
):
    config = write_config()
    overrides = [architecture, "optim.lr=1e-2", "train.steps=16"]
    launch("--config", config, *overrides, "name=parts").until(
        lambda: (tmp_path / "runs/parts/step-4/trainer_state/files.json").exists()
    ).stop()
    for run in ("whole", "parts"):
        train(load_config(str(config), [*overrides, f"name={run}"]))
    losses = read_losses(tmp_path / "runs/whole")
    assert read_losses(tmp_path / "runs/parts") == losses
    assert losses[16] < losses[1] - 0.5
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "runs/whole/step-16")
    assert type(saved).__name__ == name
    assert saved.config.architectures == [name]
    assert not (tmp_path / "runs/whole/step-16/modeling.py").exists()
    with pytest.raises(UserError, match="qwen3' in the checkpoint, now 'masked_mixer'"):
        train(load_config(str(config), ["name=whole"]))


@every
def test_it_computes_what_transformers_does_and_searches_for_no_packed_texts(
    architecture, monkeypatch
):
    """For whose number transformers would wait for the GPU in every step."""
    model = build(architecture, "model.hidden_size=64")
    ids = torch.randint(500, (2, 9))
    config = type(model.config).from_dict(model.config.to_dict())
    theirs = AutoModelForCausalLM.from_config(config)
    theirs.load_state_dict(model.state_dict())
    expected = theirs(ids).logits
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", None)
    torch.testing.assert_close(model(ids, use_cache=False).logits, expected)
    with pytest.raises(TypeError, match="not callable"):
        theirs(ids, use_cache=False)


def with_shares() -> Qwen3ForCausalLM:
    model = build(SHIFTED, "model.hidden_size=64").eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.k_proj.share)
    return model


def test_shifted_keys_are_those_of_transformers_qwen3_with_shares_added():
    model = with_shares()
    ids = torch.randint(500, (2, 9))
    plain = Qwen3ForCausalLM(model.config)
    missing = plain.load_state_dict(model.state_dict(), strict=False)
    assert not missing.missing_keys
    for layer, plain_layer in zip(model.model.layers, plain.model.layers, strict=True):

        def shifted(projection, inputs, key, share=layer.self_attn.k_proj.share):
            return torch.stack([key[:, i] + share * key[:, i - 1] * (i > 0) for i in range(9)], 1)

        plain_layer.self_attn.k_proj.register_forward_hook(shifted)
    torch.testing.assert_close(model(ids).logits, plain(ids).logits)


def test_shifted_keys_are_loaded_and_generate_what_the_forward_pass_finds(tmp_path):
    """Without a cache, whatever `generate` is told. Padding on the left is refused."""
    model = with_shares()
    ids = torch.randint(500, (2, 7))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    body = AutoModel.from_pretrained(tmp_path)
    torch.testing.assert_close(body(ids).last_hidden_state, model.model(ids).last_hidden_state)
    expected = ids
    for _ in range(4):
        following = model(expected).logits[:, -1:].argmax(-1)
        expected = torch.cat([expected, following], dim=1)
    greedy = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    for inputs in ({}, {"use_cache": True}, {"attention_mask": torch.ones_like(ids)}):
        assert torch.equal(loaded.generate(ids, **greedy | inputs), expected)
    mask = F.pad(torch.ones_like(ids[:, 1:]), (1, 0))
    with pytest.raises(UserError, match="reads no padding on the left: give one text"):
        loaded.generate(ids, attention_mask=mask)
    with pytest.raises(UserError, match="no cache, which guessing .*: leave out prompt_lookup_num"):
        loaded.generate(ids, max_new_tokens=4, do_sample=False, prompt_lookup_num_tokens=2)
    with pytest.raises(UserError, match="no cache, which guessing"):
        loaded.generate(ids, max_new_tokens=4, do_sample=False, assistant_model=loaded)


@every
def test_the_residual_stream_has_the_autocast_type(architecture):
    model = build(architecture, "model.hidden_size=64")
    types = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda layer, inputs, output: types.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.zeros(1, 8, dtype=torch.int64))
    model(torch.zeros(1, 8, dtype=torch.int64))
    assert types == [torch.bfloat16] * 2 + [torch.float32] * 2


@every
def test_its_operations_are_those_that_torch_counts_with_the_causal_half_of_attention(architecture):
    model = build(architecture, "model.hidden_size=128")
    tokens = 64
    model.set_attn_implementation("eager")  # whose products, of the masked half too, torch counts
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, tokens, dtype=torch.int64), use_cache=False).logits.sum().backward()
    counts = flops_per_token(model, tokens)
    masked = counts["token_mixing"] * (tokens - 1) / (tokens + 1)
    counted = (counts["useful"] + masked) * tokens
    assert counted == pytest.approx(counter.get_total_flops(), rel=2e-3)  # rotary tables


def test_keys_of_the_other_architecture_are_refused():
    for options, words in (
        ([LLAMA, "model.num_mixer_heads=4"], "is 4, which architecture llama does not have; leave"),
        (["model.num_attention_heads=4"], "is 4, which architecture masked_mixer does not have"),
        ([LLAMA, "model.hidden_size=64", "model.num_attention_heads=3"], "3; allowed: 1 or more, "),
        ([LLAMA, "train.recompute=activation"], "masked mixers; allowed for architecture llama"),
    ):
        with pytest.raises(UserError, match=words):
            load_config(None, options)
