"""What each part is meant to reach on two cores: ratios to the base of its group, or seconds. `bench` shows them beside what it finds."""

from __future__ import annotations

from typing import Any, NamedTuple

from benchmarks.timing import Line

FORWARD, BOTH = "forward", "forward + backward"
# Time over that of the layer with SDPA, in one run: forward, forward + backward; by number of tokens.
LAYERS: dict[str, dict[int, tuple[float, float]]] = {
    "KvtAttention": {65: (0.95, 0.88), 197: (0.78, 0.70), 1025: (0.50, 0.36)},
    "ConvNN depthwise": {65: (0.95, 0.88), 197: (0.78, 0.70), 1025: (0.50, 0.36)},
    "ConvNN standard": {65: (1.3, 1.4), 197: (1.0, 1.0), 1025: (0.6, 0.5)},
    "ConvNN random 32": {65: (0.95, 0.9), 197: (0.75, 0.7), 1025: (0.35, 0.35)},
    "SampledKnn": {65: (1.0, 0.95), 197: (0.85, 0.8), 1025: (0.55, 0.5)},
    "Neighborhood 7 x 7": {785: (0.6, 0.6), 3137: (0.2, 0.2)},
}
MODELS = {"KvtAttention": 0.85}  # a training step of ViT-Tiny at 224, over that with Attention
LOOP = 1 / 0.98  # at least .98 of the images per second of a bare loop
BANK = {256: 1 / 2, 64: 1 / 3}  # over FAISS as installed, 50,000 rows, k = 16; by dimension
STARTUP = {"--help": 0.2, "first training step": 5.0, "default run": 30.0}  # seconds


class Target(NamedTuple):
    """At most so much: a ratio to the base, or seconds."""

    most: float
    in_seconds: bool = False

    def reached(self, line: Line) -> bool:
        if self.in_seconds:
            return line.seconds.median <= self.most
        return round(line.ratio.median, 2) <= round(self.most, 2)  # as both are shown

    def __str__(self) -> str:
        return f"{self.most:.3g} s" if self.in_seconds else f"{self.most:.2f}"


def target_of(line: Line) -> Target | None:
    """None where nothing is set: for rivals, and for sizes and precisions that the table leaves out."""
    found = {"layers": _of_layers, "models": _of_models, "loop": _of_loop, "bank": _of_bank, "startup": _of_startup}.get(line.part)
    return found(line, line.facts) if found else None


def _of_layers(line: Line, facts: dict[str, Any]) -> Target | None:
    pair = LAYERS.get(line.name, {}).get(facts["tokens"])
    if pair is None or (facts["dtype"], facts["mode"]) != ("float32", "eager"):
        return None
    return Target(pair[0 if line.phase == FORWARD else 1])


def _of_models(line: Line, facts: dict[str, Any]) -> Target | None:
    wanted = line.name in MODELS and (facts["image_size"], facts["dtype"]) == (224, "float32")
    return Target(MODELS[line.name]) if wanted else None


def _of_loop(line: Line, facts: dict[str, Any]) -> Target | None:
    return Target(LOOP) if line.name == "our loop" else None


def _of_bank(line: Line, facts: dict[str, Any]) -> Target | None:
    wanted = line.name == "Bank.search" and facts.get("rows", 0) >= 50_000 and facts.get("dim") in BANK
    return Target(BANK[facts["dim"]]) if wanted else None


def _of_startup(line: Line, facts: dict[str, Any]) -> Target | None:
    return Target(STARTUP[line.name], in_seconds=True) if line.name in STARTUP else None
