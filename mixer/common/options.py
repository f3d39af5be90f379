# Copied beside every saved model: it imports from this package only files that are copied too.
"""Options of a configuration: dataclass fields with a meaning, a type and allowed values."""

import dataclasses
import operator
import sys
from collections.abc import Collection
from contextlib import suppress
from types import UnionType
from typing import Any, get_args

# Each bound in words, a lower one before an upper one, and its test.
BOUNDS = {
    "at_least": ("{} or more", operator.ge),
    "above": ("above {}", operator.gt),
    "at_most": ("at most {}", operator.le),
    "below": ("below {}", operator.lt),
}
TYPES = {bool: "true or false", int: "a whole number", float: "a finite number"}
TYPES |= {str: "text in quotes", type(None): "null", list: "a list", dict: "keys with values"}


def option(default: Any, help: str, choices: Collection[str] = (), **bounds: float) -> Any:
    """A dataclass field with a default, a help text, and the values that are allowed.

    choices: the allowed strings; empty allows any. bounds: of a number, by their names in BOUNDS;
    `at_least` and `at_most` include their value, `above` and `below` exclude it.
    """
    metadata = {"help": help, "choices": choices, "bounds": bounds}
    return dataclasses.field(default=default, metadata=metadata)


def as_type(value: Any, annotation: Any) -> Any:
    """A value of YAML or JSON, a number in the type of an option: 1e3 is an integer too."""
    types = _types(annotation)
    if type(value) is float and int in types and value.is_integer():
        return int(value)
    if type(value) is int and float in types:
        with suppress(OverflowError):
            return float(value)
    return value


def option_problems(section: Any, prefix: str = "") -> list[str]:
    """One line for each option of a dataclass instance whose value is not allowed.

    A value must have the option's type, a number be finite and within its bounds, a string one of
    the choices. `prefix` is put before the names, such as "optim.". Of fields without an `option`
    only text is checked.
    """
    problems = []
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        name = prefix + field.name
        if isinstance(value, str) and not is_plain_text(value):
            allowed = "text without null characters and lone surrogates"
            problems.append(f"{name} = {value[:50]!r}; allowed: {allowed}")
        elif field.metadata and not _is_allowed(value, field):
            problems.append(f"{name} = {value!r}; allowed: {allowed_values(field)}")
    return problems


def allowed_values(field: dataclasses.Field) -> str:
    """The allowed values of an option in words, such as "a whole number, 0 or more"."""
    if field.metadata["choices"]:
        return ", ".join(field.metadata["choices"])
    bounds = field.metadata["bounds"]
    limits = [words.format(bounds[name]) for name, (words, _) in BOUNDS.items() if name in bounds]
    return type_name(field.type) + (", " if limits else "") + " and ".join(limits)


def type_name(annotation: Any) -> str:
    """An option's type in words, such as "a whole number or null"."""
    types = _types(annotation)
    return " or ".join(TYPES.get(item) or getattr(item, "__name__", str(item)) for item in types)


def is_plain_text(text: str) -> bool:
    """Whether files and their names can hold a text: no null characters, no lone surrogates."""
    try:
        return b"\0" not in text.encode("utf-8")
    except UnicodeEncodeError:
        return False


def _types(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)


def has_type(value: Any, annotation: Any) -> bool:
    """Whether a value has an option's type, such as `int | None`. An integer is a number too, and
    of a sequence any type will do.
    """
    if not isinstance(annotation, type | UnionType):
        return True
    types = _types(annotation)
    return type(value) in types or (type(value) is int and float in types)


def _is_allowed(value: Any, field: dataclasses.Field) -> bool:
    choices = field.metadata["choices"]
    bounds = field.metadata["bounds"]
    if not has_type(value, field.type):
        return False
    if choices or not isinstance(value, (int, float)):
        return not choices or value in choices
    is_finite = abs(value) <= sys.float_info.max  # also of an integer that no float can hold
    return is_finite and all(BOUNDS[name][1](value, bounds[name]) for name in bounds)
