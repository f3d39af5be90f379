"""Files are compared with their recorded SHA-256, and read once for as long as they stay as they
are.
"""

import hashlib
import os
from pathlib import Path

import pytest

from mixer.common import checksums
from mixer.common.checksums import has_sha256, sha256

CONTENT = b"a" * 1000
GOOD = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("MIXER_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def read(monkeypatch) -> list[Path]:
    """The files that were read, in order."""
    files = []

    def counted(path, *arguments):
        files.append(path)
        return sha256(path, *arguments)

    monkeypatch.setattr(checksums, "sha256", counted)
    return files


def test_a_file_is_read_once_until_it_changes(file, read, monkeypatch):
    said = []
    monkeypatch.setattr(checksums, "LARGE", 10)
    assert all(has_sha256(file, GOOD, said.append) for _ in range(3)) and len(read) == 1
    assert len(said) == 1 and f"comparing {file}" in said[0]
    assert not has_sha256(file, "0" * 64) and not has_sha256(file, "0" * 64) and len(read) == 3
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    file.write_bytes(CONTENT[:-1] + b"b")
    os.utime(file, ns=times)  # as a copy that keeps times would
    assert not has_sha256(file, GOOD)
    file.write_bytes(CONTENT)
    assert has_sha256(file, GOOD)


def test_without_a_cache_each_reads(file, read, monkeypatch):
    (file.parent / "cache").write_text("a file where the directory should be")
    assert has_sha256(file, GOOD) and has_sha256(file, GOOD) and len(read) == 2
    for variable in ("MIXER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert has_sha256(file, GOOD) and len(read) == 3


def no_home() -> Path:
    raise RuntimeError("no home")
