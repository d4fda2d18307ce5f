"""YAML that holds plain values only: what a stranger's file may make of itself is bounded before anything is made of it."""

from __future__ import annotations

from typing import Any

MOST_DEPTH, MOST_ALIASES = 4, 16  # of a YAML file


def plain_yaml(text: str) -> Any:
    """Text, numbers, true, false, null, and lists of them. Small files can hold references that unfold to gigabytes, and brackets
    deeper than Python's stack: both are counted before anything is made of them."""
    import yaml

    class Plain(yaml.SafeLoader):
        """Dates stay text, and no tag makes anything but what a file without tags can hold."""

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
