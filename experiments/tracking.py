"""What a comparison tells the trackers that its runs use: the verdict in words, differences as numbers, and their figures."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from experiments.verdict import Verdicts
from training.progress import Results, tracked, without_harm


def tell(names: Iterable[str], verdicts: Verdicts, text: str, folder: Path) -> None:
    """`text`: what the terminal shows. TensorBoard writes into the folder of the comparison, beside the cells."""
    results = results_of(verdicts, text)
    for name in names:
        with without_harm(f"{folder} has them all"), tracked(name, folder, results.options) as tracker:
            tracker.results(results)


def results_of(verdicts: Verdicts, text: str) -> Results:
    return Results(numbers_of(verdicts), declared_of(verdicts), figures_of(verdicts), text)


def numbers_of(verdicts: Verdicts) -> dict[str, float]:
    """As in comparison.json: an arm's mean, and arm minus baseline with its interval."""
    comparison, scored, found = verdicts.comparison, verdicts.scored, dict[str, float]()
    for arm in comparison.arms:
        name = comparison.same_as.get(arm, arm)
        if scored.seeds(name):
            found[f"{comparison.metric}/{arm}"] = float(scored.mean(name).mean)
    for verdict in verdicts.verdicts:
        if verdict.estimate is not None:
            numbers = {"difference": verdict.estimate.mean, "low": verdict.low, "high": verdict.high}
            found |= {f"{what}/{verdict.arm}": float(value) for what, value in numbers.items()}
    return found


def declared_of(verdicts: Verdicts) -> dict[str, Any]:
    comparison = verdicts.comparison
    seeds = list(dict.fromkeys(cell.seed for cell in comparison.cells))
    words = {"arms": " | ".join(comparison.arms), "seeds": ",".join(map(str, seeds))}
    of_arms = {f"verdict/{verdict.arm}": verdict.verdict for verdict in verdicts.verdicts}
    return {"baseline": comparison.baseline, "metric": comparison.metric, "calibrated": comparison.calibrated, **words, **of_arms}


def figures_of(verdicts: Verdicts) -> dict[str, bytes]:
    """As in the report."""
    from experiments.report.comparing import forest, scores
    from experiments.report.ink import drawn
    from experiments.report.material import Material

    comparison = verdicts.comparison
    material = Material("", (), (), comparison.arms, comparison.baseline, verdicts)
    return {picture.name: drawn(picture).png for picture in (forest(material), scores(material))}
