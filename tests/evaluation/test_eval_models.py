"""Promises of eval.py about what it is given: any causal model, any text, any number of processes;
each fault has its message.
"""

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import CONTEXT, documents, save_checkpoint
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
from mixer.evaluation.checks import check_causality
from mixer.evaluation.evaluate import EvalOptions, evaluate_checkpoint
from mixer.evaluation.measure import Plan, Process
from mixer.evaluation.report import evaluation_report
from mixer.generate import continuations

CPU = Process(torch.device("cpu"))
BAD_TEXTS = {
    "blank.txt": b" \n",
    "short.txt": b"t",  # one token
    "latin.txt": "café".encode("latin-1"),
}


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


def evaluate(checkpoint, **options):
    return evaluate_checkpoint(EvalOptions(checkpoint=str(checkpoint), device="cpu", **options))


def test_rows_a_dataset_and_files_of_the_same_documents_have_the_same_numbers(root, tmp_path):
    fields = {"text_field": "content", "first_token": "eos"}
    rows = evaluate(root / "masked_mixer", text=[str(root / "rows.jsonl")], **fields)
    dataset = evaluate(root / "masked_mixer", hub=str(root / "dataset"), **fields)
    assert rows["streams"] == dataset["streams"] == len(documents())
    assert rows["nats"] == dataset["nats"] and rows["bytes"] == dataset["bytes"] == sum(
        len(t.encode()) for t in documents()
    )
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep/rows.jsonl.gz").write_bytes(gzip.compress((root / "rows.jsonl").read_bytes()))
    (folder / "1.txt").symlink_to(root / "1.txt")
    mixed = evaluate(root / "masked_mixer", text=[str(folder)], **fields)
    assert mixed["streams"] == rows["streams"] + 1
    assert mixed["bytes"] == rows["bytes"] + (root / "1.txt").stat().st_size
    long = [str(path) for path in sorted(root.glob("[0-9]*.txt"))]  # of the fixture
    files = evaluate(root / "masked_mixer", text=long, first_token="eos")
    alone = [
        evaluate(root / "masked_mixer", text=[path], first_token="eos")["nats"] for path in long
    ]
    assert files["nats"] == pytest.approx(sum(alone), rel=1e-6)
    assert (
        evaluate(root / "masked_mixer", text=[str(root / "rows.jsonl")], max_documents=2, **fields)[
            "streams"
        ]
        == 2
    )


def test_other_causal_models_stand_in_the_same_table(root):
    text = [str(root / "0.txt")]
    results = [
        evaluate(root / kind, text=text, window=16, stride=8) for kind in ("masked_mixer", "gpt2")
    ]
    assert results[0]["tokens_scored"] == results[1]["tokens_scored"]
    report = " ".join(evaluation_report(results).split())
    assert "none (not a masked mixer)" in report and "of at most 16 tokens, stride 8" in report
    assert "tokenizers differ" not in report
    assert "tokenizers differ" in evaluation_report(
        [results[0], results[1] | {"tokenizer_sha256": "another"}]
    )
    for result in results:
        assert result["tokens_per_second"] > 0 and result["peak_memory_gb"] > 0
        assert (
            result["causality"]["largest_move_before"]
            == 0
            < result["causality"]["smallest_move_after"]
        )


def test_several_processes_give_the_numbers_of_one(root, launch, tmp_path):
    """Three windows a batch, so that the processes' shares are unequal."""
    options = {"text": [str(root / "0.txt")], "batch_size": 3, "stride": 16}
    one = evaluate(root / "masked_mixer", **options)
    arguments = [
        "--checkpoint",
        root / "masked_mixer",
        "--text",
        *options["text"],
        "--batch-size",
        3,
        "--stride",
        16,
    ]
    printed = launch(
        *arguments, "--device", "cpu", "--output", tmp_path, program="eval", processes=2
    ).succeed()
    assert printed.count("report.json") == 1
    two = json.loads((tmp_path / "report.json").read_text())[0]
    assert two["device"] == "2 x cpu"
    assert two["nats"] == pytest.approx(one["nats"], rel=1e-9)
    for name in ("tokens_scored", "windows", "count_by_position"):
        assert two[name] == one[name]


def test_a_sharded_checkpoint_is_the_same_and_each_broken_shard_is_named(root, tmp_path):
    model, tokenizer = load_checkpoint(root / "masked_mixer", torch.device("cpu"))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    tokenizer.save_pretrained(tmp_path)
    text = [str(root / "0.txt")]
    assert (
        evaluate(tmp_path, text=text)["nats"] == evaluate(root / "masked_mixer", text=text)["nats"]
    )
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    with pytest.raises(UserError, match=f"{shard.name} .* is damaged or cut short .*copy it again"):
        evaluate(tmp_path, text=text)
    shard.unlink()
    with pytest.raises(
        UserError, match=f"incomplete, it lacks {shard.name}: copy the missing files"
    ):
        evaluate(tmp_path, text=text)
    for index in ("{", '{"weight_map": {"lm_head.weight": 3}}'):
        (tmp_path / "model.safetensors.index.json").write_text(index)
        with pytest.raises(UserError, match="index.json is damaged .*: copy it again"):
            evaluate(tmp_path, text=text)


