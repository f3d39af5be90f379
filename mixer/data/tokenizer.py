"""The tokenizer: trains a byte-level BPE on a corpus or loads an existing one, and encodes raw text
with it.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mixer.common.errors import UserError

# transformers is imported where it is used: workers need none of it, and it takes seconds.
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
# Characters. Longer documents are tokenised piece by piece, so that one huge file does not fill the
# memory.
PIECE = 1 << 20
# The trainer takes time quadratic in the longest run without a break (a line of base64, say), so it
# gets shorter ones.
TRAINING_PIECE = 1 << 12
# Cuts a text into words that a byte-level BPE with GPT-2's pattern tokenises the same alone as in
# the text: that pattern also ends a token before white space, and between an ASCII letter and
# another ASCII character. \x1c-\x1f are white space to Python, but not to that pattern.
WORD = re.compile(r" ?[A-Za-z]++(?![^\x00-@\[-`{-\x7f])|\s*[\S\x1c-\x1f]+|\s+")
WORDS_KEPT = 1 << 18  # about 50 MB; English prose has half as many in 30 MB


def load_tokenizer(directory: str | Path) -> "PreTrainedTokenizerFast":
    """The tokenizer of the prepared data in `directory` (its tokenizer/ folder)."""
    folder = Path(directory) / "tokenizer"
    if not (folder / "tokenizer.json").is_file():
        raise UserError(
            f"{directory} holds no tokenizer/tokenizer.json; give a directory of prepared data "
            "(data.directory)"
        )
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


def existing_tokenizer(name: str) -> "PreTrainedTokenizerFast":
    """A tokenizer from a local directory or the hub. Raises UserError if it cannot be had, is not a
    fast one, or has no EOS.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    # Transformers, the hub client and the network each raise their own kinds.
    except Exception as error:
        raise UserError(
            f"cannot load tokenizer {name!r}: {type(error).__name__}: {error}. "
            "give a directory with a tokenizer.json or the name of a hub repository "
            "(data.tokenizer=train makes a new one)"
        ) from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise UserError(
            f"tokenizer {name!r} has no fast version (tokenizer.json); choose one that has, or "
            "data.tokenizer: train"
        )
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"tokenizer {name!r} has no EOS token, which ends every document; choose one that has"
        )
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> "PreTrainedTokenizerFast":
    """A byte-level BPE of at most `vocab_size` tokens: any text comes back exactly, and the same
    texts give the same BPE.

    There is no normaliser and no prefix space, and all 256 bytes are in the vocabulary, so nothing
    is ever unknown. `<|endoftext|>` is id 0: EOS and padding.
    """
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        (piece for text in texts for piece in pieces(text, TRAINING_PIECE)), trainer
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        # the clean-up would eat spaces before punctuation on decoding
        clean_up_tokenization_spaces=False,
    )


def raw_encoder(tokenizer: "PreTrainedTokenizerFast") -> Callable[[list[str]], list[list[int]]]:
    """A function from texts to their token ids: nothing added, truncated or padded, on all cores.

    Text that spells a special token, such as a literal `<|endoftext|>`, is tokenised as the text it
    is: only the preparation itself puts a separator between documents.
    """
    backend = _raw_backend(tokenizer.backend_tokenizer.to_str())
    return lambda texts: [
        encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)
    ]


def token_encoder(specification: str, dtype: np.dtype) -> Callable[[str], bytes]:
    """A function from a text to the bytes of its token ids, the same ids that `raw_encoder` gives.

    specification: the content of a tokenizer.json. Made for one process among several: it uses no
    threads. A byte-level BPE with GPT-2's pattern is 3 to 5 times as fast as with `raw_encoder`
    (on one core), since the tokens of the words seen so far are kept.
    """
    backend = _raw_backend(specification)

    def encode(text: str) -> bytes:
        ids = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return np.array(ids, dtype).tobytes()

    if not _cuts_words_as_gpt2(json.loads(specification)):
        return encode
    words = _Words(encode)
    return lambda text: b"".join(map(words.__getitem__, WORD.findall(text)))


class _Words(dict):
    """The encoded form of each word, computed at its first use."""

    def __init__(self, encode: Callable[[str], bytes]):
        super().__init__()
        self.encode = encode

    def __missing__(self, word: str) -> bytes:
        if len(self) >= WORDS_KEPT:
            self.clear()
        self[word] = tokens = self.encode(word)
        return tokens


def _raw_backend(specification: str) -> Tokenizer:
    backend = Tokenizer.from_str(specification)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return backend


def _cuts_words_as_gpt2(specification: dict) -> bool:
    """Whether `WORD` holds: a BPE without dropout, which is random, on the raw text cut by GPT-2's
    pattern, without added tokens, which may hold white space.
    """
    cut = specification["pre_tokenizer"] or {}
    return (
        specification["normalizer"] is None
        and cut.get("type") == "ByteLevel"
        and not cut["add_prefix_space"]
        and cut.get("use_regex", True)
        and specification["model"]["type"] == "BPE"
        and not specification["model"].get("dropout")
        and all(token["special"] for token in specification["added_tokens"])
    )


def vocabulary_size(tokenizer: "PreTrainedTokenizerFast") -> int:
    """One more than the largest id: what a model's embedding needs (ids of a vocabulary may have
    holes).
    """
    return max(tokenizer.get_vocab().values()) + 1


def pieces(text: str, most: int = PIECE) -> Iterator[str]:
    """`text` cut into pieces of at most `most` characters, after a line's end where there is one;
    mostly just `text` itself.
    """
    start = 0
    while len(text) - start > most:
        end = text.rfind("\n", start, start + most) + 1 or start + most
        yield text[start:end]
        start = end
    yield text[start:]
