"""Texts that the tests of the data part make, prepare and read back."""

import bz2
import gzip
import lzma
import random
from pathlib import Path

import numpy as np
import pyarrow
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from mixer.data.config import DataConfig, Manifest
from mixer.data.sources import documents, source_shards
from mixer.data.tokenizer import load_tokenizer, train_tokenizer

HARD = "tabs\t and  spaces \r\n\nnaïve 日本語 🙂 don't , . ! <|endoftext|> \x00\ufeff end \n"


def zstd(data: bytes) -> bytes:
    """In two frames, as parallel compressors write them."""
    codec = pyarrow.Codec("zstd")
    return codec.compress(data[:10], asbytes=True) + codec.compress(data[10:], asbytes=True)


COMPRESSIONS = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}


def made_texts(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghij é", k=draw.randint(2, 8))) for _ in range(500)]
    texts = (" ".join(draw.choices(words, k=draw.randint(20, 200))) for _ in range(count))
    return [f"document {number}: {text}" for number, text in enumerate(texts)]


def corpus(folder: Path, texts: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:05d}.txt").write_bytes(text.encode())
    return folder


def config_of(tmp_path: Path, texts: list[str] | None = None, **changes) -> DataConfig:
    settings = {"source": "text", "vocab_size": 300, "validation_fraction": 0.1}
    settings |= {"directory": str(tmp_path / "prepared")}
    if texts is not None:
        settings["path"] = str(corpus(tmp_path / "texts", texts))
    return DataConfig(**(settings | changes))


def quiet(*_):
    pass


def decoded_documents(directory, split: str) -> list[str]:
    """The documents back from the token file alone, cut at EOS."""
    manifest = Manifest.load(directory)
    tokenizer = load_tokenizer(directory)
    tokens = np.fromfile(Path(directory) / f"{split}.bin", manifest.dtype)
    ends = np.flatnonzero(tokens == manifest.eos_token_id)
    assert ends[-1] == len(tokens) - 1
    spans = zip([0, *(ends[:-1] + 1)], ends, strict=True)
    return [tokenizer.decode(tokens[start:end].tolist()) for start, end in spans]


def documents_of(config: DataConfig) -> list[str]:
    """All documents of a source."""
    return list(documents(source_shards(config), config))


def save_tokenizer(folder: Path, variant: str) -> str:
    """The folder of a tokenizer such as others have: it adds to texts, or its EOS is in them."""
    if variant in ("Llama 2", "Metaspace"):
        eos = "</s>"
        backend = sentencepiece_backend()
    else:
        eos = "<|endoftext|>"
        backend = train_tokenizer(made_texts(50), 300).backend_tokenizer
    if variant == "Llama 2":
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        backend.normalizer = normalizers.Sequence(steps)
    elif variant == "Metaspace":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    elif variant == "RoBERTa":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif variant == "appends EOS":
        backend.post_processor = processors.TemplateProcessing(
            single=f"{eos} $A {eos}", special_tokens=[(eos, 0)]
        )
    elif variant == "EOS is a line's end":
        eos = "Ċ"
    elif variant == "EOS is no special token":
        backend.add_tokens([AddedToken("<end>", special=False)])
        eos = "<end>"
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos).save_pretrained(str(folder))
    return str(folder)


def sentencepiece_backend() -> Tokenizer:
    """Bytes and a few letters, decoded as SentencePiece does: ▁ is a space."""
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["<unk>", "</s>", *byte_pieces, *"▁abcdefghij012345678"]
    ids = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(ids, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend


ADDS_A_SPACE = ("Llama 2", "Metaspace", "RoBERTa")
EOS_IN_TEXTS = ("EOS is a line's end", "EOS is no special token")