def change_config(directory: Path, file: str = "config.json", **values) -> None:
    content = json.loads((directory / file).read_text())
    (directory / file).write_text(json.dumps(content | values))


def test_layers_that_config_json_leaves_out_are_refused_for_every_model(root, tmp_path):
    """transformers would leave their weights out without a word."""
    shutil.copytree(root / "gpt2", tmp_path / "gpt2")
    change_config(tmp_path / "gpt2", n_layer=1)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=300, num_hidden_layers=2, **sizes))
    llama.save_pretrained(tmp_path / "llama")
    load_checkpoint(root / "gpt2", CPU.device)[1].save_pretrained(tmp_path / "llama")
    load_checkpoint(tmp_path / "llama", CPU.device)
    change_config(tmp_path / "llama", num_hidden_layers=1)
    for name in ("gpt2", "llama"):
        with pytest.raises(UserError, match="weights that its config.json has no place for, .*1"):
            load_checkpoint(tmp_path / name, CPU.device)


def test_a_model_that_was_saved_to_return_tuples_is_evaluated_all_the_same(root, tmp_path):
    shutil.copytree(root / "gpt2", tmp_path / "gpt2")
    change_config(tmp_path / "gpt2", return_dict=False)
    text = [str(root / "0.txt")]
    found, expected = (evaluate(place / "gpt2", text=text) for place in (tmp_path, root))
    assert found["nats"] == expected["nats"]


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("config.json", {"_attn_implementation": ["eager"]}),
        ("tokenizer_config.json", {"model_max_length": "many"}),
        ("generation_config.json", {"note": "\x00"}),
    ],
)
def test_a_wrong_type_in_a_file_of_transformers_is_named(root, tmp_path, file, values):
    shutil.copytree(root / "masked_mixer", tmp_path / "copy")
    change_config(tmp_path / "copy", file, **values)
    (key,) = values
    with pytest.raises(UserError, match=f"{file} is damaged .*{key}.*: copy the file"):
        load_checkpoint(tmp_path / "copy", CPU.device)


# ---------------------------------------------------------------------------------------- bad input


def save_other(directory, model, root) -> Path:
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(root / "gpt2" / name, directory)
    return directory


def test_models_that_are_not_causal_are_refused(root, tmp_path):
    text = [str(root / "0.txt")]
    size = {"vocab_size": 300, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = BertLMHeadModel(
        BertConfig(hidden_size=16, intermediate_size=16, max_position_embeddings=CONTEXT, **size)
    )
    with pytest.raises(
        UserError, match="the model is not causal: with the tokens from 1 on changed"
    ):
        evaluate(save_other(tmp_path / "bert", bert, root), text=text)
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=300, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    )
    with pytest.raises(UserError, match="is a t5, which is not a causal language model"):
        evaluate(save_other(tmp_path / "t5", t5, root), text=text)


def test_an_unknown_architecture_and_weights_of_another_shape_are_refused(root, tmp_path):
    text = [str(root / "0.txt")]
    shutil.copytree(root / "masked_mixer", tmp_path / "copy")
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    del config["auto_map"]  # the code that comes with a checkpoint
    (tmp_path / "copy" / "config.json").write_text(
        json.dumps(config | {"model_type": "masked_blender"})
    )
    with pytest.raises(
        UserError,
        match="no architecture that can be evaluated .*masked_blender.*; allowed: masked_mixer",
    ):
        evaluate(tmp_path / "copy", text=text)
    (tmp_path / "copy" / "config.json").write_text(json.dumps(config | {"hidden_size": 24}))
    with pytest.raises(UserError, match="cannot be read"):
        evaluate(tmp_path / "copy", text=text)


