"""Checks of pictures that were written."""

from pathlib import Path


def assert_png(path) -> None:
    """The file is a whole PNG: it has the format's first and last bytes."""
    content = Path(path).read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n" and content[-8:-4] == b"IEND"
