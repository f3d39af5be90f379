"""Promises of eval.py about what it is given: any causal model, any text, any number of processes;
each fault has its message.
"""

import gzip
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import CONTEXT, change_config, continuations, documents, evaluate, save_checkpoint
from datasets import Dataset
from tokenizers import normalizers
from transformers import (
    BertConfig,
    BertLMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from mixer.checkpoints.pretrained import load_checkpoint
from mixer.common.errors import UserError
from mixer.data.tokenizer import train_tokenizer
from mixer.evaluation.evaluate import evaluation_report
from mixer.evaluation.scoring import check_causality

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A masked mixer's and a GPT-2's checkpoint, and the same documents as rows, as a dataset and
    as files.
    """
    root = tmp_path_factory.mktemp("models")
    for kind in ("masked_mixer", "gpt2"):
        save_checkpoint(root / kind, kind)
    rows = "".join(json.dumps({"content": text}) + "\n" for text in documents())
    (root / "rows.jsonl").write_text(rows)
    (root / "dataset").mkdir()
    (root / "dataset" / "test.jsonl").write_text(rows)
    for number, text in enumerate(documents()):
        if len(text.split()) > 1:
            (root / f"{number}.txt").write_text(text, encoding="utf-8")
    return root


def test_rows_a_dataset_and_files_of_the_same_documents_have_the_same_numbers(root, tmp_path):
    fields = {"text_field": "content", "first_token": "eos"}
    rows = evaluate(root / "masked_mixer", text=[str(root / "rows.jsonl")], **fields)
    dataset = evaluate(root / "masked_mixer", hub=str(root / "dataset"), **fields)
    assert rows["streams"] == dataset["streams"] == len(documents())
    assert rows["nats"] == dataset["nats"] and rows["bytes"] == dataset["bytes"]
    assert rows["bytes"] == sum(len(text.encode()) for text in documents())
    (tmp_path / "folder/deep").mkdir(parents=True)
    content = gzip.compress((root / "rows.jsonl").read_bytes())
    (tmp_path / "folder/deep/rows.jsonl.gz").write_bytes(content)
    (tmp_path / "folder/1.txt").symlink_to(root / "1.txt")
    mixed = evaluate(root / "masked_mixer", text=[str(tmp_path / "folder")], **fields)
    one = evaluate(root / "masked_mixer", text=[str(root / "1.txt")], first_token="eos")
    for name in ("streams", "bytes", "tokens_scored", "nats"):
        assert mixed[name] == pytest.approx(rows[name] + one[name], rel=1e-6)
    first = {"text": [str(root / "rows.jsonl")], "max_tokens": 20} | fields
    part = evaluate(root / "masked_mixer", **first)
    assert (part["streams"], part["tokens_scored"]) == (1, 20)
    assert part["text"] == "rows.jsonl (first 20 tokens)"
    Dataset.from_json(str(root / "rows.jsonl")).save_to_disk(tmp_path / "saved")
    saved = evaluate(root / "masked_mixer", hub=str(tmp_path / "saved"), **fields)
    assert (saved["nats"], saved["text"]) == (rows["nats"], str(tmp_path / "saved"))
    with pytest.raises(UserError, match="saved has no splits: leave out --split"):
        evaluate(root / "masked_mixer", hub=str(tmp_path / "saved"), split="train", **fields)


def test_other_causal_models_stand_in_the_same_table(root):
    options = {"text": [str(root / "0.txt")], "window": 16, "stride": 8}
    results = [evaluate(root / kind, **options) for kind in ("masked_mixer", "gpt2")]
    assert results[0]["tokens_scored"] == results[1]["tokens_scored"]
    report = " ".join(evaluation_report(results).split())
    assert "none (not a masked mixer)" in report and "tokenizers differ" not in report
    assert "windows: at most 16 tokens, stride 8" in report
    results[1]["tokenizer_sha256"] = "another"
    assert "tokenizers differ" in evaluation_report(results)
    for result in results:
        assert result["tokens_per_second"] > 0 and result["peak_memory_gb"] > 0


def test_several_processes_give_the_numbers_of_one(root, launch, tmp_path):
    """Three windows a batch, so that the processes' shares are unequal."""
    options = {"text": [str(root / "0.txt")], "batch_size": 3, "stride": 16}
    one = evaluate(root / "masked_mixer", **options)
    arguments = ["--checkpoint", root / "masked_mixer", "--text", *options["text"]]
    arguments += ["--batch-size", 3, "--stride", 16, "--device", "cpu", "--output", tmp_path]
    printed = launch(*arguments, program="eval", processes=2).succeed()
    assert printed.count("the report is in") == 1
    two = json.loads((tmp_path / "report.json").read_text())[0]
    assert two["device"] == "2 x cpu"
    assert two["nats"] == pytest.approx(one["nats"], rel=1e-9)
    for name in ("tokens_scored", "count_by_position"):
        assert two[name] == one[name]


def test_a_sharded_checkpoint_is_the_same_and_each_broken_shard_is_named(root, tmp_path):
    model, tokenizer = load_checkpoint(root / "masked_mixer", CPU)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    tokenizer.save_pretrained(tmp_path)
    text = [str(root / "0.txt")]
    found, expected = (evaluate(place, text=text) for place in (tmp_path, root / "masked_mixer"))
    assert found["nats"] == expected["nats"]
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    with pytest.raises(UserError, match=f"{shard.name} damaged or cut short .*copy the ch"):
        evaluate(tmp_path, text=text)
    shard.unlink()
    with pytest.raises(UserError, match=f"lacks {shard.name} .*copy the"):
        evaluate(tmp_path, text=text)


def test_layers_that_config_json_leaves_out_are_refused_for_every_model(root, tmp_path):
    """transformers would leave their weights out without a word."""
    shutil.copytree(root / "gpt2", tmp_path / "gpt2")
    change_config(tmp_path / "gpt2", n_layer=1)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=300, num_hidden_layers=2, **sizes))
    llama.save_pretrained(tmp_path / "llama")
    load_checkpoint(root / "gpt2", CPU)[1].save_pretrained(tmp_path / "llama")
    load_checkpoint(tmp_path / "llama", CPU)
    change_config(tmp_path / "llama", num_hidden_layers=1)
    for name in ("gpt2", "llama"):
        with pytest.raises(UserError, match="weights that its config.json has no place for, .*1"):
            load_checkpoint(tmp_path / name, CPU)


