"""The tokenizer: every text comes back, and training it is deterministic."""

import json
import random
import re
import time

import numpy as np
import psutil
import pytest
from texts import (
    ADDS_A_SPACE,
    HARD,
    config_of,
    corpus,
    decoded_documents,
    made_texts,
    quiet,
    save_tokenizer,
)
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mixer.common.errors import UserError
from mixer.data import prepare as preparation
from mixer.data import tokenizer as module
from mixer.data.prepare import open_data, prepare
from mixer.data.tokenizer import (
    PIECE,
    TextBytes,
    existing_tokenizer,
    load_tokenizer,
    pieces,
    text_encoder,
    token_bytes,
    train_tokenizer,
    training_sample,
)

HAN = "".join(map(chr, range(0x4E00, 0x59B8)))


def test_trained_tokenizer_is_exactly_reversible_and_deterministic():
    texts = made_texts(200)
    tokenizer, again = (train_tokenizer(texts, 500) for _ in range(2))
    assert len(tokenizer) == 500
    assert tokenizer.backend_tokenizer.to_str() == again.backend_tokenizer.to_str()
    generator = random.Random(1)
    everything = [*range(0xD800), *range(0xE000, 0x110000)]  # all of Unicode but the surrogates
    noise = "".join(map(chr, generator.choices(everything, k=2000)))
    texts = [HARD, noise, " ", "a"]
    for text in texts:
        ids = text_encoder(tokenizer)(text)
        assert tokenizer.decode(ids) == text
        assert token_bytes(tokenizer)[ids].sum() == len(text.encode())
    assert token_bytes(tokenizer)[tokenizer.eos_token_id] == 0


def test_a_tokenizer_of_a_directory_is_used_and_cuts_no_document(tmp_path):
    tokenizer = train_tokenizer(made_texts(100), 350)
    tokenizer.backend_tokenizer.enable_truncation(8)
    tokenizer.save_pretrained(str(tmp_path / "tok"))
    texts = made_texts(20, seed=1)
    config = config_of(tmp_path, texts, tokenizer=str(tmp_path / "tok"))
    assert prepare(config, quiet).vocab_size == 350
    found = [decoded_documents(tmp_path / "prepared", side) for side in ("train", "validation")]
    assert sorted(sum(found, [])) == sorted(texts)


def test_the_tokenizer_is_trained_without_the_validation_text(tmp_path):
    """Otherwise a word of the validation text could have a token of its own."""
    validation = corpus(tmp_path / "validation", ["zyzzyva " * 500] * 3)
    changes = {"validation_path": str(validation), "validation_fraction": 0.01}
    prepare(config_of(tmp_path, made_texts(30), **changes), quiet)
    vocabulary = load_tokenizer(tmp_path / "prepared").get_vocab()
    assert not any("zyz" in token for token in vocabulary) and len(vocabulary) == 300


@pytest.mark.parametrize("kind", ADDS_A_SPACE)
def test_bytes_that_a_tokenizer_adds_count_with_the_first_token_of_each_text(kind, tmp_path):
    """Wherever the tokens are cut: what is scored may end inside of a text."""
    tokenizer = AutoTokenizer.from_pretrained(save_tokenizer(tmp_path / "tokenizer", kind))
    encode, texts = text_encoder(tokenizer), ["a bad cab", "a", "fed a cab a day"]
    tokens = [np.append(encode(text), tokenizer.eos_token_id) for text in texts]
    size = TextBytes(tokenizer, [np.concatenate(tokens)], sum(map(len, texts)))
    assert [size.count(ids) for ids in tokens] == pytest.approx(list(map(len, texts)))
    for ids in tokens:
        assert size.count(ids[1:], ids[:-1]) == token_bytes(tokenizer)[ids[1:]].sum()


def test_a_long_run_without_a_break_does_not_stall_the_training():
    began = time.monotonic()
    text = "".join(random.Random(0).choices("abcd", k=PIECE))
    train_tokenizer(training_sample([text]), 300)
    assert time.monotonic() - began < 20  # quadratic time would be many minutes


