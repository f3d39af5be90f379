"""Promises of evaluation: the numbers are what their names say, and bad input is met with a
message.
"""

import json
import math
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import WORDS, continuations, evaluate, list_files
from launching import run_python
from markdown import rows
from pictures import assert_png

from mixer import MaskedMixerConfig, MaskedMixerForCausalLM
from mixer.checkpoints.export import export
from mixer.checkpoints.restore import load_trainer
from mixer.commands.eval import main as evaluate_main
from mixer.common.errors import UserError
from mixer.data.config import DataConfig
from mixer.data.prepare import prepare
from mixer.data.tokenizer import load_tokenizer
from mixer.distributed.world import Process
from mixer.evaluation.evaluate import write_evaluation
from mixer.evaluation.scoring import window_batches
from mixer.evaluation.texts import validation_text
from mixer.objectives.language import TokenLoss, score_tokens

CONTEXT = 12
ALONE = Process(torch.device("cpu"))


def tiny_model(vocab_size=23, context=CONTEXT, **options):
    torch.manual_seed(0)
    config = MaskedMixerConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        num_hidden_layers=2,
        max_position_embeddings=context,
        mixing_backend="dense",
        **options,
    )
    return MaskedMixerForCausalLM(config).eval()


def by_hand(model, tokens, context, stride, last_window):
    """(target index, position, nats) one target at a time, each from exactly the promised
    context.
    """
    scored = []
    with torch.no_grad():
        for target in range(1, len(tokens)):
            # the first window that holds the target
            window = max(0, math.ceil((target - context) / stride))
            begin = window * stride
            if last_window == "full" and begin + context >= len(tokens) - 1:
                # the last window ends where the others would, and is as long
                begin = max(0, len(tokens) - 1 - context)
            logits = model(torch.tensor([tokens[begin:target].tolist()])).logits[0, -1].double()
            nats = torch.logsumexp(logits, 0) - logits[tokens[target]]
            scored.append((target, target - begin - 1, nats.item()))
    return scored


@pytest.mark.parametrize("length", [2, CONTEXT, CONTEXT + 1, CONTEXT + 2, 40])
@pytest.mark.parametrize("stride", [None, 1, 5])
@pytest.mark.parametrize("last_window", ["short", "full"])
def test_perplexity_is_the_one_computed_by_hand(length, stride, last_window):
    model = tiny_model().double()
    tokens = np.random.default_rng(length).integers(0, 23, length)
    batches = window_batches([tokens], CONTEXT, stride or CONTEXT, 3, last_window)
    scores = score_tokens(TokenLoss(model).eval(), batches, CONTEXT, ALONE)
    expected = by_hand(model, tokens, CONTEXT, stride or CONTEXT, last_window)
    assert scores.tokens == length - 1
    assert scores.nats == pytest.approx(sum(nats for *_, nats in expected), rel=1e-12)
    for position, loss in enumerate(scores.by_position(scores.nats_by_position)):
        here = [nats for _, p, nats in expected if p == position]
        assert scores.count_by_position[position] == len(here)
        assert loss == (pytest.approx(np.mean(here), rel=1e-10) if here else None)


# -------------------------------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A prepared corpus and a checkpoint directory, as training leaves them."""
    root = tmp_path_factory.mktemp("run")
    generator = np.random.default_rng(0)
    documents = [" ".join(generator.choice(WORDS, 40)) + "." for _ in range(60)]
    lines = (json.dumps({"text": text}) + "\n" for text in documents)
    (root / "corpus.jsonl").write_text("".join(lines))
    how = {"source": "jsonl", "path": str(root / "corpus.jsonl"), "vocab_size": 300}
    for name, packed in (("data", True), ("rows", False)):
        how |= {"directory": str(root / name), "packed": packed}
        prepare(DataConfig(**how, validation_fraction=0.2), say=lambda line: None)
    tokenizer = load_tokenizer(root / "data")
    checkpoint = root / "demo" / "step-7"
    tiny_model(len(tokenizer), 32).save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)
    (checkpoint / "trainer_state").mkdir()
    state = {"step": 7, "tokens": 224, "data_directory": str(root / "data")}
    (checkpoint / "trainer_state" / "trainer.json").write_text(json.dumps(state))
    list_files(checkpoint)
    (root / "book.txt").write_text(documents[0] + "\n", encoding="utf-8")
    return root


