"""Checkpoints of older versions, by the names that their parts have now."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

Groups = dict[str, dict[str, Tensor]]
GROUPS = {"votes": "predictors", "compared": "baseline_bank"}
# Of the tensors of a head over neighbors, alone or among its baselines.
TENSORS = (
    (r"^head\.voter\.", "head.predictor."),
    (r"^(raw|calibrated)\.mixture\.", r"\1.interpolation."),
    (r"^(head\.predictor|raw\.interpolation|calibrated\.interpolation)\.knn\.", r"\1.vote."),
    (r"\.prior\.tilt$", ".prior.class_mean_weight"),
)
SHARPNESS, TEMPERATURE = "log_sharpness", "log_vote_temperature"  # one is minus the other


def names_of(group: str) -> list[str]:
    """What a group of tensors was called before."""
    return [old for old, new in GROUPS.items() if new == group]


def with_new_names(groups: Groups, facts: dict[str, Any]) -> tuple[Groups, dict[str, Any]]:
    renamed = {GROUPS.get(group, group): dict(_renamed(name, value) for name, value in named.items()) for group, named in groups.items()}
    facts = {GROUPS.get(name, name): value for name, value in facts.items()}
    if "calibrated" in facts:
        facts["calibration"] = facts.pop("calibrated")
    return renamed, facts


def _renamed(name: str, value: Tensor) -> tuple[str, Tensor]:
    for old, new in TENSORS:
        name = re.sub(old, new, name)
    if name.endswith(SHARPNESS):
        return name.removesuffix(SHARPNESS) + TEMPERATURE, -value
    return name, value