def test_a_model_that_was_saved_to_return_tuples_is_evaluated_all_the_same(root, tmp_path):
    shutil.copytree(root / "gpt2", tmp_path / "gpt2")
    change_config(tmp_path / "gpt2", return_dict=False)
    text = [str(root / "0.txt")]
    found, expected = (evaluate(place / "gpt2", text=text) for place in (tmp_path, root))
    assert found["nats"] == expected["nats"]


# ---------------------------------------------------------------------------------------- bad input


def save_other(directory, model, root) -> Path:
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(root / "gpt2" / name, directory)
    return directory


def test_models_that_are_not_causal_are_refused(root, tmp_path):
    text = [str(root / "0.txt")]
    size = {"vocab_size": 300, "num_hidden_layers": 1, "num_attention_heads": 2}
    size |= {"hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": CONTEXT}
    bert = save_other(tmp_path / "bert", BertLMHeadModel(BertConfig(**size)), root)
    with pytest.raises(UserError, match="the model is not causal: changing the tokens from"):
        evaluate(bert, text=text)
    size = {"vocab_size": 300, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    t5 = save_other(tmp_path / "t5", T5ForConditionalGeneration(T5Config(**size)), root)
    with pytest.raises(UserError, match="t5 cannot be read .*class .*T5Config"):
        evaluate(t5, text=text)


@pytest.mark.parametrize(
    "kind, field, value, message",
    [
        ("masked_mixer", "hidden_size", "wide", "hidden_size = 'wide'; allowed: a whole number"),
        (
            "masked_mixer",
            "hidden_size",
            24,
            "has other shapes than its config.json says, of lm_head",
        ),
        ("gpt2", "model_type", "masked_blender", "cannot be used .*masked_blender.*; allowed: a"),
        ("gpt2", "n_layer", "two", "n_layer.*'two'"),
        ("gpt2", "n_layer", -1, "has n_layer -1 in its config.json"),
        ("gpt2", "activation_function", "magic", "magic"),
    ],
)
def test_an_edited_config_is_named_with_what_is_wrong(
    root, tmp_path, capfd, kind, field, value, message
):
    copy = shutil.copytree(root / kind, tmp_path / "copy")
    change_config(copy, **{field: value})
    with pytest.raises(UserError, match=f"checkpoint {copy} .*{message}"):
        evaluate(copy, text=[str(root / "0.txt")])
    assert capfd.readouterr().err == ""  # no report of transformers before it


def test_one_token_of_leakage_is_found(root):
    model, tokenizer = load_checkpoint(root / "masked_mixer", CPU)
    tokens = np.array(tokenizer(documents()[0])["input_ids"])
    for length in (2, 3, CONTEXT):
        check_causality(model, tokens[:length], "fp32")
    model.model.embed_tokens.register_forward_hook(lambda _, __, x: x + 0.01 * x.roll(-1, dims=1))
    for length in (2, 3, CONTEXT):
        with pytest.raises(UserError, match="the model is not causal"):
            check_causality(model, tokens[:length], "fp32")


@pytest.mark.parametrize("said", [-1, 0])
def test_a_context_that_is_no_length_is_not_known(root, tmp_path, said):
    """-1 says that there is no end, as in XLNet."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes)).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(root / "gpt2" / name, tmp_path)
    change_config(tmp_path, max_position_embeddings=said)
    text = [str(root / "0.txt")]
    assert evaluate(tmp_path, text=text, window=16)["context"] is None
    with pytest.raises(UserError, match="the window of .* is 0, the stride 0: give --window N"):
        evaluate(tmp_path, text=text)


def test_a_model_with_many_more_ids_than_its_tokenizer_is_scored(root, tmp_path):
    model, tokenizer = load_checkpoint(root / "masked_mixer", CPU)
    model.resize_token_embeddings(3000)
    with torch.no_grad():
        model.lm_head.weight[len(tokenizer) :] = 0
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    text = [str(root / "0.txt")]
    padded, plain = (evaluate(place, text=text) for place in (tmp_path, root / "masked_mixer"))
    assert padded["tokens_scored"] == plain["tokens_scored"]
    assert plain["loss"] < padded["loss"] < plain["loss"] + math.log(3000)


def test_a_token_that_the_model_lacks_is_refused_only_in_a_text_that_has_it(root, tmp_path):
    """Tokenizers often have a token more than their model, for padding or pictures."""
    model, tokenizer = load_checkpoint(root / "gpt2", CPU)
    tokenizer.add_tokens(["zyzzyva"])
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    text = [str(root / "0.txt")]
    found, expected = (evaluate(place, text=text) for place in (tmp_path, root / "gpt2"))
    assert found["nats"] == expected["nats"]
    (tmp_path / "with.txt").write_text("a zyzzyva here")
    last = len(tokenizer) - 1
    problem = f"has token {last}, but the model's vocabulary ends at {last - 1}"
    with pytest.raises(UserError, match=f"with.txt {problem}: give another text"):
        evaluate(tmp_path, text=[str(tmp_path / "with.txt")])
    with pytest.raises(UserError, match=f"a prompt {problem}: give another text"):
        continuations(tmp_path, ["a zyzzyva here"], 1, 0.0, 0)


def test_a_tokenizer_that_loses_text_is_told_beside_the_numbers(root, tmp_path):
    shutil.copytree(root / "gpt2", tmp_path / "gpt2")
    lower = train_tokenizer(documents() * 20, 300)
    lower.backend_tokenizer.normalizer = normalizers.Lowercase()
    lower.save_pretrained(tmp_path / "gpt2")
    (tmp_path / "loud.txt").write_text("The MIXER reads")
    report = evaluation_report([evaluate(tmp_path / "gpt2", text=[str(tmp_path / "loud.txt")])])
    assert "the tokenizer loses 40.00% of the characters" in " ".join(report.split())
    result = evaluate(root / "gpt2", text=[str(tmp_path / "loud.txt")])
    assert "tokenizer loses" not in evaluation_report([result])


@pytest.mark.parametrize("first_token", ["skip", "eos"])
def test_documents_of_which_the_tokenizer_leaves_nothing_are_no_tokens(root, tmp_path, first_token):
    model, tokenizer = load_checkpoint(root / "masked_mixer", CPU)
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("\u200b", "")
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    texts = [{"text": text} for text in ("\u200b", "\u200b", documents()[0])]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, texts)))
    how = {"text": [str(tmp_path / "rows.jsonl")], "first_token": first_token}
    assert evaluate(tmp_path, max_tokens=2, **how)["tokens_scored"] == 2


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"window": CONTEXT + 1},
            f"--window is {CONTEXT + 1}, but the context of .* is {CONTEXT}: ask for fewer",
        ),
        ({"window": 0, "stride": 0}, "window = 0; allowed: .* 1 or more; stride = 0; allowed"),
        ({"window": 8, "stride": 9}, "window .* is 8, the stride 9: give .* --stride 1..window"),
        ({"text": []}, "does not say what data it was trained on: give --data DIR, --text FILE"),
        ({"text": ["rows.jsonl"]}, "no text in .*; fields of the first: content.*: --text-field"),
        ({"text": ["short.txt"]}, "short.txt is shorter than 2 tokens: give a longer text"),
    ],
)
def test_each_bad_input_says_what_was_given_and_what_to_do(root, monkeypatch, options, message):
    (root / "short.txt").write_text("t")  # one token
    monkeypatch.chdir(root)
    with pytest.raises(UserError, match=message):
        evaluate(root / "masked_mixer", **({"text": ["0.txt"]} | options))
