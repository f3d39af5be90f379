"""Text from the bytes of a file: UTF-8, or a message about what it is in place of that."""

import codecs
from contextlib import suppress
from pathlib import Path

from mixer.common.errors import UserError

MOST_CONTROLS = 0.02  # share of a text's bytes; of compressed data it is a tenth
CONTROLS = bytes({*range(32), 127} - set(b"\t\n\v\f\r\b\x1b"))
# With the mark that text may begin with; UTF-32 first, whose mark begins with UTF-16's.
OTHER_UNICODE = {
    "UTF-32LE": codecs.BOM_UTF32_LE,
    "UTF-32BE": codecs.BOM_UTF32_BE,
    "UTF-16LE": codecs.BOM_UTF16_LE,
    "UTF-16BE": codecs.BOM_UTF16_BE,
}
FIRST_BYTES = 1 << 16  # of a file, which show its encoding
LEAST_PRINTED = 0.95  # share of the characters of text in the right encoding


def decoded(data: bytes, file: Path) -> str | None:
    """The text of a file; None for other content, such as a picture's. Raises UserError for text
    in another encoding, which is worth converting.
    """
    controls = len(data) - len(data.translate(None, CONTROLS))
    has_many_controls = controls > MOST_CONTROLS * len(data)
    problem = ""
    try:
        text = data.decode("utf-8-sig")  # a byte order mark is no part of the text
        if not has_many_controls:
            return text
    except UnicodeDecodeError as error:
        problem = f"{file} is not UTF-8 text ({error}): remove it, or convert it with iconv"
    if encoding := _other_unicode(data[:FIRST_BYTES]):
        remedy = f"remove it, or convert it: iconv -f {encoding} -t UTF-8"
        raise UserError(f"{file} is not UTF-8 text, but {encoding}: {remedy}")
    if has_many_controls or b"\0" in data:
        return None
    raise UserError(problem)


def _other_unicode(data: bytes) -> str:
    """The encoding of text in UTF-16 or UTF-32, "" of other data. Without a mark nearly all of such
    text can be printed, and it has null bytes, of spaces and line ends; other text has none.
    """
    ascii_counts = {"": 0}  # few in the other order of bytes
    for encoding, mark in OTHER_UNICODE.items():
        with suppress(UnicodeDecodeError):
            text = codecs.getincrementaldecoder(encoding)().decode(data)
            if data.startswith(mark):
                return encoding
            printed = sum(character.isprintable() or character.isspace() for character in text)
            if b"\0" in data and printed >= LEAST_PRINTED * len(text):
                ascii_counts[encoding] = sum(map(str.isascii, text))
    return max(ascii_counts, key=ascii_counts.__getitem__)
