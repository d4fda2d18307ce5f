"""What a comparison writes: the table for people in four forms, comparison.json, and results.csv for pandas."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.arms import Cell, Comparison
from experiments.sentences import sentence
from experiments.summary import Summary, all_scores, cells, cost_of, notes, shares_lines, summaries
from experiments.verdict import Verdict, Verdicts
from inputs.files import write_atomically

COMPARED = "comparison.json"


def write(verdicts: Verdicts, folder: Path) -> str:
    """Writes table.csv, table.md, table.tex, comparison.json and results.csv; returns the text for the terminal."""
    arms = summaries(verdicts)
    lines = [cells(arm, verdicts) for arm in arms]
    below = [sentence(v, verdicts) for v in verdicts.verdicts]
    below += [f"variance of the difference, {line}" for line in shares_lines(verdicts)]
    below += notes(verdicts)
    content = {
        "table.csv": as_csv([_flat(arm, verdicts) for arm in arms]),
        "table.md": as_markdown(lines, below),
        "table.tex": as_latex(lines),
        COMPARED: json.dumps(as_json(verdicts, arms), indent=1, allow_nan=False) + "\n",
        "results.csv": as_csv(run_rows(verdicts)),
    }
    for name, text in content.items():
        write_atomically(folder / name, text.encode())
    page = f"python main.py report {shlex.quote(str(folder))}"
    return as_text(lines, verdicts) + f"\n\nwritten to {folder}: {', '.join(content)}; as a page: {page}"


# ---------------------------------------------------------------- for people


def as_text(lines: Sequence[dict[str, str]], verdicts: Verdicts) -> str:
    headings = list(lines[0])
    scores, cost = headings[: headings.index("parameters")], headings[headings.index("parameters") :]
    alike = len({tuple(line[h] for h in cost) for line in lines}) == 1  # predictors of one run
    parts = [*columns(lines, scores), "", *columns([{**lines[0], "arm": "each"}] if alike else lines, ["arm", *cost]), ""]
    parts += [_one_line(sentence(v, verdicts)) for v in verdicts.verdicts]
    if of_difference := shares_lines(verdicts):
        parts += ["", "variance of the differences:", *(f"  {_one_line(line)}" for line in of_difference)]
    if to_know := notes(verdicts):
        parts += ["", "to be known before these numbers are trusted:", *(f"  {_one_line(note)}" for note in to_know)]
    return "\n".join(parts)


def columns(lines: Sequence[dict[str, str]], headings: Sequence[str]) -> list[str]:
    """Aligned; a column in which nothing stands is left out."""
    shown = [h for h in headings if h == "arm" or any(line[h] for line in lines)]
    rows = [shown, *([_one_line(line[h]) or "-" for h in shown] for line in lines)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(shown))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def as_markdown(lines: Sequence[dict[str, str]], below: Sequence[str]) -> str:
    headings = list(lines[0])
    rows = [[markdown(h) for h in headings], ["---"] * len(headings), *([markdown(line[h]) for h in headings] for line in lines)]
    return "\n".join(["| " + " | ".join(row) + " |" for row in rows] + [""] + [f"- {markdown(line)}" for line in below]) + "\n"


def as_latex(lines: Sequence[dict[str, str]]) -> str:
    """With booktabs; nothing is bold, because a bold number says that a difference is there."""
    headings = list(lines[0])
    rows = [" & ".join(latex(line[h]) for h in headings) + r" \\" for line in lines]
    top = " & ".join(latex(h) for h in headings) + r" \\"
    begin = rf"\begin{{tabular}}{{l{'r' * (len(headings) - 1)}}}"
    return "\n".join(["% needs \\usepackage{booktabs}", begin, r"\toprule", top, r"\midrule", *rows, r"\bottomrule", r"\end{tabular}", ""])


def _one_line(text: str) -> str:
    """Without what moves the cursor of a terminal: names may come from a stranger's run."""
    return "".join(c for c in " ".join(text.split()) if c.isprintable())


def markdown(text: str) -> str:
    """As it stands: names may hold anything."""
    return re.sub(r"([\\`*_{}\[\]<>|#~$&])", r"\\\1", _one_line(text))


LATEX = {
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "|": r"\textbar{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    '"': r"\textquotedbl{}",
}


def latex(text: str) -> str:
    return "".join(LATEX.get(c, c) for c in _one_line(text))


