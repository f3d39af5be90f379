"""YAML files, and the shapes of the values in YAML and JSON."""

import math
import re
from pathlib import Path
from typing import Any, TextIO

import yaml

from mixer.common.errors import UserError
from mixer.common.options import has_type, type_name

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
    for reader_or_writer in (Loader, Dumper):
        reader_or_writer.add_implicit_resolver(
            f"tag:yaml.org,2002:{tag}", re.compile(f"^({pattern})$"), None
        )


def parse_yaml(text: str | TextIO) -> Any:
    """The value of a YAML text or file. Raises yaml.YAMLError for every text that has none."""
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
        with open(path, encoding="utf-8") as file:  # errors name it
            values = parse_yaml(file)
    except (FileNotFoundError, IsADirectoryError):
        path = Path(path)
        folder = path if path.is_dir() else path.parent
        files = [*folder.glob("[!.]*.yaml")] or [*Path("configs").glob("*.yaml")]
        names = ", ".join(sorted(map(str, files))) or "none"
        problem = f"{path} is a folder" if path.is_dir() else f"no configuration file {path}"
        raise UserError(f"{problem}; there are: {names}") from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path} cannot be read as YAML: {error}") from None
    if values is None:  # a file of comments
        return {}
    if not isinstance(values, dict):
        raise UserError(
            f"{path} holds {values!r:.60}; allowed: keys with values, as in the files of configs/"
        )
    return values


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def shape_problem(value: Any, shape: Any, name: str) -> str:
    """The first value that a YAML or JSON file has in the wrong shape; "" if there is none.

    shape: a type, or a union of types; [shape]: a list of such values; {str: shape}: such values by
    any names; {"key": shape, ...}: these keys alone, or some of them. A number must be finite.
    name: of the value, for people.
    """
    container = type(shape) if isinstance(shape, (list, dict)) else shape
    if container is not object and not (has_type(value, container) and _is_finite(value)):
        return f"{name} = {value!r:.60}; allowed: {type_name(container)}"
    if isinstance(shape, list):
        for index, item in enumerate(value):
            if problem := shape_problem(item, shape[0], f"{name}[{index}]"):
                return problem
    elif isinstance(shape, dict):
        key_type = next((key for key in shape if not isinstance(key, str)), None)
        for key in value:
            if key not in shape and not (key_type and has_type(key, key_type)):
                allowed = type_name(key_type) if key_type else ", ".join(shape)
                return f"{name} has the key {key!r:.60}; allowed: {allowed}"
        for key, item in value.items():
            item_shape = shape.get(key, shape.get(key_type))
            if problem := shape_problem(item, item_shape, f"{name}.{key}"):
                return problem
    return ""
