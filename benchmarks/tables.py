"""What was found, as text that people read: a Markdown table for each group, target and ours side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.targets import target_of
from benchmarks.timing import Group, Line, Spread


def ratio_text(ratio: Spread) -> str:
    return f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def cells_of(lines: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: a row a side, with all of its phases; ratios first."""
    phases, names = (list(dict.fromkeys(getattr(line, part) for line in lines)) for part in ("phase", "name"))
    by_place = {(line.name, line.phase): line for line in lines}
    with_target = [phase for phase in phases if any(line.phase == phase and target_of(line) for line in lines)]
    headings = [""]
    for phase in phases:
        headings += [phase, "target"] if phase in with_target else [phase]
    headings += [f"time, {phases[-1]}" if len(phases) > 1 else "time"]
    peaks = any(line.peak_mb is not None for line in lines)
    headings += ["peak MB"] if peaks else []
    rows = []
    for name in names:
        row = [name]
        for phase in phases:
            line = by_place.get((name, phase))
            row.append("" if line is None else "1" if line.name == line.base else ratio_text(line.ratio))
            row += [_target(line)] if phase in with_target else []
        last = [line for phase in phases if (line := by_place.get((name, phase)))][-1]
        row.append(f"{duration(last.seconds.median)}{'' if last.phase == phases[-1] else f' ({last.phase})'}")
        row += ["" if last.peak_mb is None else f"{last.peak_mb:.0f}"] if peaks else []
        rows.append([*row[:1], *row[1:]] if not last.note else [f"{name} ({last.note})", *row[1:]])
    return headings, rows


def _target(line: Line | None) -> str:
    target = None if line is None else target_of(line)
    if target is None or line is None:
        return ""
    return f"{target}, {'met' if target.reached(line) else 'missed'}"


def table(group: Group, lines: Sequence[Line]) -> str:
    rounds = lines[0].rounds
    how = (
        f"time over that of {lines[0].base}, median (quartiles) of {rounds} rounds" if rounds > 1 else f"time over that of {lines[0].base}"
    )
    if apart := lines[0].facts.get("ns_between_cores"):
        how += "; a line of memory took {1} ns ({0}-{2}) from one core to the other".format(*apart)
    missing = [f"Not measured: {'; '.join(f'{name} ({why})' for name, why in group.absent.items())}."] if group.absent else []
    return "\n".join([f"### {group.part}: {group.setting}", "", f"{how[0].upper()}{how[1:]}.", *missing, "", markdown(*cells_of(lines))])


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns are as wide as what stands in them."""
    widths = [max(len(row[n]) for row in [headings, *rows]) for n in range(len(headings))]
    lines = [_row(headings, widths), "|" + "|".join("-" * (width + 2) for width in widths) + "|"]
    return "\n".join([*lines, *(_row(row, widths) for row in rows)])


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"


def rounded(spread: Spread) -> dict[str, float]:
    return {name: float(f"{value:.5g}") for name, value in spread._asdict().items()}


def as_json(line: Line) -> dict[str, Any]:
    target = target_of(line)
    return {
        **{name: getattr(line, name) for name in ("part", "setting", "name", "phase", "base", "rounds", "note", "facts")},
        "peak_mb": None if line.peak_mb is None else round(line.peak_mb, 1),
        "ratio": rounded(line.ratio),
        "seconds": rounded(line.seconds),
        "target": None if target is None else {"most": target.most, "of": "seconds" if target.in_seconds else "ratio"},
    }
