"""The documents of a corpus: one iterator over them whatever the source, and the split of each.

A document is one `str`. Sources are read as a stream, so memory use does not grow with the corpus.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mixer.common.errors import Say, UserError, say_on_stderr
from mixer.data.config import DataConfig, validation_source
from mixer.data.sources import BETWEEN, Part, part_texts, source_parts, text_hash

SPLITS = ("train", "validation")
MOST_MISSING = 0.1  # share of rows without the text field; with more, that is no field of all rows


def texts_of(document: str, is_pair: bool) -> list[str]:
    """The texts that a document is made of: itself, or query and target."""
    return document.split(BETWEEN, 1) if is_pair else [document]


def documents(
    parts: Iterable[Part], config: DataConfig, blank: bool = False, say: Say = say_on_stderr
) -> Iterator[str]:
    """The documents of the parts, the first `max_documents` of them. An empty text is none, nor is
    white space, except with `blank`. Says at the end how many rows have no text.

    Raises UserError for text that is not UTF-8, too many rows without the text field, and where
    there is no document.
    """
    found, missing = 0, 0
    for text in itertools.chain.from_iterable(map(part_texts, parts)):
        missing += text is None
        if text and (blank or not text.isspace()):
            found += 1
            yield text
            if found == config.max_documents:
                break
    where = config.path or "the standard library"
    if not found:
        raise UserError(f"the corpus is empty: no document with text in {where}")
    names = " or ".join(map(repr, filter(None, (config.text_field, config.pair_field))))
    problem = "are not UTF-8" if config.source == "builtin" else f"have no text in field {names}"
    left_out = f"{missing:,} of {found + missing:,} entries of {where} {problem}"
    if missing > MOST_MISSING * (found + missing):
        raise UserError(
            f"{left_out}; at most {MOST_MISSING:.0%} may be left out. Give a field of all rows as "
            "data.text_field (eval.py: --text-field), or remove the other rows"
        )
    if missing:
        say(f"left out: {left_out}")


# --- splits ------------------------------------------------------------------


@dataclass(frozen=True)
class Corpus:
    """What is prepared: a text of which some documents are held out, or a text for each split."""

    config: DataConfig
    training: list[Part]
    validation: list[Part]  # empty where the validation documents are some of `training`

    @classmethod
    def open(cls, config: DataConfig) -> "Corpus":
        """Finds the files. Raises UserError for a source that cannot be read, a file of both
        splits, and a split without a document, as early as that can be known.
        """
        held_out = validation_source(config)
        validation = source_parts(held_out) if held_out else []
        corpus = cls(config, source_parts(config), validation)
        corpus._refuse_common_files()
        corpus._refuse_an_empty_split()
        return corpus

    def documents(self, say: Say = lambda line: None) -> Iterator[tuple[str, str]]:
        """(split, document) of all documents, in order. Says how many rows have no text.

        Where a share of them is held out, the split follows a hash of the text, so a document keeps
        its split when the corpus grows or is reordered, and exact copies land in the same split.
        Neither split is empty: the first document is for training, and the next that is no copy of
        it for validation.
        """
        if self.validation:
            for text in documents(self.validation, validation_source(self.config), say=say):
                yield "validation", text
        first = other = None
        for number, text in enumerate(documents(self.training, self.config, say=say)):
            if self.validation:
                held_out = False
            elif self.config.validation_documents:
                held_out = number < self.config.validation_documents
            elif first is None or text == first:
                first, held_out = text, False
            elif other is None or text == other:
                other, held_out = text, True
            else:
                held_out = text_hash(text) < self.config.validation_fraction * 2**64
            yield "validation" if held_out else "train", text

    def training_texts(self) -> Iterator[str]:
        """The texts of the documents of the training split, in order."""
        for split, document in self.documents():
            if split == "train":
                yield from texts_of(document, bool(self.config.pair_field))

    def _refuse_an_empty_split(self) -> None:
        found = set()
        for split, _ in self.documents():
            found.add(split)
            if len(found) == 2:
                return
        raise UserError(
            f"the corpus ({self.config.source} {self.config.path}) has documents for "
            f"{found.pop()} alone: each split holds whole documents, and copies stay on one side. "
            "Give more documents (a text file is one), a smaller data.validation_documents, or a "
            "validation text of its own (data.validation_path, for the hub data.validation_split)"
        )

    def _refuse_common_files(self) -> None:
        """By what all links to a file have in common."""
        parts = [(part.file, part.file.stat()) for part in self.training if part.file]
        training = {(status.st_dev, status.st_ino): file for file, status in parts}
        for part in self.validation:
            status = part.file and part.file.stat()
            if status and (file := training.get((status.st_dev, status.st_ino))):
                raise UserError(
                    f"{file} belongs to both data.path and data.validation_path: the model would "
                    "be validated on what it is trained on; move the validation text out of "
                    "data.path, or name the training files alone"
                )
