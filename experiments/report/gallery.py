"""Pictures that ask the model: which training rows decided, and which patches each layer reads. Only where model and data can be had."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.report.ink import Picture
from experiments.report.material import Material


@dataclass(frozen=True)
class Gallery:
    """`lines`: why something is not there."""

    pictures: tuple[Picture, ...]
    lines: tuple[str, ...]


def pictures(material: Material, given: dict[str, str]) -> Gallery:
    return Gallery((), ())