def counts(run, name):
    return json.loads((run / name / "manifest.json").read_text())["splits"]["validation"]


def test_the_validation_split_is_scored_whole_with_the_manifests_sizes(run):
    """Packed; document by document; and without the last EOS, which stands for no text."""
    split, rows = counts(run, "data"), counts(run, "rows")
    checkpoint = run / "demo/step-7"
    whole, part = evaluate(checkpoint), evaluate(checkpoint, max_tokens=split["tokens"] - 2)
    assert whole["step"] == 7 and whole["stride"] == whole["window"] == 32
    assert whole["tokens_scored"] == split["tokens"] - 1 == part["tokens_scored"] + 1
    for result in (whole, part):
        assert (result["bytes"], result["words"]) == (split["bytes"], split["words"])
    unpacked = evaluate(checkpoint, data=str(run / "rows"))
    assert unpacked["streams"] == rows["documents"]
    assert unpacked["tokens_scored"] == rows["tokens"] - rows["documents"]


@pytest.mark.parametrize("first_token, extra", [("skip", -1), ("eos", 0)])
def test_numbers_of_a_text_are_consistent_with_each_other(run, first_token, extra):
    book = (run / "book.txt").read_text(encoding="utf-8")
    options = {"text": [str(run / "book.txt")], "stride": 16, "first_token": first_token}
    result = evaluate(run / "demo/step-7", **options)
    assert result["bytes"] == len(book.encode()) and result["words"] == len(book.split())
    tokenizer = load_tokenizer(run / "data")
    tokens = tokenizer(book)["input_ids"]
    assert result["tokens_scored"] == len(tokens) + extra
    size = result["bytes"]
    if first_token == "skip":  # only tokens that are scored count
        size -= len(tokenizer.decode(tokens[:1]).encode())
    assert result["bytes_scored"] == size
    per_byte = math.log2(result["token_perplexity"]) * result["tokens_scored"] / size
    assert result["bits_per_byte"] == pytest.approx(per_byte, rel=1e-12)
    assert math.log2(result["byte_perplexity"]) == pytest.approx(per_byte, rel=1e-12)
    nats = math.log(result["word_perplexity"]) * result["words"] * size / result["bytes"]
    assert nats == pytest.approx(result["nats"], rel=1e-12)


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [({"backend": "auto"}, 1e-6), ({"dtype": "bf16"}, 1e-3), ({"dtype": "fp16"}, 1e-3)],
)
def test_what_is_asked_for_computes_and_gives_nearly_the_same_loss(run, options, tolerance):
    result, expected = evaluate(run / "demo/step-7", **options), evaluate(run / "demo/step-7")
    assert result["backend"] == options.get("backend", "dense") and expected["backend"] == "dense"
    assert result["loss"] == pytest.approx(expected["loss"], rel=tolerance)
    assert (result["loss"] != expected["loss"]) == ("dtype" in options)


def test_of_a_long_text_it_is_said_how_much_is_scored(run, monkeypatch, capsys):
    monkeypatch.setattr("mixer.common.progress.SECONDS", 0.001)
    tokens = evaluate(run / "demo/step-7", batch_size=1)["tokens_scored"]
    said = capsys.readouterr().err
    amounts = re.findall(rf"scoring validation split .*: ([\d,]+) of {tokens:,} tokens, 0 s", said)
    scored = [int(amount.replace(",", "")) for amount in amounts]
    assert scored == sorted(scored) and 0 < scored[-1] <= tokens and len(set(scored)) > 2
    monkeypatch.undo()
    evaluate(run / "demo/step-7")
    assert not capsys.readouterr().err


def test_eval_py_prints_a_table_and_writes_three_files(run, tmp_path):
    checkpoint = run / "demo" / "step-7"
    options = ["--checkpoint", checkpoint, checkpoint, "--device", "cpu", "--max-tokens", 300]
    printed = run_python("eval.py", *options, output=tmp_path / "printed")
    (output,) = (run / "demo").glob("eval-step-7-*")
    results = json.loads((output / "report.json").read_text())
    assert len(results) == 2 and results[0]["tokens_scored"] == 300
    for text in (printed, (output / "report.md").read_text()):
        assert ["demo/step-7", "300"] in [row[:2] for row in rows(text)]
        assert text.count("- windows: ") == 1  # said once, as it holds for both
        assert f"{results[0]['bits_per_byte']:.4f}" in text
    assert_png(output / "loss_by_position.png")


