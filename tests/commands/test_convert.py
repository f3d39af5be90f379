"""Weights of the reference implementation: what they compute there they compute here, and back;
what is strange is named.
"""

import re

import pytest
import torch
from author import LanguageMixer
from models import MIXINGS, lively_model, small_model, tokens
from recurrent_reference import RecurrentReference
from safetensors.torch import load_file, save_file, save_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from mixer.checkpoints.convert import convert, convert_back, convert_mixing
from mixer.checkpoints.reference_format import from_reference, to_reference
from mixer.commands.convert import main
from mixer.common.errors import UserError
from mixer.data.tokenizer import train_tokenizer
from mixer.models.masked_mixer.configuration import RECURRENT
from mixer.models.masked_mixer.convolution import TriangularConv


@pytest.mark.parametrize("kind", ["flat", "expanded", "mixerhead", "conv"])
@pytest.mark.parametrize(
    ("taps", "biases", "prefix"),
    [(1, True, ""), (3, True, "model."), (4, True, "module.model."), (1, False, "")]
    + [(3, False, ""), (None, True, ""), (None, False, "")],
)
def test_logits_are_the_references_both_ways(kind, taps, biases, prefix):
    reference, ids = LanguageMixer(kind, taps, width=40), tokens()
    for name, layer in reference.mixerblocks.named_modules():
        if not biases and re.search(r"\.conv(s\.\d)?(\.[02])?$", name) and hasattr(layer, "bias"):
            layer.bias = None
    model = from_reference({prefix + key: tensor for key, tensor in reference.state_dict().items()})
    expected = reference(ids)
    torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-5)
    other = LanguageMixer("mixerhead" if kind == "conv" else kind, taps or 1, width=40)
    nn.init.zeros_(other.wte.weight)
    other.load_state_dict(to_reference(model))  # strict: all keys and shapes
    torch.testing.assert_close(other(ids), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kept", ["wte", "lm_head"])
def test_a_tied_weight_that_was_saved_once_is_found(tmp_path, kept):
    reference = LanguageMixer()
    reference.lm_head.weight = reference.wte.weight
    weights = reference.state_dict()
    gone = {"wte": "lm_head", "lm_head": "wte"}[kept]
    save_model(reference, str(tmp_path / "model.safetensors"))  # keeps lm_head.weight
    if kept == "wte":
        weights.pop(f"{gone}.weight")
        metadata = {f"{gone}.weight": f"{kept}.weight", "format": "pt"}
        save_file(weights, tmp_path / "model.safetensors", metadata=metadata)
    convert(tmp_path / "model.safetensors", tmp_path / "new", None)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    torch.testing.assert_close(model(tokens()).logits, reference(tokens()), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "kind", ["lags", "window", "keyed-lags", "keyed-parts", "keyed-attention-in-mlp"]
)
def test_a_model_by_lag_becomes_full_and_lags_again_without_a_change(kind, tmp_path, capsys):
    model = lively_model(**MIXINGS[kind])
    for conv in model.modules():
        if isinstance(conv, TriangularConv):
            conv.lags.data.normal_()
    model.save_pretrained(tmp_path / "lags")
    convert_mixing(tmp_path / "lags", tmp_path / "full", "full")
    convert_mixing(tmp_path / "full", tmp_path / "again", "lags")
    printed = capsys.readouterr().out
    assert printed.count("on average, at most 0.00%") == 2
    assert ("the window of" in printed) == ("mixing_window" in MIXINGS[kind])
    ids = tokens()
    for name in ("full", "again"):
        found = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert found.config.mixing_weight == ("full" if name == "full" else "lags")
        torch.testing.assert_close(found(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_a_tokenizer_without_an_eos_stays_with_the_model(tmp_path):
    tokenizer = train_tokenizer(["A text of a few tokens."], 300)
    small_model(vocab_size=300).save_pretrained(tmp_path / "full")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer).save_pretrained(
        tmp_path / "full"
    )
    convert_mixing(tmp_path / "full", tmp_path / "lags", "lags")
    assert AutoTokenizer.from_pretrained(tmp_path / "lags").vocab == tokenizer.vocab


def test_a_converted_model_gets_what_tools_for_batches_read_as_a_trained_one_does(tmp_path):
    backend = train_tokenizer(["A text of a few tokens."], 300).backend_tokenizer
    eos = "<|endoftext|>"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    save_file(LanguageMixer(vocabulary=300).state_dict(), tmp_path / "model.safetensors")
    convert(tmp_path / "model.safetensors", tmp_path / "new", str(tmp_path / "tokenizer"))
    saved = AutoTokenizer.from_pretrained(tmp_path / "new")
    assert (saved.pad_token, saved.model_max_length) == (eos, 12)


def test_how_far_a_full_weight_is_from_lags_is_said(tmp_path, monkeypatch, capsys):
    small_model().save_pretrained(tmp_path / "full")
    arguments = [tmp_path / "full", "--output", tmp_path / "lags", "--mixing-weight", "lags"]
    monkeypatch.setattr("sys.argv", ["convert", *map(str, arguments)])
    main()
    # Of random numbers in a triangle of 12 rows the 12 means keep 12 parts of 78.
    said = capsys.readouterr().out
    far = float(re.search(r"changed by ([\d.]+)% of their norm.*a different model", said)[1])
    assert far == pytest.approx(100 * (66 / 78) ** 0.5, abs=6)


@pytest.mark.parametrize("other", (["--back"], ["--mixing-weight", "full"]))
def test_how_heads_mix_is_refused_where_the_model_says_it(monkeypatch, capsys, other):
    arguments = ["model", "--output", "converted", "--mixing", "rows", *other]
    monkeypatch.setattr("sys.argv", ["convert", *arguments])
    with pytest.raises(SystemExit):
        main()
    assert "--mixing is for the author's files" in capsys.readouterr().err


def test_what_a_file_does_not_say_is_said(tmp_path, capsys):
    source = tmp_path / "model.safetensors"
    save_file(LanguageMixer().state_dict(), source)
    convert(source, tmp_path / "assumed", None)
    assert "ASSUMED: plain mixing" in capsys.readouterr().err
    weights = LanguageMixer().state_dict()
    weights["mixerblocks.1.conv.bias"][3] = float("nan")
    save_file(weights, source)
    with pytest.raises(UserError, match="not finite in model.layers.1.mixing.conv.bias"):
        convert(source, tmp_path / "nan", None)


def test_the_command_makes_a_checkpoint_and_brings_it_back(tmp_path, monkeypatch):
    def command(*arguments):
        monkeypatch.setattr("sys.argv", ["convert", *map(str, arguments)])
        main()

    old, new, back = (tmp_path / name for name in ("old.safetensors", "new", "b/old.safetensors"))
    reference = LanguageMixer("mixerhead", taps=3)
    save_file(reference.half().state_dict(), old)
    train_tokenizer(["a few words"], 300).save_pretrained(tmp_path / "large")
    with pytest.raises(UserError, match="has [0-9]+ ids, the model 50; allowed: as many"):
        command(old, "--output", new, "--tokenizer", tmp_path / "large")
    command(old, "--output", new)
    expected = reference.float()(tokens())
    found = AutoModelForCausalLM.from_pretrained(new)(tokens()).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    command(new, "--output", back, "--back")
    again = LanguageMixer("mixerhead", taps=3)
    again.load_state_dict(load_file(back))
    torch.testing.assert_close(again(tokens()), expected, rtol=0, atol=1e-5)
    with pytest.raises(UserError, match="already exists"):
        command(old, "--output", new)
    with pytest.raises(UserError, match="give a .safetensors file"):
        command(tmp_path / "old.bin", "--output", tmp_path / "other")


def with_tensor(name: str, *shape: int, dtype=torch.float32):
    return lambda state: state.update({name: torch.zeros(shape, dtype=dtype)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_tensor("mixerblocks.1.convr.weight", 12, 12, 1), r"r.weight .*, expected: nothing"),
        (with_tensor("temperature", 1), r"temperature is \[1\], expected: nothing"),
        (with_tensor(f"mixerblocks.{'9' * 5000}.conv.bias", 12), "9999.* expected: nothing"),
        (with_tensor("lm_head.weight", 49, 16), r"is \[49, 16\], expected: \[50, 16\]"),
        (with_tensor("mixerblocks.0.conv.weight", 24, 12, 1), r"expected: \[12, 12, 1\]"),
        (with_tensor("lm_head.weight", 50, 16, dtype=torch.int64), "is of type torch.int64"),
        (with_tensor("lm_head.weight", 50, 16, dtype=torch.complex64), "is of type torch.complex"),
        (lambda s: s.pop("mixerblocks.1.conv.bias"), r"1.conv.bias is missing, expected: \[12\]"),
        (lambda s: s.pop("mixerblocks.0.conv.weight"), "not the weights of a .*0.conv.weight"),
        (
            lambda s: (s.pop("wte.weight"), s.pop("lm_head.weight")),
            "not the weights of a LanguageMixer .*wte.weight",
        ),
    ],
)
def test_what_does_not_fit_is_named(change, words):
    state = LanguageMixer().state_dict()
    change(state)
    with pytest.raises(UserError, match=words):
        from_reference(state)


@pytest.mark.parametrize(
    ("form", "heads", "decay"),
    [("rows", 1, False), ("columns", 1, True), ("rows", 4, False), ("columns", 4, False)]
    + [("mixed", 2, False), ("mixed", 4, True), ("lags", 1, False), ("lags", 4, False)],
)
def test_structured_mixers_convert_both_ways_with_equal_logits(
    form, heads, decay, tmp_path, capsys
):
    named = {"rows": ["col"], "columns": ["row"], "mixed": ["col", "row"], "lags": ["lag"]}[form]
    kinds, context = [kind for kind in named for _ in range(heads // len(named))], 1024
    # recurrent heads without decay are also without projections
    about = (kinds, context, decay, decay or heads == 1 or form == "lags")
    reference, ids = RecurrentReference(*about), tokens(2, 700)
    expected = reference(ids)
    old, new, back = (tmp_path / name for name in ("old.safetensors", "new", "b.safetensors"))
    save_file({f"_orig_mod.{key}": x for key, x in reference.state_dict().items()}, old)
    with pytest.raises(UserError, match="a structured mixer, and --mixing is None"):
        convert(old, new, None)
    convert(old, new, None, form)
    assert "ASSUMED" not in capsys.readouterr().err
    model = AutoModelForCausalLM.from_pretrained(new)
    torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-4)
    convert_back(new, back)
    again = RecurrentReference(*about)
    nn.init.zeros_(again.input_layer.weight)
    again.load_state_dict(load_file(back))  # strict: all keys and shapes
    torch.testing.assert_close(again(ids), expected, rtol=0, atol=1e-5)


def test_parallel_heads_convert_and_go_back_as_separate_ones_with_equal_logits():
    reference, ids = RecurrentReference(["parallel"], 1024, True), tokens(2, 700)
    expected, source = reference(ids), reference.state_dict()
    model = from_reference(source, "mixed")
    torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-4)
    again = RecurrentReference(["col", "col", "row", "row"], 1024, True)
    again.load_state_dict(to_reference(model))
    torch.testing.assert_close(again(ids), expected, rtol=0, atol=1e-4)
    with pytest.raises(UserError, match="--mixing is rows; allowed: .*ParallelRepeatHeads"):
        from_reference(source, "rows")


@pytest.mark.parametrize(
    ("kinds", "form", "tied"),
    [(["lag"], "lags", False), (["lag"] * 4, "lags", True), (["parallel-lag"], "lags", False)]
    + [(["col"], "rows", False), (["row"] * 4, "columns", True)],
)
def test_mixers_with_a_dropout_convert_both_ways_with_equal_logits(kinds, form, tied, tmp_path):
    about = {"context": 600, "decay": False, "dropout": True, "tied": tied}
    reference, ids = RecurrentReference(kinds, **about).eval(), tokens(2, 500)
    weights, old, new = reference.state_dict(), tmp_path / "old.safetensors", tmp_path / "new"
    if tied:  # as trainers save it
        del weights["output_layer.weight"]
    save_file(weights, old)
    convert(old, new, None, form)
    model = AutoModelForCausalLM.from_pretrained(new)
    assert model.config.tie_word_embeddings == tied
    torch.testing.assert_close(model(ids).logits, reference(ids), rtol=0, atol=1e-4)
    convert_back(new, tmp_path / "back.safetensors")
    again = RecurrentReference(["lag"] * 4 if kinds == ["parallel-lag"] else kinds, **about).eval()
    nn.init.zeros_(again.input_layer.weight)
    again.load_state_dict(load_file(tmp_path / "back.safetensors"))  # strict: all keys and shapes
    torch.testing.assert_close(again(ids), reference(ids), rtol=0, atol=1e-4)


def test_a_toeplitz_mixer_trained_here_goes_back_to_a_class_with_a_dropout():
    options = {"mixing_weight": "lags", "mlp_first": True, "hidden_act": "silu"}
    model, ids = lively_model(**options, intermediate_size=64), tokens()
    about = {"context": 16, "decay": False, "dropout": True, "width": 16}
    reference = RecurrentReference(["lag"], **about).eval()
    reference.load_state_dict(to_reference(model))
    torch.testing.assert_close(reference(ids), model(ids).logits, rtol=0, atol=1e-5)


def test_structured_mixers_that_do_not_convert_are_refused(tmp_path):
    expanded = RecurrentReference(["lag"], 512, False).state_dict()
    expanded["mixer_blocks.0.token_mixing_layer.3.weight"] = torch.zeros(1, 512)
    with pytest.raises(UserError, match=r"has mixer_blocks\S+3.weight: two layers .*not converted"):
        from_reference(expanded, "lags")
    weights = RecurrentReference(["col", "row"], 512, True).state_dict()
    weights["mixer_blocks.1.extra"] = weights.pop("mixer_blocks.1.token_norm.bias")
    save_file(weights, tmp_path / "strange.safetensors")
    with pytest.raises(UserError, match=r"(?s)not fit a structured mixer, .*extra.*m.bias"):
        convert(tmp_path / "strange.safetensors", tmp_path / "new", None, "mixed")
    save_file(LanguageMixer().state_dict(), tmp_path / "plain.safetensors")
    with pytest.raises(UserError, match="of a LanguageMixer, and --mixing is rows; allowed: n"):
        convert(tmp_path / "plain.safetensors", tmp_path / "new", None, "rows")
    small_model(mixing_weight="rows").save_pretrained(tmp_path / "gelu")
    with pytest.raises(UserError, match="does not have mlp_first = False, hidden_act = gelu;"):
        convert_back(tmp_path / "gelu", tmp_path / "back.safetensors")


@pytest.mark.parametrize("kind", ["rows", "columns", "rows-and-columns"])
def test_a_recurrent_weight_becomes_a_full_one_without_a_change(kind, tmp_path, capsys):
    model, ids = lively_model(**MIXINGS[kind]), tokens()
    model.save_pretrained(tmp_path / "recurrent")
    convert_mixing(tmp_path / "recurrent", tmp_path / "full", "full")
    assert "on average, at most 0.00%" in capsys.readouterr().out
    full = AutoModelForCausalLM.from_pretrained(tmp_path / "full")
    torch.testing.assert_close(full(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_a_transformer_does_not_go_back(tmp_path):
    config = LlamaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    with pytest.raises(UserError, match="is a llama: give a masked mixer"):
        convert_back(tmp_path / "llama", tmp_path / "back.safetensors")
    assert not (tmp_path / "back.safetensors").exists()


@pytest.mark.parametrize("kind", MIXINGS)
def test_a_model_goes_back_with_its_logits_or_is_refused(kind):
    model = lively_model(**MIXINGS[kind])
    form = model.config.mixing_weight
    try:
        state = to_reference(model)
    except UserError as error:
        assert kind not in ("flat", "expansion", "projected", "lags", "rows-and-columns"), error
        assert "format does not have" in str(error)
    else:
        again = from_reference(state, form if form in RECURRENT else None)
        torch.testing.assert_close(again(tokens()).logits, model(tokens()).logits)


def test_a_tied_weight_goes_back_twice():
    tied = small_model(tie_word_embeddings=True)
    again = from_reference(to_reference(tied))
    torch.testing.assert_close(again(tokens()).logits, tied(tokens()).logits)
    with pytest.raises(UserError, match="does not have layer_norm_eps = 0.1"):
        to_reference(small_model(layer_norm_eps=0.1))
