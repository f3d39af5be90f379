"""The tokenizer: trains a byte-level BPE on a corpus or loads an existing one, and encodes raw text
with it.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mixer.common.errors import UserError

END_OF_TEXT = "<|endoftext|>"
# Characters. Longer documents are tokenised piece by piece, so that one huge file does not fill the
# memory.
PIECE = 1 << 20
# The trainer takes time quadratic in the longest run without a break (a line of base64, say), so it
# gets shorter ones.
TRAINING_PIECE = 1 << 12


def load_tokenizer(directory: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer of the prepared data in `directory` (its tokenizer/ folder)."""
    folder = Path(directory) / "tokenizer"
    if not (folder / "tokenizer.json").is_file():
        raise UserError(
            f"{directory} holds no tokenizer/tokenizer.json; give a directory of prepared data "
            "(data.directory)"
        )
    return AutoTokenizer.from_pretrained(str(folder))


def existing_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer from a local directory or the hub. Raises UserError if it cannot be had, is not a
    fast one, or has no EOS.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (
        Exception
    ) as error:  # transformers, the hub client and the network each raise their own kinds
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


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, show_progress: bool = False
) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most `vocab_size` tokens: any text comes back exactly, and the same
    texts give the same BPE.

    There is no normaliser and no prefix space, and all 256 bytes are in the vocabulary, so nothing
    is ever unknown. `<|endoftext|>` is id 0: EOS and padding.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=show_progress,
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


def raw_encoder(tokenizer: PreTrainedTokenizerFast) -> Callable[[list[str]], list[list[int]]]:
    """A function from texts to their token ids: nothing added, truncated or padded, on all cores.

    Text that spells a special token, such as a literal `<|endoftext|>`, is tokenised as the text it
    is: only the preparation itself puts a separator between documents.
    """
    # A copy, so that the settings below stay here.
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return lambda texts: [
        encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)
    ]


def vocabulary_size(tokenizer: PreTrainedTokenizerFast) -> int:
    """One more than the largest id: what a model's embedding needs (ids of a vocabulary may have
    holes).
    """
    return max(tokenizer.get_vocab().values()) + 1


def digest(folder: str | Path) -> str:
    """sha256 of the tokenizer.json in `folder`."""
    return hashlib.sha256((Path(folder) / "tokenizer.json").read_bytes()).hexdigest()


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
