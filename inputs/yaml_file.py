"""YAML files of plain values: what a stranger's file may make of itself is bounded before anything is made of it. Loads without torch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import config as flags
from utils import BadOption, check_file, shortened

MOST_BYTES = 100_000  # of a YAML file
MOST_DEPTH, MOST_ALIASES = 4, 16


def plain_yaml(text: str) -> Any:
    """Text, numbers, true, false, null, and lists of them. Small files can hold references that unfold to gigabytes, and brackets
    deeper than Python's stack: both are counted before anything is made of them."""
    import yaml

    class Plain(yaml.SafeLoader):
        """Dates stay text, and no tag makes anything but what a file without tags can hold. A name that is there twice is refused: the
        second would silently replace the first."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            lines = node.value if isinstance(node, yaml.MappingNode) else []
            count = Counter(name.value for name, _ in lines if isinstance(name, yaml.ScalarNode))
            if twice := next((name for name in count if count[name] > 1), None):
                raise ValueError(f"{twice!r} is there twice")
            return super().construct_mapping(node, deep)

    kinds = ("null", "bool", "int", "float", "seq", "map", "str")
    made = {tag: make for tag, make in Plain.yaml_constructors.items() if tag is None or str(tag).rpartition(":")[2] in kinds}
    resolvers = {key: [r for r in found if not r[0].endswith("timestamp")] for key, found in Plain.yaml_implicit_resolvers.items()}
    Plain.yaml_constructors, Plain.yaml_implicit_resolvers = made, resolvers
    try:
        depth = aliases = 0
        for event in yaml.parse(text, Plain):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            aliases += isinstance(event, yaml.AliasEvent)
            if depth > MOST_DEPTH or aliases > MOST_ALIASES:
                raise ValueError(f"at most {MOST_DEPTH} brackets within each other, and {MOST_ALIASES} references")
        return yaml.load(text, Plain)
    except yaml.YAMLError as error:
        raise ValueError(getattr(error, "problem", None) or "no YAML") from None


def read_mapping(path: str, option: str) -> dict[Any, Any]:
    """The `name: value` lines of a file that an option names."""
    check_file(option, path)
    if (size := Path(path).stat().st_size) > MOST_BYTES:
        raise BadOption(option, f"must have at most {MOST_BYTES:,} bytes ({size:,} found)", path)
    try:
        values = plain_yaml(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadOption(option, f"must be a file that can be read ({error.strerror})", path) from None
    except (ValueError, KeyError, OverflowError) as error:  # also a number of 5,000 digits, `!!bool maybe`, and text that is not UTF-8
        raise BadOption(option, f"must be a YAML file ({shortened(error, 100)})", path) from None
    if not isinstance(values, dict):
        raise BadOption(option, "must hold 'option: value' lines", path)
    return values


def read_yaml(path: str) -> dict[str, Any]:
    """Options of a run and their values, checked."""
    values = flags.with_new_names(read_mapping(path, "config"))
    # YAML reads 1e-3 as text, and the 0.2 of label_noise as a number.
    try:
        values = {k: flags.parse(k, v) if k in flags.FIELDS else v for k, v in values.items()}
        flags.check(values)
    except BadOption as error:
        raise BadOption(error.option, f"{error.rule}, in {path}", error.value) from None
    return {k: v for k, v in values.items() if v is not None}
