"""The tokenizer, existing or trained as a byte-level BPE, and how raw text becomes its tokens."""

import json
import os
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
from transformers.utils.hub import cached_file

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
OF_TOKENIZER = re.compile(r"tok|vocab|\.model$")  # names of files in a directory
GPT2_PATTERN = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
CACHE_BYTES = 50_000_000  # of words and their tokens; those of 30 MB of English take half as much


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
    is_local = Path(name).is_dir()
    try:
        if is_local and not any(map(OF_TOKENIZER.search, os.listdir(name))):
            raise ValueError("the directory has no file of a tokenizer")
        config = get_tokenizer_config(name, local_files_only=is_local)
        if own_code := config.get("auto_map"):
            raise ValueError(f"it has code of its own, {own_code!s:.60}, which is never run")
        file = cached_file(
            name,
            "tokenizer.json",
            _raise_exceptions_for_missing_entries=False,
            local_files_only=is_local,
        )
        # AutoTokenizer would put parts of a class that it knows in place of the file's.
        tokenizer_class = PreTrainedTokenizerFast if file else AutoTokenizer
        tokenizer = tokenizer_class.from_pretrained(
            name, local_files_only=is_local, trust_remote_code=False
        )
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
            known_tokenizer = AutoTokenizer.from_pretrained(
                name, local_files_only=is_local, trust_remote_code=False
            )
            if known_tokenizer.eos_token in tokenizer.get_vocab():
                tokenizer.eos_token = known_tokenizer.eos_token
    return tokenizer


def training_sample(texts: Iterable[str]) -> Iterator[str]:
    """The beginning of the texts in short pieces: enough for any vocabulary, and for any memory."""
    sample_bytes = 0
    distinct_words: set[str] = set()
    distinct_bytes = 0
    for text in texts:
        if sample_bytes >= SAMPLE_BYTES:
            return
        for _, piece in pieces(text, TRAINING_PIECE):
            sample_bytes += len(piece.encode())
            new_words = set(DISTINCT_WORD.findall(piece)) - distinct_words
            distinct_words |= new_words
            # Each word costs about 8 bytes itself.
            distinct_bytes += sum(len(word.encode()) + 8 for word in new_words)
            if distinct_bytes > DISTINCT_BYTES:
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
    the position where it starts.
    """
    start = 0
    while len(text) - start > most:
        end = text.rfind("\n", start, start + most) + 1 or start + most
        yield start, text[start:end]
        start = end
    yield start, text[start:]


def text_encoder(tokenizer: PreTrainedTokenizerFast) -> Callable[..., np.ndarray]:
    """A function from a text to its token ids, (tokens,) uint32: those by which every command
    reads text, for training, evaluation, pairs and prompts alike. Its second argument, `is_later`,
    says that the text is one of the `pieces` of another, and not the first: a tokenizer that puts a
    space before each text puts none there.

    Nothing is truncated, padded or added, no BOS and no EOS: only the preparation of data puts an
    EOS behind each text. Text that spells a special token, such as a literal `<|endoftext|>`, is
    tokenized as the text it is.
    """
    specification = json.loads(tokenizer.backend_tokenizer.to_str())
    without_prefix = specification | {
        step: _without_prefix(specification[step]) for step in ("normalizer", "pre_tokenizer")
    }
    encode_first = encode_later = _encoder(specification)
    if without_prefix != specification:
        encode_later = _encoder(without_prefix)
        decode = tokenizer.backend_tokenizer.decode
        # Of some tokenizers the prefix is what is left of the white space before each word.
        with suppress(UserError):  # it has no such letters
            in_one = encode_first("a b\na b")
            in_two = np.concatenate([encode_first("a b\n"), encode_later("a b")])
            if decode(in_one.tolist()) != decode(in_two.tolist()):
                encode_later = encode_first

    def encode_text(text: str, is_later: bool = False) -> np.ndarray:
        return np.concatenate(
            [
                encode_later(piece) if is_later or start else encode_first(piece)
                for start, piece in pieces(text)
            ]
        )

    return encode_text


def _without_prefix(step: Any) -> Any:
    """A normalizer or pre-tokenizer of a tokenizer.json that puts no space before a text."""
    if isinstance(step, list):
        return [_without_prefix(item) for item in step if item.get("type") != "Prepend"]
    if not isinstance(step, dict) or step.get("type") == "Prepend":
        return None
    changes = {
        "prepend_scheme": "never",
        "add_prefix_space": False,
        "normalizers": _without_prefix(step.get("normalizers")),
        "pretokenizers": _without_prefix(step.get("pretokenizers")),
    }
    return step | {name: value for name, value in changes.items() if name in step}


def _encoder(specification: dict) -> Callable[[str], np.ndarray]:
    """A function from a text to its token ids. The tokens of the words seen so far are cached: on
    one core a BPE like GPT-2's is 1.6 (technical prose) to 5 times (few words) as fast for it.
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
    cache: dict[str, bytes] = {}  # the token ids of words
    cache_bytes = 0

    def encode_words(text: str) -> np.ndarray:
        nonlocal cache_bytes
        words = WORD.findall(text)
        new_words = [word for word in {*words} if word not in cache]
        for word, ids in zip(new_words, encode(new_words), strict=True):
            cache[word] = ids.tobytes()
        tokens = b"".join(map(cache.__getitem__, words))
        cache_bytes += sum(200 + 8 * len(word) for word in new_words)  # about what Python takes
        if cache_bytes > CACHE_BYTES:
            cache.clear()
            cache_bytes = 0
        return np.frombuffer(tokens, np.uint32)

    return encode_words


