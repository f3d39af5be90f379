"""The manifest of a directory of prepared data: what it holds, and checks that it is whole.

Such a directory holds, for each split (train, validation),

    train.bin         token ids, uint16 (uint32 above 65536 tokens), each document followed by EOS
    train.docs.bin    where each document ends in train.bin (uint64, exclusive, EOS included)

and for both

    tokenizer/        what AutoTokenizer.from_pretrained reads
    manifest.json     settings, counts and hashes
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from mixer.common.errors import UserError
from mixer.common.files import has_sha256, sha256
from mixer.common.parsing import read_json
from mixer.common.ranks import Say, say_on_stderr

SPLITS = ("train", "validation")


@dataclass(frozen=True)
class SplitManifest:
    """Counts of one split. `bytes` (UTF-8) and `words` (split at white space) are of the text;
    `tokens` counts EOS.
    """

    documents: int
    bytes: int
    words: int
    tokens: int
    tokens_sha256: str
    documents_sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a prepared directory holds. `fingerprint` is one hash over all else here, and with it
    over the hashes of all files.
    """

    dtype: str
    vocab_size: int
    eos_token_id: int
    tokenizer_sha256: str
    settings: dict
    splits: dict[str, SplitManifest]
    fingerprint: str
    tokenizer_files: dict[str, str] = field(default_factory=dict)  # SHA-256 of each by its name
    tokenizer_loses: str = ""  # of a sample of the text, in words; see tokenizer.loss_of_text

    @classmethod
    def load(cls, directory: str | Path) -> "Manifest":
        """Read `directory`/manifest.json. Raises UserError if it is missing, damaged, or of another
        format.
        """
        file = Path(directory) / "manifest.json"
        if not file.is_file():
            raise UserError(
                f"{directory} holds no prepared data (no manifest.json); prepare it first, or "
                "correct data.directory"
            )
        again = f"copy it again, or delete {directory} and prepare again"
        values = read_json(file, again, required={"fingerprint": str})
        if values["fingerprint"] != fingerprint(values):
            raise UserError(
                f"{file} is not what preparing wrote (its fingerprint differs): {again}"
            )
        splits = {name: _known(SplitManifest, counts) for name, counts in values["splits"].items()}
        return _known(cls, values | {"splits": splits})

    def verify(
        self, directory: str | Path, splits: Iterable[str] = (), say: Say = say_on_stderr
    ) -> None:
        """Raise UserError unless the files of the tokenizer and of the splits have their recorded
        SHA-256, which is compared once on each machine. `say` is told how far it is.
        """
        directory, found = Path(directory), tokenizer_files(Path(directory))
        recorded = self.tokenizer_files or {"tokenizer.json": self.tokenizer_sha256}
        # A file that was added may change what the tokenizer does.
        names = recorded.keys() | (found.keys() if self.tokenizer_files else ())
        wrong = [f"tokenizer/{name}" for name in names if found.get(name) != recorded.get(name)]
        for split in splits:
            counts = self.splits[split]
            hashes = {"bin": counts.tokens_sha256, "docs.bin": counts.documents_sha256}
            for kind, value in hashes.items():
                file = directory / f"{split}.{kind}"
                if not (file.is_file() and has_sha256(file, value, say)):
                    wrong.append(file.name)
        if wrong:
            raise UserError(
                f"{directory / wrong[0]} is not what preparing wrote (its SHA-256 differs); put "
                f"that back, or delete {directory} and prepare again"
            )


def _known(kind: type, values: dict) -> Any:
    """An instance of a dataclass; earlier versions wrote more values than it has."""
    return kind(**{item.name: values[item.name] for item in fields(kind) if item.name in values})


def tokenizer_files(directory: Path) -> dict[str, str]:
    """The SHA-256 of each file that a tokenizer may be read from, by its name."""
    return {file.name: sha256(file) for file in sorted((directory / "tokenizer").glob("*.json"))}


def fingerprint(values: dict) -> str:
    """The hash over a manifest's values, as they are in manifest.json or with SplitManifest."""
    known = {name: values[name] for name in values if name not in ("format", "fingerprint")}
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=asdict).encode()).hexdigest()
