"""Reads YAML as people mean it, and JSON. Errors name the file, the key and the problem."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mixer.common.errors import UserError, first_line

Kind = type | tuple[type, ...]  # of a value in JSON: dict, list, str, int, float, bool, NoneType
NONE = type(None)


def read_json(
    file: Path, remedy: str, required: Mapping[str, Kind] | None = None
) -> dict[str, Any]:
    """The object that a JSON file holds.

    required: keys with the types of their values; a bool is not an int. Raises UserError that ends
    in `remedy`, which says what to do.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        problem = _object_problem(values, required or {})
    except OSError as error:
        raise UserError(f"{file} cannot be read ({first_line(error)}): {remedy}") from None
    except (ValueError, RecursionError) as error:
        problem = first_line(error)
    if problem:
        raise UserError(f"{file} is damaged ({problem}): {remedy}")
    return values


def _object_problem(values: Any, required: Mapping[str, Kind]) -> str:
    """The problem with a file's content; "" if there is none. Raises ValueError for a lone
    surrogate, which no file or file name can hold.
    """
    text = json.dumps(values, ensure_ascii=False)
    text.encode()
    if "\\u0000" in text:
        return "it holds a null character"
    if not isinstance(values, dict):
        return f"it holds {type(values).__name__}, allowed: an object with keys"
    for key, kind in required.items():
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if key not in values:
            return f"{key} missing"
        if type(values[key]) not in kinds:
            allowed = " or ".join("null" if kind is NONE else kind.__name__ for kind in kinds)
            return f"{key} = {repr(values[key])[:60]}, allowed: {allowed}"
    return ""


# The scalars of YAML 1.2's core schema, by tag. PyYAML follows YAML 1.1, where 5e-4 is text, `no`
# is false, 010 is 8 and 1:30 is 90.
CORE = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(0|[1-9][\d_]*)",
    "float": r"[-+]?((\d[\d_]*\.\d*|\.\d+)([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(inf|Inf|INF))"
    r"|\.(nan|NaN|NAN)",
    "merge": "<<",
}


class Loader(yaml.SafeLoader):
    """Reads the core schema of YAML 1.2. A key that is given twice is an error."""

    yaml_implicit_resolvers = {}

    def construct_mapping(self, node, deep=False):
        names: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in names:
                problem = f"the key {key.value!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            names.add(str(key.value))
        return super().construct_mapping(node, deep)

    def construct_document(self, node):
        self.deep_construct = True  # refuses what contains itself, such as &a [*a]
        return super().construct_document(node)


class Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as another type."""


for tag, pattern in CORE.items():
    for kind in (Loader, Dumper):
        kind.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^({pattern})$"), None)


def parse_yaml(text: str) -> Any:
    """The value of a YAML text. Raises yaml.YAMLError for every text that has none."""
    try:
        return yaml.load(text, Loader=Loader)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        # PyYAML lets these through for `!!float x` and the like, and for very deep nesting.
        raise yaml.YAMLError(f"it holds a value that Python cannot read ({error})") from None


def as_yaml(value: Any) -> str:
    """The YAML text of a value, with its keys in their order."""
    return yaml.dump(value, Dumper=Dumper, sort_keys=False, allow_unicode=True)


def read_yaml(path: str | Path) -> dict:
    """The sections of a configuration file. Raises UserError for a file that is missing, not YAML,
    or not a mapping.
    """
    try:
        given = parse_yaml(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = list(Path(path).parent.glob("*.yaml")) or list(Path("configs").glob("*.yaml"))
        names = ", ".join(sorted(map(str, near))) or "none"
        raise UserError(f"no configuration file {path}; there are: {names}") from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path} cannot be read as YAML: {error}") from None
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise UserError(
            f"{path} holds a {type(given).__name__}; it must hold sections with keys, see configs/"
        )
    return given
