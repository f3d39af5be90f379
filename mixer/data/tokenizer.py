"""The tokenizer, existing or trained as a byte-level BPE, and how raw text becomes its tokens."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import cached_file

from mixer.common.errors import UserError, first_line
from mixer.common.files import as_path

END_OF_TEXT = "<|endoftext|>"
# Characters that are tokenized at a time, so that one huge document does not fill the memory.
PIECE = 1 << 20
SAMPLE_BYTES = 100_000_000  # of text, at most, that a BPE is trained on
TRAINING_PIECE = 1 << 12  # the trainer's time is quadratic in the longest run without a break
# The trainer keeps each distinct word, in about 80 times its bytes. 100 MB of source code have 2 MB
# of distinct words, 100 MB of a language without spaces nearly 100.
DISTINCT_BYTES = 16_000_000
DISTINCT_WORD = re.compile(r"[A-Za-z]+|[^\sA-Za-z]+")  # about the trainer's
# Cuts a text into words that a byte-level BPE with GPT-2's pattern tokenizes the same alone as in
# the text: that pattern also ends a token before white space, and between an ASCII letter and
# another ASCII character. \x1c-\x1f are white space to Python, but not to that pattern.
WORD = re.compile(r" ?[A-Za-z]++(?![^\x00-@\[-`{-\x7f])|\s*[\S\x1c-\x1f]+|\s+")
GPT2_PATTERN = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
KEPT_BYTES = 50_000_000  # of words and their tokens; those of 30 MB of English take half as much


def load_tokenizer(directory: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer of the prepared data in `directory` (its tokenizer/ folder)."""
    return read_tokenizer(str(Path(directory) / "tokenizer"))


def existing_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """`read_tokenizer`, of a tokenizer that has an EOS."""
    tokenizer = read_tokenizer(name)
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"tokenizer {name!r} has no EOS token, which ends every document: name it in its "
            'tokenizer_config.json, such as {"eos_token": "</s>"}'
        )
    return tokenizer


