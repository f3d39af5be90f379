"""Reading YAML as people mean it."""

import re
from pathlib import Path
from typing import Any

import yaml

from mixer.common.errors import UserError


def _means_the_same_in_yaml_1_2(first: str, tag: str) -> bool:
    """Whether YAML 1.2 also reads text that begins with `first` as what PyYAML's `tag` says."""
    is_yes_or_no = tag == "tag:yaml.org,2002:bool" and first not in "tTfF"
    return not is_yes_or_no and tag not in ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:int")


class Loader(yaml.SafeLoader):
    """Reads 5e-4 as a number, and `no` and 2024-02-30 as text, as YAML 1.2 does; PyYAML follows
    YAML 1.1, where they are text, false and a date that does not exist. 010 and 1:30 are text, too,
    where PyYAML finds 8 and 90. A key that is given twice is an error.
    """

    yaml_implicit_resolvers = {
        first: [
            (tag, pattern) for tag, pattern in resolvers if _means_the_same_in_yaml_1_2(first, tag)
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

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


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


class Dumper(yaml.SafeDumper):
    """Quotes text that `Loader`, or a reader of YAML 1.1, would take for something else."""


for first, resolvers in Loader.yaml_implicit_resolvers.items():
    for tag, pattern in resolvers:
        Dumper.add_implicit_resolver(tag, pattern, [first])
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"^[-+]?(0|[1-9][\d_]*|0x[\da-fA-F]+)$"),
    list("-+0123456789"),
)


def parse_yaml(text: str) -> Any:
    """The value that a YAML text stands for. Raises yaml.YAMLError for every text that has none."""
    try:
        return yaml.load(text, Loader=Loader)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        # PyYAML lets these through for `!!float x` and the like, and for very deep nesting.
        raise yaml.YAMLError(f"it holds a value that Python cannot read ({error})") from None


def as_yaml(value: Any) -> str:
    """The YAML text that `parse_yaml` and other readers take for `value`, in its order."""
    return yaml.dump(value, Dumper=Dumper, sort_keys=False, allow_unicode=True)


def read_yaml(path: str | Path) -> dict:
    """The sections of a configuration file and their keys.

    Raises UserError for a file that is missing, not YAML, or not a mapping.
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
