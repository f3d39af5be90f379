"""A JSON file that is not what it should be is one message with file, key and remedy."""

import pytest

from mixer.common.errors import UserError
from mixer.common.parsing import NONE, read_json

WRONG = {
    b'{"size": 1': "is damaged (JSONDecodeError: ",
    b'{"size": 1, "name": "\xff"}': "is damaged (UnicodeDecodeError: ",
    b"[" * 100_000: "is damaged (RecursionError: ",
    b"[1]": "it holds list, allowed: an object with keys",
    b'{"name": "x"}': "size missing",
    b'{"size": true, "name": null}': "size = True, allowed: int",
    b'{"size": 1, "name": 2}': "name = 2, allowed: str or null",
    b'{"size": 1, "name": "x", "other": {"deep": ["\\ud800"]}}': "surrogates not allowed",
    b'{"size": 1, "name": "a\\u0000"}': "it holds a null character",
}


@pytest.mark.parametrize(("content", "problem"), WRONG.items(), ids=range(len(WRONG)))
def test_what_is_wrong_is_named(tmp_path, content, problem):
    file = tmp_path / "notes.json"
    file.write_bytes(content)
    with pytest.raises(UserError) as raised:
        read_json(file, "copy it again", {"size": int, "name": (str, NONE)})
    message = str(raised.value)
    assert message.startswith(f"{file} ") and message.endswith(": copy it again")
    assert problem in message
