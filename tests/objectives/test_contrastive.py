"""train.objective=contrastive: texts become vectors by which they find their partners."""

import json
import math
import random
from itertools import permutations

import numpy as np
import pytest
import torch
from datasets import Dataset
from runs import read_lines
from texts import EOS_IN_TEXTS, quiet, save_tokenizer
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from mixer.checkpoints.convert import convert_mixing
from mixer.checkpoints.export import export
from mixer.commands.eval import main as eval_command
from mixer.common.errors import UserError
from mixer.common.files import sha256
from mixer.data.config import DataConfig, fingerprint
from mixer.data.prepare import prepare
from mixer.data.tokenizer import load_tokenizer
from mixer.distributed.world import Process
from mixer.models.architecture import ModelConfig, model_config, new_model
from mixer.objectives.retrieval import (
    PairFile,
    PairLoss,
    info_nce,
    score_pairs,
    text_keys,
    text_vectors,
    top1,
)
from mixer.training.config import load_config
from mixer.training.loop import train

TEMPERATURE = 0.1
MODELS = {
    "flat": {},
    "tied": {"tie_word_embeddings": True},
    "lags": {"mixing_weight": "lags", "num_mixer_heads": 2},
    "gated": {"mixer_gate": True, "num_mixer_heads": 2, "final_norm": True},
    "keyed": {"mixer_key_size": 4, "num_mixer_heads": 2},
    "qwen3": {"architecture": "qwen3", "num_attention_heads": 2},
    "llama": {"architecture": "llama", "num_attention_heads": 2},
}
CONTRASTIVE = ("name=pairs", "train.objective=contrastive", "model.max_position_embeddings=16")


def model_of(kind: str):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "max_position_embeddings": 8}
    config = model_config(ModelConfig(**(sizes | MODELS[kind])), vocab_size=50, eos_token_id=0)
    torch.manual_seed(0)
    return new_model(config).double()


def some_texts(pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of 1 to 8 tokens."""
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(0, 50, (2, pairs, 8), generator=generator)
    lengths = torch.randint(1, 9, (2, pairs, 1), generator=generator)
    return tuple(texts.masked_fill(torch.arange(8) >= lengths, -100))


def naive_loss(model, queries, targets) -> torch.Tensor:
    """The mean InfoNCE, a text and a pair at a time."""

    def vector(text):
        states = model.base_model(text[text >= 0][None]).last_hidden_state
        return states[0, -1] / states[0, -1].norm()

    targets = [vector(text) for text in targets]
    losses = []
    for number, query in enumerate(map(vector, queries)):
        powers = [torch.exp(query @ target / TEMPERATURE) for target in targets]
        losses.append(-torch.log(powers[number] / sum(powers)))
    return sum(losses) / len(losses)


def gradients(loss: torch.Tensor, model) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: w.grad for name, w in model.named_parameters() if w.grad is not None}


@pytest.fixture
def in_fp64(monkeypatch):
    """What is computed in fp32 otherwise."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.mark.parametrize("kind", MODELS)
def test_the_loss_and_its_gradients_are_those_of_a_naive_one_whatever_the_lengths(kind, in_fp64):
    model, texts = model_of(kind), some_texts(6)
    wanted_loss = naive_loss(model, *texts)
    wanted = gradients(wanted_loss, model)
    loss = PairLoss(model, TEMPERATURE).train()(*texts).mean() / 16
    assert loss.item() == pytest.approx(wanted_loss.item(), rel=1e-9)
    found = gradients(loss, model)
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-7, atol=1e-10)


def test_a_text_without_tokens_is_like_no_other():
    texts = torch.full((2, 8), -100)
    texts[0, 0] = 7
    filled, empty = text_vectors(model_of("flat"), texts)
    assert filled.norm().item() == pytest.approx(1) and not empty.any()


@pytest.mark.parametrize("batch_size", [4, 5, 16])
def test_an_evaluation_scores_each_pair_once_whatever_the_batches(batch_size, in_fp64):
    class Pairs:
        texts = some_texts(10)

        def __len__(self) -> int:
            return 10

        def batch(self, numbers: list[int]) -> list[torch.Tensor]:
            return [side[numbers] for side in self.texts]

    model = model_of("flat")
    process = Process(torch.device("cpu"))
    loss = PairLoss(model, TEMPERATURE).eval()
    scores = score_pairs(loss, Pairs(), 100, batch_size, process)
    assert scores.pairs == 10
    assert scores.loss == pytest.approx(naive_loss(model, *Pairs.texts).item(), rel=1e-9)