@pytest.mark.parametrize(
    "kind, field, value, message",
    [
        ("masked_mixer", "hidden_size", "wide", "hidden_size = 'wide'; allowed: int, 1 or more"),
        ("gpt2", "n_layer", "two", "n_layer.*'two'"),
        ("gpt2", "n_layer", -1, "num_hidden_layers -1; allowed: 1 or more"),
        ("gpt2", "activation_function", "magic", "magic"),
    ],
)
def test_an_edited_config_is_named_with_what_is_wrong(root, tmp_path, kind, field, value, message):
    copy = shutil.copytree(root / kind, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(UserError, match=f"checkpoint {copy} .*{message}"):
        evaluate(copy, text=[str(root / "0.txt")])


def test_one_token_of_leakage_is_found(root):
    model, tokenizer = load_checkpoint(root / "masked_mixer", torch.device("cpu"))
    tokens = np.array(tokenizer(documents()[0])["input_ids"])
    plan = Plan(CONTEXT, CONTEXT)
    assert check_causality(model, tokens, plan, CPU)["largest_move_before"] == 0
    # of one token, none can see another
    assert check_causality(model, tokens, Plan(1, 1), CPU)["window"] == 2
    model.model.embed_tokens.register_forward_hook(lambda _, __, x: x + 0.01 * x.roll(-1, dims=1))
    with pytest.raises(UserError, match="the model is not causal"):
        check_causality(model, tokens, plan, CPU)
    torch.nn.init.constant_(model.lm_head.weight, torch.inf)  # which is another fault
    with pytest.raises(
        UserError,
        match="the logits are not finite in fp32: use --dtype fp32; if it stays, the checkpoint "
        "div",
    ):
        check_causality(model, tokens, plan, CPU)


@pytest.mark.parametrize(
    "ids, sizes", [(290, "290 ids, the model 300"), (300, "300 ids, the model 2000")]
)
def test_a_tokenizer_of_another_size_is_refused(root, tmp_path, ids, sizes):
    model, _ = load_checkpoint(root / "masked_mixer", torch.device("cpu"))
    model_size = int(sizes.split()[-1])
    model.resize_token_embeddings(model_size)
    train_tokenizer(documents() * 20, ids).save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    if ids < model_size <= ids + 1024:  # padding
        result = evaluate(tmp_path, text=[str(root / "0.txt")])
        assert f"vocabulary {model_size}, {model_size - ids} of them unused" in evaluation_report(
            [result]
        )
        return
    with pytest.raises(
        UserError, match=f"{sizes}; allowed: as many, or up to 1024 more.*copy the tokenizer"
    ):
        evaluate(tmp_path, text=[str(root / "0.txt")])


def test_a_token_that_the_model_lacks_is_refused_only_in_a_text_that_has_it(root, tmp_path):
    """Tokenizers often have a token more than their model, for padding or pictures."""
    model, tokenizer = load_checkpoint(root / "gpt2", CPU.device)
    tokenizer.add_tokens(["zyzzyva"])
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    found, expected = (
        evaluate(place, text=[str(root / "0.txt")]) for place in (tmp_path, root / "gpt2")
    )
    assert found["nats"] == expected["nats"]
    (tmp_path / "with.txt").write_text("a zyzzyva here")
    problem = f"has token {len(tokenizer) - 1}, the model's vocabulary ends at {len(tokenizer) - 2}"
    with pytest.raises(UserError, match=f"with.txt {problem}: give another text"):
        evaluate(tmp_path, text=[str(tmp_path / "with.txt")])
    with pytest.raises(UserError, match=f"a prompt {problem}: give another text"):
        continuations(str(tmp_path), ["a zyzzyva here"], 1, 0.0, 0)


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


def test_a_missing_or_unreadable_tokenizer_is_named(root, tmp_path):
    shutil.copytree(root / "masked_mixer", tmp_path / "copy")
    (tmp_path / "copy" / "tokenizer.json").write_text("{")
    with pytest.raises(
        UserError, match="tokenizer .*copy.* cannot be read: .*; give .* with tokenizer.json"
    ):
        evaluate(tmp_path / "copy", text=[str(root / "0.txt")])
    (tmp_path / "copy" / "tokenizer.json").unlink()
    with pytest.raises(
        UserError, match="lacks tokenizer.json: copy the tokenizer that it was trained with"
    ):
        evaluate(tmp_path / "copy", text=[str(root / "0.txt")])


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"window": CONTEXT + 1},
            f"window {CONTEXT + 1} is larger than the context of .*: give 1..{CONTEXT}",
        ),
        ({"window": 0, "stride": 0}, "window = 0; allowed: 1 or more; stride = 0; allowed: 1 or"),
        ({"window": 8, "stride": 9}, "stride 9 is outside 1..8"),
        ({"max_tokens": -1}, "max_tokens = -1; allowed: 0 or more"),
        ({"dtype": "fp8"}, "dtype = 'fp8'; allowed: fp32, fp16, bf16"),
        (
            {"text": [], "hub": "{root}/nowhere"},
            "cannot read row 1 .* hub dataset .*nowhere test: .*check these names and the network",
        ),
        ({"hub": "{root}/dataset"}, "more than one text"),
        (
            {"text": []},
            "does not say which data it was trained on: give --data DIR, --text FILE... or --hub "
            "NAME",
        ),
        ({"text": [], "data": "{root}/no-data"}, "no-data holds no prepared data"),
        ({"text": ["{root}/none.txt"]}, "none.txt' is no file, no folder"),
        (
            {"text": ["{root}/rows.jsonl"]},
            "has no field 'text'; its fields: content.*eval.py: --text-field",
        ),
        ({"text": ["{root}/blank.txt"]}, "no document with text in .*blank.txt"),
        (
            {"text": ["{root}/short.txt"]},
            "short.txt is shorter than 2 tokens, so nothing can be predicted",
        ),
        ({"text": ["{root}/latin.txt"]}, "latin.txt is not UTF-8: byte 0xe9 at offset 3"),
    ],
)
def test_each_bad_input_says_what_was_given_and_what_to_do(root, options, message):
    for name, content in BAD_TEXTS.items():
        (root / name).write_bytes(content)
    options = {"text": [str(root / "0.txt")]} | options

    def fill(value):
        return value.format(root=root) if isinstance(value, str) else value

    options = {
        key: [fill(v) for v in value] if isinstance(value, list) else fill(value)
        for key, value in options.items()
    }
    with pytest.raises(UserError, match=message):
        evaluate(root / "masked_mixer", **options)