# ---------------------------------------------------------------- for programs


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    out = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(out, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _flat(arm: Summary, verdicts: Verdicts) -> dict[str, Any]:
    """An arm's line in numbers, as results.json has them."""
    estimate, verdict = arm.estimate, arm.verdict
    low, high = verdicts.metric.interval(estimate) if estimate else (None, None)
    judged = verdict if verdict and verdict.estimate else None
    return {
        "arm": arm.arm,
        "exploratory": arm.exploratory or arm.later > 0,
        "exploratory_seeds": arm.later,
        "metric": verdicts.comparison.metric,
        "mean": estimate and estimate.mean,
        "low": low,
        "high": high,
        "seeds": estimate.seeds if estimate else 0,
        "rows": estimate and estimate.rows,
        "raw": arm.raw,
        "calibrated": arm.calibrated,
        "wins": judged and judged.wins,
        "pairs": judged and len(judged.seeds),
        "difference": judged and judged.estimate and judged.estimate.mean,
        "difference_low": judged and judged.low,
        "difference_high": judged and judged.high,
        "p_holm": judged and judged.p_holm,
        "verdict": arm.word,
        **arm.cost,
        "time_ratio": judged and judged.time,
    }


def as_json(verdicts: Verdicts, arms: Sequence[Summary]) -> dict[str, Any]:
    comparison = verdicts.comparison
    return {
        "metric": comparison.metric,
        "baseline": comparison.baseline,
        "arms": list(comparison.arms),
        "comparisons": [_comparison(v, verdicts) for v in verdicts.verdicts],
        "cells": [_place(cell, comparison) for cell in comparison.cells],
        "margin": comparison.margin,
        "calibrated": comparison.calibrated,
        "family": list(comparison.family),
        "looks": list(comparison.looks),
        "same_as": dict(comparison.same_as),
        "summaries": [_flat(arm, verdicts) for arm in arms],
        "notes": notes(verdicts),
    }


def _place(cell: Cell, comparison: Comparison) -> dict[str, Any]:
    more: dict[str, Any] = {"source": cell.source} if cell.source else {}
    more |= {"exploratory": True} if _added_later(cell, comparison) else {}
    return {"arm": cell.arm, "seed": cell.seed, "state": cell.state, "run": cell.run and str(cell.run), **more}


def _comparison(verdict: Verdict, verdicts: Verdicts) -> dict[str, Any]:
    """One that has no result has nulls."""
    found, known = verdict.estimate, verdict.estimate is not None
    settling = verdict.settling
    return {
        "arm": verdict.arm,
        "baseline": verdict.baseline,
        "metric": verdicts.comparison.metric,
        "difference": found and found.mean,
        "low": verdict.low if known else None,
        "high": verdict.high if known else None,
        "df": found and found.df,
        "p_holm": verdict.p_holm,
        "verdict": verdict.verdict,
        "seeds": len(verdict.seeds),
        "rows": found.rows if found else 0,
        "variance": found and {"seed": found.spread.seed, "row": found.spread.row, "residual": found.spread.residual},
        "shares": found and dict(zip(("seed", "row", "residual"), found.spread.shares, strict=True)),
        "level": verdict.level if known else None,
        "margin": verdict.margin if known else None,
        "within_margin": verdict.within_margin,
        "wins": verdict.wins,
        "ties": verdict.ties,
        "missing_seeds": list(verdict.missing),
        "exploratory": verdict.exploratory,
        "declared_seeds_alone": verdict.declared,
        "pairing": verdict.pairing and dict(zip(("seed", "row", "both"), verdict.pairing, strict=True)),
        "settling": settling and {"target": settling.target, "seeds": settling.seeds, "rows": settling.rows, "both": settling.both},
        "time_ratio": verdict.time,
        "sentence": sentence(verdict, verdicts),
    }


def run_rows(verdicts: Verdicts) -> list[dict[str, Any]]:
    """A row for each run and predictor; of a cell without results one row that tells its state."""
    comparison, results = verdicts.comparison, verdicts.scored.results
    rows, seen = [], set()
    for cell in comparison.cells:
        if cell.run is not None and (cell.run, cell.source == "") in seen:
            continue  # arms inside one run: its predictors are told once
        seen.add((cell.run, cell.source == ""))
        place = {"arm": cell.arm, "exploratory": _added_later(cell, comparison), "seed": cell.seed, "state": cell.state}
        place["run"] = str(cell.run or "")
        found = results.get((cell.arm, cell.seed))
        if found is None:
            rows.append({**place, "predictor": ""})
            continue
        own = verdicts.scored.own[cell.arm, cell.seed]
        of_each = all_scores(found, own)
        told = found["about"]
        config = {f"config.{name}": value for name, value in told.get("config", {}).items() if name not in told.get("ignored", {})}
        about = {**cost_of(found), **{name: told.get(name) for name in ("epoch", "load", "threads")}}
        for name in dict.fromkeys(source.rpartition(".")[0] for source in of_each):
            row = {**place, "predictor": name, "own": name == own}
            for source, scores in of_each.items():
                predictor, _, variant = source.rpartition(".")
                if predictor == name:
                    row |= {key if variant == "raw" else f"{variant}_{key}": value for key, value in scores.items()}
            rows.append({**row, **about, **config})
    return rows


def _added_later(cell: Cell, comparison: Comparison) -> bool:
    return cell.arm in comparison.exploratory or cell.seed in comparison.exploratory_seeds
