"""What the page says in words and tables: of arms, of each run, and with what a run was made."""

from __future__ import annotations

from typing import Any

from experiments.report.ink import Table
from experiments.report.material import Material, Run
from experiments.sentences import decimals_for, number
from experiments.summary import cells, summaries

# Heading, name in results.json, scale
SCORES = (("accuracy %", "accuracy", 100), ("NLL", "nll", 1), ("ECE", "ece", 1), ("Brier", "brier", 1), ("AURC", "aurc", 1))


def headline(material: Material) -> list[str]:
    """Of runs that are not compared: what each arm reached."""
    metric, lines = material.metric, []
    for arm in material.arms:
        estimate, found = material.estimate(arm), material.of(arm)
        if estimate is None or not found:
            states = ", ".join(dict.fromkeys(run.state for run in material.runs if run.arm == arm)) or "no run"
            lines.append(f"{arm}: no result yet ({states}).")
            continue
        low, high = metric.interval(estimate)
        d = decimals_for(metric, high - low)
        unit = " %" if metric.scale == 100 else ""
        mean, low_text, high_text = (number(metric, x, d) for x in (estimate.mean, low, high))
        seeds = "one seed: the interval knows test rows only" if estimate.seeds == 1 else f"{estimate.seeds} seeds"
        line = f"{arm}: {metric.title} {mean}{unit} ({low_text} to {high_text}) on {estimate.rows:,} test rows, {seeds}."
        first = found[0].run.results
        if len(found) == 1 and "test_calibrated" in first:
            before, after = first["test"], first["test_calibrated"]
            nll, ece = (f"{before[name]:.3f} to {after[name]:.3f}" for name in ("nll", "ece"))
            line += f" Calibration took NLL from {nll} and ECE from {ece}."
        lines.append(line)
    return lines


def score_table(material: Material) -> Table:
    """A line for each arm: as `compare` prints it, or the scores alone."""
    if material.verdicts is not None:
        rows = [cells(arm, material.verdicts) for arm in summaries(material.verdicts)]
        headings = [h for h in rows[0] if h == "arm" or any(row[h] for row in rows)]
        return Table(headings, [[row[h] for h in headings] for row in rows])
    headings = ["arm", "seeds", *(h for h, _, _ in SCORES), *(f"{h}, calibrated" for h, _, _ in SCORES[:3])]
    table = []
    for arm in material.arms:
        found = [cell.run.results for cell in material.of(arm)]
        row: list[Any] = [arm, len(found)]
        row += [_mean([r["test"].get(name) for r in found], scale) for _, name, scale in SCORES]
        row += [_mean([r.get("test_calibrated", {}).get(name) for r in found], scale) for _, name, scale in SCORES[:3]]
        table.append(row)
    return Table(headings, table)


def predictors_table(material: Material) -> Table | None:
    """Of one arm: its head's own predictor beside the others, means over seeds."""
    if len(material.arms) > 1:
        return None
    of_seeds = [(cell.run.results.get("predictors") or {}).get("scores") or {} for cell in material.of(material.arms[0])]
    names = [name for name in (of_seeds[0] if of_seeds else ()) if all(name in scores for scores in of_seeds)]
    if len(names) < 2:
        return None
    short = SCORES[:3]
    rows = []
    for name in names:
        row: list[Any] = [name]
        for variant in ("raw", "calibrated"):
            row += [_mean([of[name].get(variant, {}).get(score) for of in of_seeds], scale) for _, score, scale in short]
        rows.append(row)
    return Table(["predictor", *(h for h, _, _ in short), *(f"{h}, calibrated" for h, _, _ in short)], rows)


def runs_table(material: Material) -> Table:
    headings = ["run", "state", *(h for h, _, _ in SCORES), *(f"{h}, calibrated" for h, _, _ in SCORES[:3])]
    headings += ["best epoch", "parameters", "images/s", "peak memory (MB)", "training time (s)", "load"]
    rows = []
    for run in material.runs:
        r = run.results
        row: list[Any] = [run.name + " (exploratory)" * material.joined_later(run), run.state]
        row += [_mean([r.get("test", {}).get(name)], scale) for _, name, scale in SCORES]
        row += [_mean([r.get("test_calibrated", {}).get(name)], scale) for _, name, scale in SCORES[:3]]
        row += [run.about.get("epoch"), run.about.get("params")]
        row += [_short(run.about.get(name)) for name in ("images_per_second", "peak_memory_mb", "seconds", "load")]
        rows.append(row)
    return Table(headings, rows)


def _mean(values: list[Any], scale: float) -> float | None:
    known = [v for v in values if isinstance(v, int | float)]
    return round(scale * sum(known) / len(known), 4 if scale == 1 else 2) if known and len(known) == len(values) else None


def _short(value: Any) -> float | None:
    return round(value, 1) if isinstance(value, int | float) else None


def told_of(run: Run) -> dict[str, str]:
    """Commit, versions, hashes, place."""
    r = run.about
    git, data = r.get("git") or {}, r.get("data") or {}
    found = {"directory": str(run.folder)}
    if git.get("commit"):
        found["commit"] = f"{git['commit']}{' (with changes that are not in it)' if git.get('changed') else ''}"
    if versions := r.get("versions"):
        found["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    for key, title in (("threads", "threads"), ("load", "load of the machine"), ("epoch", "chosen epoch")):
        if r.get(key) is not None:
            found[title] = f"{r[key]:.1f}" if isinstance(r[key], float) else str(r[key])
    if data:
        found["rows"] = ", ".join(f"{part} {data[part]:,}" for part in ("train", "val", "test") if isinstance(data.get(part), int))
    for key, title in (("sha256", "hash of all rows"), ("test_sha256", "hash of the test rows")):
        if data.get(key):
            found[title] = str(data[key])
    if run.checkpoint:
        found["hash of the checkpoint"] = run.checkpoint
    return found