def test_top_1_is_counted_among_the_candidates_of_each_group():
    generator = torch.Generator().manual_seed(0)
    targets = torch.nn.functional.normalize(torch.randn(1100, 8, generator=generator), dim=-1)
    queries = targets + 0.2 * torch.randn(1100, 8, generator=generator)
    nearest = [
        (queries[first:1088:34] @ targets[first:1088:34].T).argmax(1) == torch.arange(32)
        for first in range(34)
    ]
    scores = queries[:1024] @ targets[:1024].T
    among_all = (scores.argmax(1) == torch.arange(1024)).float().mean().item()
    shares = top1(queries, targets, torch.arange(1100).expand(2, -1))
    assert shares.keys() == {"top1_of_32", "top1_of_1024"}
    assert shares["top1_of_32"] == pytest.approx(torch.cat(nearest).float().mean().item())
    assert shares["top1_of_1024"] == pytest.approx(among_all)
    assert 0.1 < shares["top1_of_1024"] < shares["top1_of_32"] < 1
    same = torch.ones(64, 8)
    keys = torch.arange(64).expand(2, -1)
    assert top1(same, same, keys)["top1_of_32"] == 1 / 32, "vectors that are all alike find nothing"
    assert info_nce(same, same, keys, 0, 0.02).mean().item() == pytest.approx(math.log(64))


@pytest.mark.parametrize("repeated", ["queries", "targets"])
def test_what_is_right_for_a_copy_is_right_and_no_negative(repeated):
    """With two different targets, or two different queries."""
    generator = torch.Generator().manual_seed(0)
    pairs = torch.nn.functional.normalize(torch.randn(2, 64, 8, generator=generator), dim=-1)
    which = torch.randint(0, 2, (64,), generator=generator)
    keys = torch.stack([torch.arange(64) + 2, which])
    if repeated == "queries":
        keys = keys.flip(0)
    losses = info_nce(pairs[0, 32:], pairs[1], keys, 32, TEMPERATURE)
    powers = torch.exp(pairs[0] @ pairs[1].T / TEMPERATURE)
    for number, loss in zip(range(32, 64), losses, strict=True):
        own, others = powers[number, number], powers[number, which != which[number]]
        expected = -torch.log(own / (own + others.sum()))
        assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    groups = powers[::2, ::2], powers[1::2, 1::2]  # of 32 pairs
    found = [which[n::2][group.argmax(1)] == which[n::2] for n, group in enumerate(groups)]
    share = torch.cat(found).float().mean().item()
    assert 0.2 < share < 0.8
    assert top1(*pairs, keys)["top1_of_32"] == pytest.approx(share)


def test_two_texts_have_one_key_only_where_they_are_the_same():
    texts = torch.randint(0, 3, (5000, 6), generator=torch.Generator().manual_seed(0))
    texts[:, 4:] = torch.where(texts[:, 4:] == 2, -100, texts[:, 4:])
    keys = text_keys(texts)
    assert len(keys.unique()) == len(texts.unique(dim=0))
    _, number = texts.unique(dim=0, return_inverse=True)
    assert all(len(keys[number == one].unique()) == 1 for one in range(20))


# ------------------------------------------------------------------------- data


def made_pairs(count: int) -> list[dict]:
    """Both texts of a pair end with the same two words and a full stop, after other words."""
    generator = random.Random(0)
    words = [one + other for one in "bcdfghjk" for other in "aeiou"]

    def text(end: tuple[str, str]) -> str:
        return " ".join([*generator.choices(words, k=generator.randint(0, 9)), *end, "."])

    ends = generator.sample(list(permutations(words, 2)), count)
    return [{"summary": text(end), "story": text(end)} for end in ends]


