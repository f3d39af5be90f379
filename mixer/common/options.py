"""Options of a configuration: each is a dataclass field with its meaning and its allowed values."""

import dataclasses
import difflib
import math
import operator
from collections.abc import Collection, Mapping
from typing import Any

# The bounds in words, in the order in which a lower and an upper one are named, and their meaning.
BOUNDS = {
    "at_least": ("{} or more", operator.ge),
    "above": ("above {}", operator.gt),
    "at_most": ("at most {}", operator.le),
    "below": ("below {}", operator.lt),
}


def option(
    default: Any,
    help: str,
    choices: Collection[str] = (),
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """A dataclass field with a default, a help text, and the values that are allowed.

    choices: the allowed strings; empty allows any. The bounds are for numbers: `at_least` and
    `at_most` include their value, `above` and `below` exclude it.
    """
    bounds = {"at_least": at_least, "at_most": at_most, "above": above, "below": below}
    bounds = {name: bound for name, bound in bounds.items() if bound is not None}
    metadata = {"help": help, "choices": choices, "bounds": bounds}
    return dataclasses.field(default=default, metadata=metadata)


def option_problems(section: Any, prefix: str = "") -> list[str]:
    """One line for each option of a dataclass instance whose value is not allowed.

    A number must be finite and within its bounds, a string one of the choices. `prefix` is put
    before the names, such as "optim.". Fields without an `option` are not checked for those.
    """
    problems = []
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if isinstance(value, str) and not is_plain_text(value):
            allowed = "text without null characters and lone surrogates"
            problems.append(f"{prefix}{field.name} = {value[:50]!r}; allowed: {allowed}")
        elif not _is_allowed(value, field.metadata):
            near = difflib.get_close_matches(str(value), field.metadata["choices"], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            allowed = allowed_values(field)
            problems.append(f"{prefix}{field.name} = {value!r}; allowed: {allowed}{hint}")
    return problems


def allowed_values(field: dataclasses.Field) -> str:
    """The allowed values of an option in words, such as "0 or more"; empty where any will do."""
    if field.metadata.get("choices"):
        return ", ".join(field.metadata["choices"])
    bounds = field.metadata.get("bounds", {})
    parts = [words.format(bounds[name]) for name, (words, _) in BOUNDS.items() if name in bounds]
    unbounded = "any finite number" if field.type is float and "bounds" in field.metadata else ""
    return " and ".join(parts) or unbounded


def is_plain_text(text: str) -> bool:
    """Whether files and their names can hold a text: no null characters, no lone surrogates."""
    try:
        return b"\0" not in text.encode("utf-8")
    except UnicodeEncodeError:
        return False


def _is_allowed(value: Any, metadata: Mapping[str, Any]) -> bool:
    if "bounds" not in metadata:
        return True
    if metadata["choices"]:
        return value in metadata["choices"]
    if not isinstance(value, (int, float)):
        return True
    bounds = metadata["bounds"].items()
    return math.isfinite(value) and all(BOUNDS[name][1](value, bound) for name, bound in bounds)
