"""Reads JSON files, ours and others', and names the file, the key and the problem where one is
wrong.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mixer.common.errors import UserError, first_line

# The type that a value must have, or several of them: dict, list, str, int, float, bool, NoneType.
Kind = type | tuple[type, ...]
NONE = type(None)


def read_json(
    file: Path, remedy: str, required: Mapping[str, Kind] | None = None
) -> dict[str, Any]:
    """The object that a JSON file holds.

    required: the types of its keys' values; other keys are not checked. A bool is no int. Raises
    UserError that ends in `remedy`, which says what to do.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        _require_plain_text(values)
        problem = object_problem(values, required or {})
    except OSError as error:
        raise UserError(f"{file} cannot be read ({first_line(error)}): {remedy}") from None
    except (ValueError, RecursionError) as error:
        problem = first_line(error)
    if problem:
        raise UserError(f"{file} is damaged ({problem}): {remedy}")
    return values


def object_problem(values: Any, required: Mapping[str, Kind]) -> str | None:
    """What is wrong with an object from a JSON file, see `read_json`; None if nothing is."""
    if not isinstance(values, dict):
        return f"it holds {type(values).__name__}, allowed: an object with keys"
    if missing := [key for key in required if key not in values]:
        return f"{', '.join(missing)} missing"
    for key, kind in required.items():
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if type(values[key]) not in kinds:
            allowed = " or ".join("null" if kind is NONE else kind.__name__ for kind in kinds)
            return f"{key} = {repr(values[key])[:60]}, allowed: {allowed}"
    return None


def _require_plain_text(values: Any) -> None:
    """Raises ValueError for text that no file or file name can hold."""
    text = json.dumps(values, ensure_ascii=False)
    if "\\u0000" in text:
        raise ValueError("it holds a null character")
    text.encode()  # raises for a lone surrogate