@pytest.mark.parametrize("source", ["jsonl", "parquet"])
def test_the_two_fields_of_a_row_are_a_pair_and_stay_in_one_split(source, tmp_path):
    rows = made_pairs(200)
    rows[3] |= {"summary": "one\0<|endoftext|>"}
    left_out = [{"summary": "alone"}, {"summary": " ", "story": "x"}]
    table = Dataset.from_list(rows[:100] + left_out + rows[100:])
    write = {"jsonl": table.to_json, "parquet": table.to_parquet}[source]
    write(str(tmp_path / f"pairs.{source}"))
    files = {"path": str(tmp_path / f"pairs.{source}"), "directory": str(tmp_path / "data")}
    fields = {"text_field": "summary", "pair_field": "story", "vocab_size": 300}
    said = []
    prepare(DataConfig(source=source, validation_fraction=0.2, **files, **fields), said.append)
    assert any("have no text in field 'summary' or 'story'" in line for line in said)
    tokenizer, found = load_tokenizer(tmp_path / "data"), []
    for split in ("train", "validation"):
        pairs = PairFile(tmp_path / "data", split, context=20)
        for query, target in zip(*pairs.batch(range(len(pairs))), strict=True):
            found.append([tokenizer.decode(side[side >= 0]) for side in (query, target)])
    assert len(found) == 200 and 20 < len(pairs) < 70
    wanted = {
        tuple(tokenizer.decode(tokenizer.encode(row[name])[:20]) for name in ("summary", "story"))
        for row in rows[:3] + rows[4:]
    }
    assert wanted < set(map(tuple, found))
    assert ["one <|endoftext|>", rows[3]["story"][:20]] in [[q, t[:20]] for q, t in found]


@pytest.mark.parametrize("kind", EOS_IN_TEXTS)
def test_a_pair_is_its_two_texts_whatever_tokens_they_have(tmp_path, kind):
    rows = [{"text": f"\nno {n}\n<end>{n}", "answer": f"{n}\n<end>\n"} for n in range(40)]
    Dataset.from_list(rows).to_json(tmp_path / "rows.jsonl")
    files = {"path": str(tmp_path / "rows.jsonl"), "directory": str(tmp_path / "data")}
    files["tokenizer"] = save_tokenizer(tmp_path / "tokenizer", kind)
    prepare(DataConfig(source="jsonl", pair_field="answer", **files), quiet)
    tokenizer, found = load_tokenizer(tmp_path / "data").backend_tokenizer, []
    for split in ("train", "validation"):
        pairs = PairFile(tmp_path / "data", split, context=100)
        for sides in zip(*pairs.batch(range(len(pairs))), strict=True):
            ids = [side[side >= 0].tolist() for side in sides]
            found.append([tokenizer.decode(side, skip_special_tokens=False) for side in ids])
    found = [[text.replace("Ċ", "\n") for text in pair] for pair in found]
    assert sorted(found) == sorted([*row.values()] for row in rows)


@pytest.mark.parametrize("kind", ["appends EOS", "EOS is a line's end"])
def test_pairs_prepared_by_an_earlier_version_are_read_or_refused(tmp_path, kind):
    """It recorded where a pair ends, and not where its query does."""
    rows = [{"text": f"no {n}\n{n}", "answer": f"{n}\n{n}"} for n in range(40)]
    Dataset.from_list(rows).to_json(tmp_path / "rows.jsonl")
    files = {"path": str(tmp_path / "rows.jsonl"), "directory": str(tmp_path / "data")}
    files["tokenizer"] = save_tokenizer(tmp_path / "tokenizer", kind)
    prepare(DataConfig(source="jsonl", pair_field="answer", **files), quiet)
    now = PairFile(tmp_path / "data", "train", context=100).batch(range(30))
    manifest = json.loads((tmp_path / "data/manifest.json").read_text())
    for split, counts in manifest["splits"].items():
        file = tmp_path / f"data/{split}.docs.bin"
        np.fromfile(file, "<u8")[1::2].tofile(file)
        counts["documents_sha256"] = sha256(file)
    manifest["fingerprint"] = fingerprint(manifest)
    (tmp_path / "data/manifest.json").write_text(json.dumps(manifest))
    earlier = PairFile(tmp_path / "data", "train", context=100)
    if kind == "appends EOS":
        assert torch.equal(torch.stack(now), torch.stack(earlier.batch(range(30))))
    else:
        with pytest.raises(UserError, match="train.bin has an EOS inside of a text: give another"):
            earlier.batch([0])