def test_a_huge_document_is_cut_into_pieces_and_comes_back(tmp_path):
    huge = ("x" * 99 + "\n") * (PIECE // 50) + "y" * (PIECE + 5)
    starts, parts = zip(*pieces(huge), strict=True)
    assert "".join(parts) == huge and max(map(len, parts)) <= PIECE
    assert all(huge.startswith(part, start) for start, part in zip(starts, parts, strict=True))
    manifest = prepare(config_of(tmp_path, [huge, "small"]), quiet)
    assert manifest.splits["train"].documents == 1
    assert decoded_documents(tmp_path / "prepared", "train") == [huge]


@pytest.mark.parametrize("length", [30, 300])
def test_a_language_without_spaces_does_not_fill_the_memory(monkeypatch, length):
    """Neither by the words that the encoder keeps, nor by those that the BPE is trained on."""
    monkeypatch.setattr(module, "CACHE_BYTES", 1_000_000)
    monkeypatch.setattr(module, "DISTINCT_BYTES", 200_000)
    generator, read = random.Random(0), 0

    def texts(count):
        nonlocal read
        for _ in range(count):
            read += 3 * length
            yield "".join(generator.choices(HAN, k=length)) + "\n"

    trained = train_tokenizer(training_sample(texts(10_000)), 300)
    encode = text_encoder(trained)
    assert read < 250_000
    process, count = psutil.Process(), 1_300_000 // (3 * length)
    for text in texts(count):  # fills the library's own cache, of 10,000 words
        encode(text)
    before = process.memory_info().rss
    for text in texts(2 * count):
        encode(text)
    assert process.memory_info().rss - before < 5_000_000  # it was four times the text


def test_tokens_are_those_of_the_tokenizer_itself(monkeypatch):
    """The words kept never change a token: white space, contractions and scripts of all kinds."""
    monkeypatch.setattr(module, "CACHE_BYTES", 100_000)  # they are dropped and made again
    trained = train_tokenizer([*made_texts(50), HARD], 400)
    encode, backend = text_encoder(trained), trained.backend_tokenizer
    backend.encode_special_tokens = True
    generator = random.Random(0)
    edges = ["'ll", "  "]
    edges += " \n\t\r\x1c\x1d\x1f\x85\xa0\u2028\u3000'\"-_.,09aZsté²Ⅷ日🙂\u0301\u200b"
    texts = ["".join(generator.choices(edges, k=2000)) for _ in range(50)]
    anything = [*range(0xD800), *range(0xE000, 0x30000)]
    texts += [
        "".join(chr(generator.choice(anything)) + generator.choice(edges) for _ in range(2000))
        for _ in range(20)
    ]
    texts += [HARD, "", " ", "a", "don't  we'll\n\tgo"]
    for text in texts:
        assert encode(text).tolist() == backend.encode(text).ids


def saved(folder, backend=None, **config) -> str:
    """A tokenizer's folder, with changes in its tokenizer_config.json."""
    tokenizer = train_tokenizer(made_texts(50), 300)
    if backend is not None:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.save_pretrained(str(folder))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return str(folder)


def test_tokens_are_those_of_tokenizer_json_whatever_class_it_names(tmp_path):
    backend = train_tokenizer(made_texts(50), 300).backend_tokenizer
    digits = pre_tokenizers.Split(Regex(r"\p{N}|\p{L}+|\s|."), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer = saved(tmp_path / "tok", backend, tokenizer_class="GPT2Tokenizer")
    text = "document 1000:\n\n  the document"
    expected = backend.encode(text, add_special_tokens=False).ids
    unchanged = train_tokenizer(made_texts(50), 300)
    assert expected != text_encoder(unchanged)(text).tolist()
    prepare(config_of(tmp_path, made_texts(5), tokenizer=tokenizer), quiet)
    found = load_tokenizer(tmp_path / "prepared")
    assert text_encoder(found)(text).tolist() == expected
    found.save_pretrained(str(tmp_path / "llama"))  # as beside a model
    (tmp_path / "llama/config.json").write_text('{"model_type": "llama"}')
    assert AutoTokenizer.from_pretrained(tmp_path / "llama")(text).input_ids == expected


def test_other_tools_read_a_text_as_training_does_whatever_the_tokenizer_put_around_it(tmp_path):
    given = existing_tokenizer(save_tokenizer(tmp_path / "tok", "appends EOS"))
    assert given("a big cab").input_ids[-1] == given.eos_token_id
    prepare(config_of(tmp_path, made_texts(5), tokenizer=str(tmp_path / "tok")), quiet)
    saved = AutoTokenizer.from_pretrained(tmp_path / "prepared/tokenizer")
    assert saved("a big cab").input_ids == text_encoder(given)("a big cab").tolist()


@pytest.mark.parametrize("auto_map", [{"AutoTokenizer": [None, "own.Own"]}, "own.Own"])
def test_code_of_a_tokenizer_is_refused_by_name_and_never_run(tmp_path, monkeypatch, auto_map):
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    tokenizer = saved(tmp_path / "tok", auto_map=auto_map, tokenizer_class="Own")
    (tmp_path / "tok/own.py").write_text(f"open({str(tmp_path / 'RAN')!r}, 'w')")
    with pytest.raises(UserError, match="tok' cannot be read: .* it has code of its own.*; give"):
        prepare(config_of(tmp_path, ["a", "b"], tokenizer=tokenizer), quiet)
    assert not (tmp_path / "RAN").exists() and not (tmp_path / "prepared").exists()


def test_what_a_tokenizer_lacks_is_said_in_one_line(tmp_path):
    folder = tmp_path / "tok"
    saved(folder)
    for other in ("json", "model", "none"):
        (tmp_path / other).mkdir()
    (folder / "tokenizer.json").rename(tmp_path / "json/tokenizer.json")
    (tmp_path / "model/tokenizer.model").write_bytes(b"of sentencepiece")
    problems = {
        "json/tokenizer.json": "give .* a directory with tokenizer.json and a token",
        "json": "has no EOS token.*: name it in its tokenizer_config.json",
        "model": "needs a package: pip install sentencepiece",
        "tok": "give the name of a hub .* or a directory with tokenizer.json",
        "none": "the directory has no file of a tokenizer; give",
        "nowhere/at/all": "cannot be read: .*; give the name of a hub repo",
    }
    for name, problem in problems.items():
        with pytest.raises(UserError, match=problem) as refused:
            existing_tokenizer(str(tmp_path / name))
        assert "\n" not in str(refused.value)
    (tmp_path / "json/tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    assert existing_tokenizer(str(tmp_path / "json")).eos_token_id == 0


def words_alone(unknown: str | None) -> Tokenizer:
    words = ["</s>", "a", "cat", *filter(None, [unknown])]
    vocabulary = {word: number for number, word in enumerate(words)}
    model = models.WordLevel(vocabulary, **({"unk_token": unknown} if unknown else {}))
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


def changing(normalizer) -> Tokenizer:
    backend = train_tokenizer(made_texts(50), 300).backend_tokenizer
    backend.normalizer = normalizer
    return backend


@pytest.mark.parametrize(
    "backend, said",
    [
        (words_alone("[UNK]"), "loses 77.78% of the characters"),
        (changing(normalizers.Replace("\n", "")), r"loses 11.11% of .* a sample \('\\n'"),
        (changing(normalizers.Lowercase()), r"loses 11.11% of .* a sample \('C'"),
        (changing(normalizers.Sequence([])), None),
    ],
    ids=["unknown", "newline", "case", "nothing"],
)
def test_a_tokenizer_that_loses_text_is_told_and_counted(tmp_path, backend, said):
    texts = ["a\nCat 日本語", "a cat"]
    config = config_of(tmp_path, texts, tokenizer=saved(tmp_path / "tok", backend))
    first, again = [], []
    for lines in (first, again):
        loses = open_data(config, 1, say=lines.append).manifest.tokenizer_loses
    assert first == again == ([loses] if said else [])
    assert said is None or re.search(said, loses)


def test_a_word_that_a_tokenizer_cannot_encode_is_one_line_of_a_worker_too(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "BATCH_CHARACTERS", 10)
    tokenizer = saved(tmp_path / "tok", words_alone(None))
    before = set(tmp_path.rglob("*"))
    for workers in (1, 2):
        config = config_of(tmp_path, ["a cat"] * 99 + ["a dog"], tokenizer=tokenizer)
        config.workers = workers
        with pytest.raises(UserError, match="cannot encode a text .*UNK.*: choose one with a tok"):
            prepare(config, quiet)
        assert not [file for file in set(tmp_path.glob("*")) - before if file.name != "texts"]


def test_bytes_of_tokens_of_a_sentencepiece_model_are_those_of_the_text():
    vocabulary = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abc"]
    ids = {token: number for number, token in enumerate(vocabulary)}
    model = models.BPE(ids, [], unk_token="<unk>", byte_fallback=True)
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    for text in (HARD, " ", "日本"):
        ids = text_encoder(tokenizer)(text)
        assert token_bytes(tokenizer)[ids].sum() == len(text.encode())


@pytest.mark.parametrize("kind", ADDS_A_SPACE)
def test_pieces_of_a_huge_text_come_back_as_the_text(tmp_path, monkeypatch, kind):
    """With no space at the cuts, in the middle of a line or after one, in training and evaluation;
    and as it was for one text.
    """
    tokenizer = existing_tokenizer(save_tokenizer(tmp_path / "tok", kind))
    monkeypatch.setattr(pieces, "__defaults__", (50,))
    lines = "a big cab\n\nhid a  bee\n" * 9
    for text in (lines, "abcdef" * 40, lines + "abc " * 40, HARD * 3):
        back = tokenizer.backend_tokenizer.decode(text_encoder(tokenizer)(text).tolist())
        assert back.removeprefix(" ") == text.removeprefix(" ")
    text = lines + "abc " * 40
    config = config_of(tmp_path, [text, lines], tokenizer=str(tmp_path / "tok"))
    manifest = prepare(config, quiet)
    (back,) = decoded_documents(config.directory, "train")
    assert back.removeprefix(" ") == text
    assert manifest.splits["train"].words == len(text.split())


def test_words_before_which_white_space_is_lost_stay_apart_at_a_cut(tmp_path, monkeypatch):
    """Their tokenizer puts a space before each word: before the first of a piece, too."""
    backend = Tokenizer(models.BPE({piece: number for number, piece in enumerate("▁ab")}, []))
    spaces = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    backend.pre_tokenizer = pre_tokenizers.Sequence(spaces)
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    monkeypatch.setattr(pieces, "__defaults__", (10,))
    text = "ab ab\n" * 5
    assert backend.decode(text_encoder(tokenizer)(text).tolist()).split() == text.split()