def read_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer from a local directory or the hub. Raises UserError if it cannot be had, is not a
    fast one, or has code of its own, which is never run.
    """
    name = str(as_path(name))
    options = {"trust_remote_code": False, "local_files_only": Path(name).is_dir()}
    try:
        if own_code := get_tokenizer_config(name, **options).get("auto_map"):
            raise ValueError(f"it has code of its own, {own_code!s:.60}, which is never run")
        found = cached_file(
            name, "tokenizer.json", _raise_exceptions_for_missing_entries=False, **options
        )
        # AutoTokenizer would put parts of a class that it knows in place of the file's.
        kind = PreTrainedTokenizerFast if found else AutoTokenizer
        tokenizer = kind.from_pretrained(name, **options)
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ValueError("it has no fast version")
    # Transformers, the hub client and the network each raise their own kinds.
    except Exception as error:
        raise UserError(
            f"tokenizer {name!r} cannot be read: {first_line(error)}; give the name of a hub "
            "repository, or a directory with tokenizer.json and a tokenizer_config.json that names "
            "the EOS token. A tokenizer.model alone needs a package: pip install sentencepiece"
        ) from error
    if tokenizer.eos_token is None:
        with suppress(Exception):  # of an old one, such as GPT-2's, transformers knows it
            known = AutoTokenizer.from_pretrained(name, **options).eos_token
            tokenizer.eos_token = known if known in tokenizer.get_vocab() else None
    return tokenizer


def training_sample(texts: Iterable[str]) -> Iterator[str]:
    """The beginning of the texts in short pieces: enough for any vocabulary, and for any memory."""
    read, distinct, size = 0, set(), 0  # size: what the distinct words take
    for text in texts:
        if read >= SAMPLE_BYTES:
            return
        for _, piece in pieces(text, TRAINING_PIECE):
            read += len(piece.encode())
            new = set(DISTINCT_WORD.findall(piece)) - distinct
            distinct |= new
            size += sum(len(word.encode()) + 8 for word in new)  # 8: each costs some itself
            if size > DISTINCT_BYTES:
                return
            yield piece


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most `vocab_size` tokens: any text comes back exactly, and the same
    texts, such as a `training_sample`, give the same BPE.

    There is no normalizer and no prefix space, and all 256 bytes are in the vocabulary, so nothing
    is ever unknown. `<|endoftext|>` is id 0: EOS and padding.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,  # it would eat spaces before punctuation on decoding
    )


def pieces(text: str, most: int = PIECE) -> Iterator[tuple[int, str]]:
    """`text` in pieces of at most `most` characters, cut after a line where there is one, each with
    the place where it starts.
    """
    start = 0
    while len(text) - start > most:
        end = text.rfind("\n", start, start + most) + 1 or start + most
        yield start, text[start:end]
        start = end
    yield start, text[start:]


def text_encoder(tokenizer: PreTrainedTokenizerFast) -> Callable[[str], np.ndarray]:
    """A function from a text to its token ids, (tokens,) uint32: those by which every command
    reads text, for training, evaluation, pairs and prompts alike.

    Nothing is truncated, padded or added, no BOS and no EOS: only the preparation of data puts an
    EOS behind each text. Text that spells a special token, such as a literal `<|endoftext|>`, is
    tokenized as the text it is.
    """
    encode = piece_encoder(tokenizer)

    def encode_text(text: str) -> np.ndarray:
        return np.concatenate([encode(piece, start > 0) for start, piece in pieces(text)])

    return encode_text


def piece_encoder(tokenizer: PreTrainedTokenizerFast) -> Callable[[str, bool], np.ndarray]:
    """`text_encoder` for one of a text's `pieces`. The second argument says that others are before
    it: a tokenizer that puts a space before each text puts none there.
    """
    specification = json.loads(tokenizer.backend_tokenizer.to_str())
    steps = ("normalizer", "pre_tokenizer")
    changed = specification | {step: _without_prefix(specification[step]) for step in steps}
    first = later = _encoder(specification)
    if changed != specification:
        later, decode = _encoder(changed), tokenizer.backend_tokenizer.decode
        # Of some tokenizers the prefix is what is left of the white space before each word.
        with suppress(UserError):  # it has no such letters
            whole, parts = first("a b\na b"), (first("a b\n"), later("a b"))
            if decode(whole.tolist()) != decode(np.concatenate(parts).tolist()):
                later = first
    return lambda text, is_later: (later if is_later else first)(text)


def _without_prefix(step: Any) -> Any:
    """A normalizer or pre-tokenizer of a tokenizer.json that puts no space before a text."""
    if isinstance(step, list):
        return [_without_prefix(each) for each in step if each.get("type") != "Prepend"]
    if not isinstance(step, dict) or step.get("type") == "Prepend":
        return None
    own = {"prepend_scheme": "never", "add_prefix_space": False}
    own |= {name: _without_prefix(step.get(name)) for name in ("normalizers", "pretokenizers")}
    return step | {name: own[name] for name in own if name in step}


def _encoder(specification: dict) -> Callable[[str], np.ndarray]:
    """A function from a text to its token ids. The tokens of the words seen so far are kept: on one
    core a BPE like GPT-2's is 1.6 (technical prose) to 5 times (few words) as fast for it.
    """
    backend = Tokenizer.from_str(json.dumps(specification))
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True

    def encode(texts: list[str]) -> list[np.ndarray]:
        try:
            encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # tokenizers raises no other kind
            raise UserError(
                f"the tokenizer cannot encode a text ({first_line(error)}): choose one with a "
                "token for unknown text, or with all bytes"
            ) from None
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    if not _cuts_words_as_gpt2(specification):
        return lambda text: encode([text])[0]
    kept: dict[str, bytes] = {}
    size = 0

    def encode_words(text: str) -> np.ndarray:
        nonlocal size
        words = WORD.findall(text)
        new = [word for word in {*words} if word not in kept]
        kept.update(zip(new, (ids.tobytes() for ids in encode(new)), strict=True))
        tokens = b"".join(map(kept.__getitem__, words))
        size += sum(200 + 8 * len(word) for word in new)  # about what Python takes for them
        if size > KEPT_BYTES:
            kept.clear()
            size = 0
        return np.frombuffer(tokens, np.uint32)

    return encode_words


def _cuts_words_as_gpt2(specification: dict) -> bool:
    """Whether `WORD` holds: a BPE without (random) dropout, of raw text that GPT-2's pattern cuts,
    without added tokens, which may hold white space.
    """
    model, cut = specification["model"], specification["pre_tokenizer"] or {}
    return (
        (model["type"], model.get("dropout"), specification["normalizer"]) == ("BPE", None, None)
        and GPT2_PATTERN.items() <= cut.items()
        and all(token["special"] for token in specification["added_tokens"])
    )


def vocabulary_size(tokenizer: PreTrainedTokenizerFast) -> int:
    """One more than the largest id: what an embedding needs (a vocabulary's ids may have holes)."""
    return max(tokenizer.get_vocab().values()) + 1


class TextBytes:
    """Counts the bytes (UTF-8) of the text that tokens stand for.

    A tokenizer may add to texts, such as a space before each, or lose parts of them. The difference
    in the texts whose `size` is known counts with the first token of a text, as a mean: so the
    bytes of all their tokens are those of the texts.

    Args:
        texts: the tokens of each, or of several with an EOS after each.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, texts: Iterable[np.ndarray] = (), size: int = 0
    ):
        self.sizes, self.added = token_bytes(tokenizer), 0.0
        self.eos = -1 if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        found, starts = 0, 0
        for tokens in texts:
            for start in range(0, len(tokens), PIECE):
                part = tokens[start : start + PIECE].astype(np.int64)
                before = np.insert(part[:-1], 0, tokens[start - 1] if start else self.eos)
                found += int(self.sizes[part].sum())
                starts += self._starts(before, part)
        if starts:
            self.added = (found - size) / starts

    def _starts(self, before: np.ndarray, tokens: np.ndarray) -> int:
        return np.count_nonzero((before == self.eos) & (tokens != self.eos))

    def count(self, tokens: np.ndarray, before: np.ndarray | None = None) -> float:
        """Of tokens (tokens,), from the one `before` each; by default an EOS is the first one's."""
        if before is None:
            before = np.insert(tokens[:-1].astype(np.int64), 0, self.eos)
        return float(self.sizes[tokens].sum() - self.added * self._starts(before, tokens))


def token_bytes(tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """(vocabulary,) int64: the bytes of text (UTF-8) that each id stands for. Special tokens, and
    the one for what is unknown, stand for none.
    """
    backend = tokenizer.backend_tokenizer
    decode = backend.decoder.decode if backend.decoder else " ".join
    special = backend.get_added_tokens_decoder().values()
    no_text = {token.content for token in special if token.special}
    no_text.add(getattr(backend.model, "unk_token", None))
    # Between others: decoders treat the first and the last token in their own ways.
    around, sizes = len(decode(["a", "a"])), np.zeros(vocabulary_size(tokenizer), np.int64)
    for token, number in backend.get_vocab().items():
        text = decode(["a", token, "a"])
        if "\ufffd" in text:  # part of a character: <0xE6>, or a symbol for each byte
            sizes[number] = 1 if token.startswith("<0x") else len(token)
        elif token not in no_text:
            sizes[number] = len(text.encode()) - around
    return sizes


def loss_of_text(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]) -> str:
    """What a tokenizer loses of the first texts, in words: the characters that are missing in what
    its tokens decode to. Empty if nothing.
    """
    encode, decode = text_encoder(tokenizer), tokenizer.backend_tokenizer.decode
    lost, read = Counter(), 0
    for text in texts:
        text = text[: PIECE - read]
        lost += Counter(text) - Counter(decode(encode(text).tolist()))
        read += len(text)
        if read == PIECE:
            break
    if not lost:
        return ""
    most = ", ".join(repr(character) for character, _ in lost.most_common(3))
    return (
        f"the tokenizer loses {lost.total() / read:.2%} of the characters of a sample ({most}...): "
        "bits per byte of the text look too low"
    )