def test_passages_of_books_are_pairs_with_the_next_one_and_share_no_token(tmp_path):
    lengths = (3, 100, 64, 63, 200)
    for number, length in enumerate(lengths):
        text = "".join(chr(97 + (number + place) % 26) for place in range(length))
        (tmp_path / f"{number}.txt").write_text(text)
    (tmp_path / "other").write_text("z" * 99)
    files = {"path": str(tmp_path / "*.txt"), "validation_path": str(tmp_path / "other")}
    files |= {"directory": str(tmp_path / "data"), "vocab_size": 257}  # a token is a byte
    prepare(DataConfig(source="text", **files), quiet)
    pairs = PairFile(tmp_path / "data", "train", context=16)
    assert len(pairs) == sum(length // 32 for length in lengths)
    tokenizer = load_tokenizer(tmp_path / "data")
    joined = torch.cat(pairs.batch(range(len(pairs))), dim=1)
    found = "".join(tokenizer.decode(row) for row in joined)
    wanted = [(tmp_path / f"{n}.txt").read_text()[: of // 32 * 32] for n, of in enumerate(lengths)]
    assert found == "".join(wanted)
    with pytest.raises(UserError, match="validation split .*passages of 50 needs a document of 1"):
        PairFile(tmp_path / "data", "validation", context=50)


# ------------------------------------------------------------------------- runs


@pytest.fixture
def pairs_config(write_config, small_run, tmp_path):
    """A run on pairs of texts that have two words in common."""
    lines = [json.dumps(row) for row in made_pairs(1500)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    data = {"source": "jsonl", "path": str(tmp_path / "pairs.jsonl"), "vocab_size": 400}
    data |= {"text_field": "summary", "pair_field": "story", "validation_fraction": 0.05}
    data |= {"directory": str(tmp_path / "data")}
    train = {"steps": 60, "batch_size": 32, "eval_every": 20, "eval_samples": 0}
    optim = {"lr": 5e-3, "warmup_steps": 5}
    return write_config(data=data, train=train, optim=optim, checkpoint={"save_every": 20})


@pytest.mark.parametrize("architecture", ["masked_mixer", "qwen3"])
def test_a_language_model_learns_to_find_partners_and_others_load_it(
    pairs_config, architecture, tmp_path, capsys
):
    """From text to vectors, as docs/retrieval.md says."""
    common = [CONTRASTIVE[2], f"model.architecture={architecture}"]
    train(load_config(str(pairs_config), [*common, "name=language", "train.steps=20"]))
    start = f"train.init_from={tmp_path / 'runs/language/step-20'}"
    train(load_config(str(pairs_config), [*common, *CONTRASTIVE, start]))
    run = tmp_path / "runs/pairs"
    shares = [line["top1_of_32"] for line in read_lines(run) if "top1_of_32" in line]
    assert len(shares) == 4 and shares[-1] > shares[0] + 0.2

    checkpoint = run / "step-60"
    head, before = (
        AutoModelForCausalLM.from_pretrained(path).get_output_embeddings().weight
        for path in (checkpoint, tmp_path / "runs/language/step-20")
    )
    assert torch.equal(head, before), "the output layer has no part in it"
    capsys.readouterr()
    eval_command(["--checkpoint", str(checkpoint), "--pairs", str(tmp_path / "data")])
    (file,) = run.glob("retrieval-step-60-data*/report.json")
    (report,) = json.loads(file.read_text())
    assert report["top1_of_32"] == pytest.approx(shares[-1], abs=0.02)
    assert "top1 of 32" in capsys.readouterr().out
    saved = [checkpoint]
    if architecture == "masked_mixer":
        saved += [tmp_path / "exported", tmp_path / "converted"]
        export(checkpoint, saved[1], "apache-2.0")
        convert_mixing(checkpoint, saved[2], "lags")
    for directory in saved:
        assert_transformers_has_the_same_vectors(directory)
    pytest.importorskip("sentence_transformers")
    for directory in saved:
        assert_sentence_transformers_has_the_same_vectors(directory)


TEXTS = ["ba", "ka and more", "bo cut at the context " * 9]


def trained_vectors(checkpoint) -> np.ndarray:
    """(3, hidden), of TEXTS as in training."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    rows = torch.full((3, 16), -100)
    ids = AutoTokenizer.from_pretrained(checkpoint)(TEXTS, truncation=True)["input_ids"]
    for row, own in zip(rows, ids, strict=True):
        row[: len(own)] = torch.tensor(own)
    vectors = text_vectors(model, rows).detach().numpy()
    assert np.abs(vectors[0] - vectors[1]).max() > 0.01
    return vectors


def assert_transformers_has_the_same_vectors(checkpoint) -> None:
    model = AutoModel.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    for side in ("left", "right"):
        how = {"padding": True, "padding_side": side, "return_tensors": "pt"}
        padded = tokenizer(TEXTS, truncation=True, **how)
        states = model(**padded).last_hidden_state.detach()
        last = padded["attention_mask"].cumsum(1).argmax(1)
        found = torch.nn.functional.normalize(states[torch.arange(3), last], dim=-1)
        np.testing.assert_allclose(found.numpy(), trained_vectors(checkpoint), atol=1e-5)


def assert_sentence_transformers_has_the_same_vectors(checkpoint) -> None:
    from sentence_transformers import SentenceTransformer

    loaded = SentenceTransformer(str(checkpoint), device="cpu")
    for side in ("left", "right"):
        loaded.tokenizer.padding_side = side
        found = loaded.encode(TEXTS)
        np.testing.assert_allclose(found, trained_vectors(checkpoint), atol=1e-5)
    if loaded[0].auto_model.config.model_type == "masked_mixer":
        for texts in ([""], ["", "ba"], ["ba", ""]):
            with pytest.raises(ValueError, match="a text has no token; allowed: 1 or more in each"):
                loaded.encode(texts)


REFUSED = {
    "train.batch_size=1": "train.batch_size = 1 with .* in one process.*; allowed: 2 or more",
    "data.source=copy": "does not learn from it; allowed: builtin, text, jsonl, parquet, hub",
    "data.source=recall": "data.source = 'recall'",
    "data.source=needle": "data.source = 'needle'",
    "data.pair_field=summary": "data.pair_field = 'summary' is data.text_field too",
}


@pytest.mark.parametrize(("given", "said"), REFUSED.items(), ids=REFUSED)
def test_training_that_cannot_learn_is_refused(pairs_config, given, said):
    with pytest.raises(UserError, match=f"1 problem.*\n.*{said}"):
        load_config(str(pairs_config), [*CONTRASTIVE, given])


@pytest.mark.parametrize("fields", [("story", "summary"), ("summary", "story")], ids=str)
def test_pairs_that_have_one_text_in_common_are_refused_and_two_are_learned(
    pairs_config, tmp_path, capsys, fields
):
    def train_on(answers: list[str]) -> list[dict]:
        rows = [{fields[0]: f"{a} {n}", fields[1]: a} for n, a in enumerate(answers * 600)]
        (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
        own = [f"data.directory={tmp_path}/{len(answers)}", f"name={len(answers)}"]
        train(load_config(str(pairs_config), [*CONTRASTIVE, *own, "train.steps=90"]))
        return read_lines(tmp_path / "runs" / str(len(answers)))

    side = "target" if fields[1] == "story" else "query"
    with pytest.raises(UserError, match=f"the train split of .* has one {side} in .* pairs"):
        train_on(["yes it is"])
    lines = train_on(["yes it is", "no it is not"])
    told = f"  mixer eval --checkpoint {tmp_path}/runs/2/best --pairs {tmp_path}/2\n  mixer curves"
    assert told in capsys.readouterr().out
    assert lines[-1]["validation_loss"] < 0.1 and lines[-1]["top1_of_32"] > 0.9


def test_two_processes_learn_what_one_does_and_evaluate_it(pairs_config, launch, tmp_path):
    """Also where two thirds of the targets are copies of one."""
    rows = [row | {"story": "ba ."} if n % 3 else row for n, row in enumerate(made_pairs(1500))]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = ("--config", pairs_config, *CONTRASTIVE, "train.steps=12", "train.eval_every=6")
    launch(*command, "name=one").succeed()
    launch(*command, "name=two", "train.batch_size=16", processes=2).succeed()
    one, two = (read_lines(tmp_path / "runs" / name) for name in ("one", "two"))
    assert len(one) == len(two) == 12 + 3
    for line, other in zip(one, two, strict=True):
        for key in {"loss", "validation_loss", "grad_norm", "top1_of_32", "tokens"} & line.keys():
            assert other[key] == pytest.approx(line[key], rel=1e-4), (line["step"], key)
    assert one[-1]["tokens"] == 12 * 32 * 2 * 16
    asked = ["--checkpoint", tmp_path / "runs/one/step-12", "--pairs", tmp_path / "data"]
    asked += ["--batch-size", 16, "--device", "cpu", "--output", tmp_path / "report"]
    launch(*asked, program="eval", processes=2).succeed()
    (report,) = json.loads((tmp_path / "report/report.json").read_text())
    assert report["top1_of_32"] == pytest.approx(one[-1]["top1_of_32"], abs=0.02)