def test_without_matplotlib_a_report_is_whole_but_for_its_picture(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    checkpoint = str(run / "demo" / "step-7")
    evaluate_main(["--checkpoint", checkpoint, "--device", "cpu", "--output", str(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "report.md"]
    assert ".png" not in (tmp_path / "report.md").read_text()


def test_weights_by_lag_are_scored_and_write_past_the_trained_context(run, tmp_path):
    """The table has the loss up to the context and past it, and the picture marks the context."""
    checkpoint = shutil.copytree(run / "demo" / "step-7", tmp_path / "lags" / "step-7")
    tokenizer = load_tokenizer(run / "data")
    model = tiny_model(len(tokenizer), 32, mixing_weight="lags")
    model.save_pretrained(checkpoint)
    list_files(checkpoint)
    checkpoints = [checkpoint, run / "demo" / "step-7"]
    found = [evaluate(checkpoints[0], window=96), evaluate(checkpoints[1], window=32)]
    write_evaluation(found, tmp_path / "report")
    assert_png(tmp_path / "report" / "loss_by_position.png")
    tokens = validation_text(run / "data", 96, tokenizer).streams
    batches = window_batches(tokens, 96, 96, 16, "short")
    scores = score_tokens(TokenLoss(model).eval(), batches, 96, ALONE)
    nats, counts = scores.nats_by_position, scores.count_by_position
    means = [nats[part].sum() / counts[part].sum() for part in (slice(16, 32), slice(32, None))]
    last = [row[-2:] for row in rows((tmp_path / "report" / "report.md").read_text())]
    assert ["loss, 2nd half", "loss past context"] in last
    assert [f"{mean:.4f}" for mean in means] in last and ["-", "-"] in last
    (written,) = continuations(checkpoint, ["tok"], 80, 0.0, 0)
    assert len(tokenizer(written).input_ids) > 32
    with pytest.raises(UserError, match="-tokens is 80, .* is 32: ask .* --mixing-weight lags"):
        continuations(checkpoints[1], ["tok"], 80, 0.0, 0)
    with pytest.raises(UserError, match="--window is 96, .* is 32: ask .* --mixing-weight lags"):
        evaluate(checkpoints[1], window=96)


def test_an_evaluation_takes_the_place_of_its_own_report_alone(run, tmp_path):
    checkpoint = shutil.copytree(run / "demo" / "step-7", tmp_path / "demo" / "step-7")
    for how in ([], ["--window", "16"], ["--stride", "8"], [], ["--window", "16"]):
        options = ["--checkpoint", checkpoint, "--text", run / "book.txt", "--device", "cpu"]
        evaluate_main([*map(str, options), *how])
    reports = list(checkpoint.parent.glob("eval-step-7-book.txt-*/report.json"))
    results = [json.loads(report.read_text())[0] for report in reports]
    found = sorted((result["window"], result["stride"]) for result in results)
    assert found == [(16, 16), (32, 8), (32, 32)]


def test_what_is_no_checkpoint_is_named_with_what_it_lacks(run, tmp_path):
    names = {"config.json", "model.safetensors", "tokenizer.json"}
    for missing in ("config.json", "model.safetensors"):
        for name in names - {missing}:
            (tmp_path / name).write_bytes((run / "demo" / "step-7" / name).read_bytes())
        with pytest.raises(UserError, match=f"lacks {missing}"):
            evaluate(tmp_path)
        (tmp_path / "model.safetensors").unlink(missing_ok=True)
    for name, problem in {
        "": "is a folder of runs, not a checkpoint: give .*/demo/step-7$",
        "demo": "demo is a run, not a checkpoint: give .*/demo/step-7$",
        "demo/step-70": "step-70: there is no such directory; give .*/demo/step-7$",
        "dem/step-7": "there is no such directory, nor .*/dem; give RUN/best or RUN/step-N$",
    }.items():
        with pytest.raises(UserError, match=problem):
            evaluate(run / name)


@pytest.mark.parametrize(
    "given, problem",
    [
        (["--split", "test"], "--split is given, which scoring data .*, or give --hub"),
        (["--text", "a.txt", "--subset", "en"], "--subset is given, which scoring text"),
        (["--text-field", "body"], "--text-field .*scoring data .* give --text or --hub"),
        (["--pairs", "data", "--max-tokens", "9"], "--max-tokens is given, which scoring pairs"),
    ],
)
def test_an_option_that_the_text_does_not_read_is_refused(run, given, problem):
    with pytest.raises(UserError, match=problem):
        evaluate_main(["--checkpoint", str(run / "demo" / "step-7"), *given])


def change_trainer(run, checkpoint: Path, content: str) -> str:
    """A checkpoint with another trainer.json, listed as if training had written it."""
    shutil.copytree(run / "demo" / "step-7", checkpoint)
    (checkpoint / "trainer_state" / "trainer.json").write_text(content)
    list_files(checkpoint)
    return str(checkpoint)


STATE = {"step": 7, "tokens": 224, "data_directory": "data/of-a-run"}


def test_a_checkpoint_away_from_its_data_asks_for_a_text(run, tmp_path):
    checkpoint = change_trainer(run, tmp_path / "step-7", json.dumps(STATE))
    with pytest.raises(UserError, match="was trained on data/of-a-run, which is not in"):
        evaluate(checkpoint)


def test_the_task_of_another_version_is_read_and_odd_values_of_it_are_named(run, tmp_path):
    task = {"source": "copy", "vocab_size": 300, "of_another_version": 3}
    content = json.dumps(STATE | {"settings": {"data": task}})
    assert "the task copy" in evaluate(change_trainer(run, tmp_path / "later", content))["text"]
    content = json.dumps(STATE | {"settings": {"data": task | {"vocab_size": "x"}}})
    with pytest.raises(UserError, match="was trained on data.vocab_size = 'x'; allowed: a whole"):
        evaluate(change_trainer(run, tmp_path / "odd", content))


def test_what_training_knew_is_named_where_it_is_damaged(run, tmp_path):
    for name, content, problem in (
        ("cut", '{"step": 7, "tok', "JSONDecodeError: "),
        ("lacking", '{"step": 7}', "tokens missing"),
        ("number", json.dumps(STATE | {"settings": 3}), "trainer.json.settings = 3; allowed: keys"),
        (
            "list",
            json.dumps(STATE | {"settings": {"data": []}}),
            r"trainer.json.settings.data = \[",
        ),
        ("text", json.dumps(STATE | {"earlier": {"7": "x"}}), "trainer.json.earlier.7 = 'x'"),
    ):
        checkpoint = change_trainer(run, tmp_path / name, content)
        for use in (
            lambda path: evaluate(path, text=[str(run / "book.txt")]),
            lambda path: export(Path(path), tmp_path / "given", "mit"),
            lambda path: load_trainer(Path(path), {}),
        ):
            with pytest.raises(UserError, match=rf"trainer.json is damaged \(\S*{problem}.*: copy"):
                use(checkpoint)
    assert not (tmp_path / "given").exists()


def test_data_of_another_tokenizer_is_refused(run, tmp_path):
    (tmp_path / "a.txt").write_text("quite other words " * 30)
    (tmp_path / "b.txt").write_text("zebra quagga xylophone " * 30)
    source = {"source": "text", "path": str(tmp_path), "directory": str(tmp_path / "data")}
    prepare(DataConfig(**source, vocab_size=290, validation_fraction=0.5), say=lambda line: None)
    for option in ("data", "pairs"):
        with pytest.raises(UserError, match="another tokenizer"):
            evaluate(run / "demo/step-7", **{option: str(tmp_path / "data")})


def test_pairs_shorter_than_the_context_together_are_evaluated(run, tmp_path):
    rows = [{"text": word, "partner": word[0]} for word in WORDS[:6]]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = {"source": "jsonl", "path": str(tmp_path / "pairs.jsonl"), "pair_field": "partner"}
    where = {"directory": str(tmp_path / "pairs"), "tokenizer": str(run / "data/tokenizer")}
    prepare(DataConfig(**source, **where, validation_documents=3), say=lambda line: None)
    assert counts(tmp_path, "pairs")["tokens"] < 32
    assert evaluate(run / "demo/step-7", pairs=where["directory"])["pairs"] == 3
