"""Ways to spoil the files and options of a command, each by a random generator."""

import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from random import Random

import yaml

from mixer.training.config import RunConfig

# Values for options, as YAML on a command line or in a file.
TEXTS = [
    *("", "null", "true", "no", "0", "-1", "1", "7", "1.5", "-0.0", "1e400", "-1e-400", ".nan"),
    *(".inf", "-.inf", "1e-3", "99999999999999999999", "2024-02-30", "2024-02-28", "12:30:00"),
    *("!!float x", "!!int y", "!!python/name:os.system", "!unknown 3", "&a [*a]", "[", "{", "'"),
    *("[1, 2]", "{a: 1}", "a: b: c", "muon", "adamw", "bf16", "~/x", "../x", "/dev/null", "/"),
    *("x" * 300, "é\udc80", "\x00", "${oc.env:HOME}", "${x}", "???", "- 1", "# no"),
]
# Values inside of JSON files.
VALUES = [
    *(None, True, False, 0, -1, 1, 2, 1.5, 1e308, float("nan"), float("inf"), 10**30, 2**31, 2**63),
    *("", "x", "x" * 300, "\ud800", "../../etc/passwd", "/", "auto", "eager", "fp8", [], [1], {}),
    *({"a": 1}, [[]], [None], "1", "true"),
]


def option_names(config_class: type = RunConfig, prefix: str = "") -> list[str]:
    """All options of a configuration, such as train.steps."""
    names = []
    for field in fields(config_class):
        name = prefix + field.name
        if is_dataclass(field.type):  # a section
            names += option_names(field.type, f"{name}.")
        else:
            names.append(name)
    return names


def option(random: Random) -> str:
    """An override for the command line; some keys do not exist."""
    name = random.choice(option_names())
    if random.random() < 0.1:
        name = random.choice((name[:-1], f"{name}.x", name.upper(), "", ".", name.split(".")[0]))
    return f"{name}={random.choice(TEXTS)}"


def spoil_bytes(file: Path, random: Random) -> str:
    """Changes, adds or removes bytes anywhere."""
    data = bytearray(file.read_bytes())
    offset = random.randrange(len(data) + 1)
    size = random.choice((1, 2, 8, 100))
    change = random.choice(("cut off", "flip", "insert", "remove", "empty", "twice", "noise"))
    if change == "cut off":
        del data[offset:]
    elif change == "flip" and data:
        data[offset % len(data)] ^= 1 << random.randrange(8)
    elif change == "insert":
        data[offset:offset] = random.randbytes(size)
    elif change == "remove":
        del data[offset : offset + size]
    elif change == "empty":
        data.clear()
    elif change == "twice":
        data[len(data) :] = bytes(data)
    elif change == "noise":
        data[:] = random.randbytes(len(data) or 10)
    file.unlink()
    file.write_bytes(data)
    return f"{change} at {offset}"


def spoil_file(file: Path, random: Random) -> str:
    """Takes a file away, or puts something else in its place."""
    replacement = random.choice(("nothing", "a folder", "a link to nothing", "a link to itself"))
    file.unlink()
    if replacement == "a folder":
        file.mkdir()
    elif replacement == "a link to nothing":
        file.symlink_to("not/there")
    elif replacement == "a link to itself":
        file.symlink_to(file.name)
    return f"{replacement} in its place"


def spoil_value(file: Path, random: Random) -> str:
    """Replaces or removes a value anywhere in a JSON or YAML file, or in one line of several."""
    is_yaml = file.suffix == ".yaml"
    lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
    number = random.randrange(len(lines))
    document = {"root": yaml.safe_load(lines[number]) if is_yaml else json.loads(lines[number])}
    holders = list(_holders(document))
    holder, key = random.choice(holders)
    value = random.choice(VALUES)
    if random.random() < 0.2 and holder is not document:
        del holder[key]
        change = f"no {key!r}"
    else:
        holder[key] = value
        change = f"{key!r} is {value!r:.40}"
    root = document["root"]
    lines[number] = yaml.safe_dump(root) if is_yaml else json.dumps(root)
    file.unlink()
    file.write_text("\n".join(lines) + "\n")
    return f"line {number + 1}: {change}"


def _holders(value):
    """Each (dict or list, key or index) in a JSON value; of a long list only the first few."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:5])
    for key, child in list(items):
        yield value, key
        if isinstance(child, (dict, list)):
            yield from _holders(child)


MUTATIONS: dict[str, Callable[[Path, Random], str]] = {
    "bytes": spoil_bytes,
    "file": spoil_file,
    "value": spoil_value,
}
