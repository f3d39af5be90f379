"""Reading YAML as people mean it."""

import re
from pathlib import Path

import yaml

from mixer.common.errors import UserError


class Loader(yaml.SafeLoader):
    """Reads 5e-4 as a number and `no` as text, as YAML 1.2 does; PyYAML follows YAML 1.1, where
    they are text and false.
    """

    yaml_implicit_resolvers = {
        first: [
            (tag, pattern)
            for tag, pattern in resolvers
            if first in "tTfF" or tag != "tag:yaml.org,2002:bool"
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def read_yaml(path: str | Path) -> dict:
    """The sections of a configuration file and their keys.

    Raises UserError for a file that is missing, not YAML, or not a mapping.
    """
    try:
        given = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=Loader)
    except FileNotFoundError:
        near = ", ".join(sorted(map(str, Path(path).parent.glob("*.yaml"))))
        raise UserError(
            f"no configuration file {path}; there are: {near or 'none beside it'}"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path} cannot be read as YAML: {error}") from None
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise UserError(
            f"{path} holds a {type(given).__name__}; it must hold sections with keys, see configs/"
        )
    return given