def _cuts_words_as_gpt2(specification: dict) -> bool:
    """Whether `WORD` holds: a BPE without (random) dropout, of raw text that GPT-2's pattern cuts,
    without added tokens, which may hold white space.
    """
    model = specification["model"]
    pre_tokenizer = specification["pre_tokenizer"] or {}
    return (
        model["type"] == "BPE"
        and model.get("dropout") is None
        and specification["normalizer"] is None
        and GPT2_PATTERN.items() <= pre_tokenizer.items()
        and all(token["special"] for token in specification["added_tokens"])
    )


def fit_to_models(tokenizer: PreTrainedTokenizerFast, context: int) -> None:
    """Sets what is saved with models of a context, for tools that cut texts and make batches."""
    tokenizer.model_max_length = context
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token


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
        self.token_bytes = token_bytes(tokenizer)
        self.eos = -1 if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        self.added = 0.0  # bytes by which the tokens of a text exceed it
        decoded_bytes = 0
        starts = 0
        for tokens in texts:
            for start in range(0, len(tokens), PIECE):
                chunk = tokens[start : start + PIECE].astype(np.int64)
                before = np.insert(chunk[:-1], 0, tokens[start - 1] if start else self.eos)
                decoded_bytes += int(self.token_bytes[chunk].sum())
                starts += self._starts(before, chunk)
        if starts:
            self.added = (decoded_bytes - size) / starts

    def _starts(self, before: np.ndarray, tokens: np.ndarray) -> int:
        """How many of the tokens are the first of a text, from the one `before` each."""
        return int(np.count_nonzero((before == self.eos) & (tokens != self.eos)))

    def count(self, tokens: np.ndarray, before: np.ndarray | None = None) -> float:
        """Of tokens (tokens,), from the one `before` each; by default an EOS is the first one's."""
        if before is None:
            before = np.insert(tokens[:-1].astype(np.int64), 0, self.eos)
        return float(self.token_bytes[tokens].sum() - self.added * self._starts(before, tokens))


def token_bytes(tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """(vocabulary,) int64: the bytes of text (UTF-8) that each id stands for. Special tokens, and
    the one for what is unknown, stand for none.
    """
    backend = tokenizer.backend_tokenizer
    decode = backend.decoder.decode if backend.decoder else " ".join
    added_tokens = backend.get_added_tokens_decoder().values()
    no_text: set[str | None] = {token.content for token in added_tokens if token.special}
    no_text.add(getattr(backend.model, "unk_token", None))
    # Between others: decoders treat the first and the last token in their own ways.
    bytes_around = len(decode(["a", "a"]))
    sizes = np.zeros(vocabulary_size(tokenizer), np.int64)
    for token, token_id in backend.get_vocab().items():
        text = decode(["a", token, "a"])
        if "\ufffd" in text:  # part of a character: <0xE6>, or a symbol for each byte
            sizes[token_id] = 1 if token.startswith("<0x") else len(token)
        elif token not in no_text:
            sizes[token_id] = len(text.encode()) - bytes_around
    return sizes


def lost_text(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]) -> str:
    """What a tokenizer loses of the first texts, in words: the characters that are missing in what
    its tokens decode to. Empty if nothing.
    """
    encode = text_encoder(tokenizer)
    decode = tokenizer.backend_tokenizer.decode
    lost = Counter()
    characters = 0
    for text in texts:
        text = text[: PIECE - characters]
        lost += Counter(text) - Counter(decode(encode(text).tolist()))
        characters += len(text)
        if characters == PIECE:
            break
    if not lost:
        return ""
    share = lost.total() / characters
    most = ", ".join(repr(character) for character, _ in lost.most_common(3))
    return (
        f"the tokenizer loses {share:.2%} of the characters of a sample ({most}...): "
        "bits per byte of the text look too low"
    )
