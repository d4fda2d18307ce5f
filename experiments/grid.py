"""Alternatives in flags: "A | B", also inside a call, "KvtAttention(K=4|9|16)", become arms with names."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import config as flags
from utils import BadOption

MOST_ARMS = 1000
BY_THEMSELVES = ("layer", "head", "model", "vote")  # their values are names; others are told with their flag: "K=9"
OPENING, CLOSING, QUOTES = "([{", ")]}", "'\""
YES, NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True)
class Arm:
    """One configuration of a comparison: the flags that make it, seed and place left out. `published`: numbers to print beside it."""

    name: str
    flags: Mapping[str, Any]
    exploratory: bool = False  # it joined a plan that had begun
    published: Mapping[str, Any] = field(default_factory=dict)


def arms_of(given: Mapping[str, str]) -> list[Arm]:
    """The product of all alternatives, in the order in which they were typed; a name tells what differs, and no more."""
    choices = {name: alternatives(name, text) if isinstance(text, str) else [text] for name, text in given.items()}
    count = 1
    for values in choices.values():
        count *= len(values)
    if count > MOST_ARMS:
        raise BadOption("compare", f"takes at most {MOST_ARMS} arms", count)
    several = [name for name, values in choices.items() if len(values) > 1]
    arms = []
    for row in itertools.product(*choices.values()):
        typed = dict(zip(choices, row, strict=True))
        words = [typed[n] if n in BY_THEMSELVES else f"{n}={typed[n]}" for n in several]
        arms.append(Arm(", ".join(words) or only_name(typed), {name: value_of(name, text) for name, text in typed.items()}))
    check_names([arm.name for arm in arms])
    return arms


def only_name(typed: Mapping[str, Any]) -> str:
    """Of an arm that has no other beside it."""
    return str(typed.get("layer") or typed.get("head") or "all")


def check_names(names: Sequence[str]) -> None:
    for number, name in enumerate(names):
        if name in names[:number]:
            raise BadOption("compare", "must give every arm once", name)


def value_of(name: str, text: Any) -> Any:
    """What was typed, as the value of its flag."""
    if isinstance(text, str) and name in flags.FIELDS and flags.kind_of(flags.FIELDS[name]) is bool:
        if text.lower() not in YES + NO:
            raise BadOption(name, "must be true or false", text)
        return text.lower() in YES
    return flags.parse(name, text)


def alternatives(name: str, text: str) -> list[str]:
    """ "A | B(K=4|9)" to A, B(K=4) and B(K=9)."""
    found = expanded(text, name)
    for number, value in enumerate(found):
        if not value:
            raise BadOption(name, "must have a value on both sides of |", text)
        if value in found[:number]:
            raise BadOption(name, f"must name each alternative once ({value} is there twice)", text)
    return found


def expanded(text: str, name: str) -> list[str]:
    """`|` binds loosest at the top; inside brackets it separates the values of one argument."""
    return [whole for part in split(text, "|") for whole in without_alternatives(part.strip(), name)]


def without_alternatives(text: str, name: str) -> list[str]:
    """One alternative, in all the ways that the brackets in it can be read."""
    start, end = first_bracket(text)
    if start < 0:
        return [text]
    if end < 0:
        raise BadOption(name, "must close its brackets", text)
    arguments = [argument_values(argument, name) for argument in split(text[start + 1 : end], ",")]
    rest = without_alternatives(text[end + 1 :], name)
    return [f"{text[: start + 1]}{', '.join(words)}{text[end]}{tail}" for words in itertools.product(*arguments) for tail in rest]


def argument_values(argument: str, name: str) -> list[str]:
    """ "K=4|9" to K=4 and K=9."""
    option, equals, values = argument.strip().partition("=")
    if not equals:
        return expanded(argument.strip(), name)
    return [f"{option.strip()}={value}" for value in expanded(values, name)]


def first_bracket(text: str) -> tuple[int, int]:
    """Where the first bracket opens and closes; -1 for what is not there."""
    start, level, quote = -1, 0, ""
    for place, char in enumerate(text):
        if quote or char in QUOTES:
            quote = "" if char == quote else quote or char
        elif char in OPENING:
            start = place if start < 0 else start
            level += 1
        elif char in CLOSING:
            level -= 1
            if level == 0 and start >= 0:
                return start, place
    return start, -1


def split(text: str, at: str) -> list[str]:
    """Parts between separators that stand outside brackets and quotes."""
    parts, level, quote = [""], 0, ""
    for char in text:
        if quote or char in QUOTES:
            quote = "" if char == quote else quote or char
        else:
            level += (char in OPENING) - (char in CLOSING)
        if char == at and level == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += char
    return parts
