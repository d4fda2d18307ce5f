"""`python main.py explain`: hands the options to the kind of explanation that was asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from explain.neighbors import neighbors
from explain.tokens import tokens
from utils import BadOption, one_of

KINDS: dict[str, Callable[[dict[str, Any]], None]] = {"tokens": tokens, "neighbors": neighbors}
ONLY = {"queries": "tokens", "head": "tokens", "all": "tokens", "mistakes": "neighbors"}  # options that one kind has


def explain(options: Mapping[str, Any]) -> None:
    """`options` are the flags as they were typed; None was not given."""
    given = {name: value for name, value in options.items() if value is not None}
    what = one_of("what", given.pop("what"), KINDS)
    for name, owner in ONLY.items():
        if name in given and owner != what:
            raise BadOption(name, f"goes with --what {owner}", given[name])
    if "checkpoint" not in given:
        raise BadOption("checkpoint", "must name the run to explain")
    KINDS[what](given)
