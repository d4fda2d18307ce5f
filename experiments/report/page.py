"""The page: one HTML file that asks for nothing. All that comes from outside passes through `text` or `as_json`."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from experiments.report.facts import headline, predictors_table, runs_table, score_table, told_of
from experiments.report.ink import Drawn, Picture, Table
from experiments.report.material import Material, Run, plain
from experiments.sentences import sentence
from experiments.summary import notes, shares_lines

HERE = Path(__file__).parent
FEW_ROWS = 2  # of a table that needs no filter
MOST_ROWS = 100  # of a figure's data that stand in the page as a table; the rest is in its JSON and CSV


@dataclass(frozen=True)
class Section:
    """Figures that belong together; `lines` are said where a figure is not there."""

    name: str
    title: str
    drawn: Sequence[tuple[Picture, Drawn]]
    lines: Sequence[str] = ()


def text(value: Any) -> str:
    return escape(plain(value), quote=True)


def as_json(value: Any) -> str:
    """Inside a script element: nothing in it can end the element or open a comment. NaN and Inf are no JSON."""
    body = json.dumps(_finite(value), separators=(",", ":"), ensure_ascii=True, default=str)
    return body.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {plain(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return plain(value) if isinstance(value, str) else value


def page(material: Material, sections: Sequence[Section], *, going: bool = False) -> str:
    """`going`: runs go on, and the page is built again meanwhile."""
    css, script = (HERE / "page.css").read_text(), (HERE / "page.js").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    shown = [section for section in sections if section.drawn or section.lines]
    links = [("verdict", verdict_title(material)), ("table", "Table"), *((s.name, s.title) for s in shown), ("runs", "Runs")]
    reload_box = '<p><label><input type="checkbox" id="going" checked> runs go on: look again every 15 seconds</label></p>' if going else ""
    body = [
        '<a class="skip" href="#main">Skip to the content</a>',
        f"<header><h1>{text(material.title)}</h1><p class='quiet'>{text(count_of(material))}</p>{reload_box}</header>",
        f'<nav aria-label="Sections"><ul>{"".join(f"<li><a href=#{name}>{text(title)}</a></li>" for name, title in links)}</ul></nav>',
        '<main id="main">',
        verdict_section(material),
        table_section(material),
        *(figure_section(section) for section in shown),
        runs_section(material),
        "</main>",
        '<footer><button class="plain" type="button" data-json>All data of this page as JSON</button></footer>',
        '<div class="tip" id="tip" role="status" aria-live="polite"></div>',
        f'<script type="application/json" id="data">{as_json(data_of(material, shown))}</script>',
        f"<script>{script}</script>",
    ]
    head = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{text(material.title)}</title><style>{css}</style></head><body>"
    )
    return "\n".join([head, *body, "</body></html>\n"])


def count_of(material: Material) -> str:
    states: dict[str, int] = {}
    for run in material.runs:
        states[run.state] = states.get(run.state, 0) + 1
    of_states = ", ".join(f"{n} {state}" for state, n in states.items())
    arms = f", {len(material.arms)} arms" if len(material.arms) > 1 else ""
    of_plan = f"; plan {material.plan_hash[:16]}" if material.plan_hash else ""
    return f"{len(material.runs)} {'run' if len(material.runs) == 1 else 'runs'}{arms}: {of_states}{of_plan}"


# ---------------------------------------------------------------- verdict and tables


def verdict_title(material: Material) -> str:
    return "Verdict" if len(material.arms) > 1 else "Result"


def verdict_section(material: Material) -> str:
    items = []
    verdicts = material.verdicts
    if verdicts is not None:
        items += [(sentence(v, verdicts), v.verdict) for v in verdicts.verdicts]
    else:
        items += [(line, "") for line in headline(material)]
    parts = [f'<section id="verdict"><h2>{verdict_title(material)}</h2><ul class="verdicts">']
    parts += [f'<li class="{text(kind.partition(" ")[0])}">{text(line)}</li>' for line, kind in items]
    parts += ["</ul>", f"<p>{text(material.why_not)}</p>" if material.why_not else ""]
    failed = [run for run in material.runs if run.error]
    known = [*(notes(verdicts) if verdicts else []), *(f"{run.name}: {run.state}: {run.error}" for run in failed)]
    if known:
        parts += ["<h3>To be known before these numbers are trusted</h3><ul>", *(f"<li>{text(line)}</li>" for line in known), "</ul>"]
    if verdicts is not None and (lines := shares_lines(verdicts)):
        told = "".join(f"<li>{text(line)}</li>" for line in lines)
        parts += [f"<details><summary>Variance of the differences</summary><ul>{told}</ul></details>"]
    return "".join([*parts, "</section>"])


def tables_of(material: Material) -> dict[str, tuple[str, Table]]:
    """Title and table by name. Of one run there is one line, and its predictors."""
    of_predictors = predictors_table(material)
    found = {"arms": ("Arms", score_table(material))} if len(material.runs) > 1 else {}
    found |= {"predictors": ("Predictors of the same test rows", of_predictors)} if of_predictors else {}
    return found | {"each-run": ("Each run" if len(material.runs) > 1 else "The run", runs_table(material))}


def table_section(material: Material) -> str:
    parts = ['<section id="table"><h2>Table</h2>']
    for name, (title, table) in tables_of(material).items():
        heading = "" if name == "arms" else f'<h3 class="of-table">{title}</h3>'
        parts += [heading, sortable(name, title, table, baseline=material.baseline if len(material.arms) > 1 else "")]
    return "".join([*parts, "</section>"])


def sortable(name: str, title: str, table: Table, baseline: str = "") -> str:
    """A table whose headings sort it, with a field that filters it by its first column."""
    heads = "".join(f'<th scope="col" aria-sort="none"><button type="button">{text(h)}</button></th>' for h in table.headings)
    rows = []
    digits = [max((_digits(row[column]) for row in table.rows), default=0) for column in range(1, len(table.headings))]
    for row in table.rows:
        kind = ' class="baseline"' if baseline and row[0] == baseline else ""
        cells = "".join(map(_cell, row[1:], digits))
        rows.append(f'<tr{kind}><th scope="row">{text(row[0])}</th>{cells}</tr>')
    by_name = (
        f'<label for="{name}-filter">Filter by name</label>'
        f'<input type="search" id="{name}-filter" data-filters="{name}-table"><span id="{name}-filter-count" role="status"></span>'
    )
    return (
        f'<div class="tools">{by_name if len(rows) > FEW_ROWS else ""}'
        f'<button class="plain" type="button" data-csv="{name}">CSV</button></div>'
        f'<div class="scroll long" tabindex="0" role="region" aria-label="{text(title)}"><table class="sortable" id="{name}-table">'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _cell(value: Any, digits: int | None = None) -> str:
    """`digits` behind the point, where all numbers of a column have as many."""
    if value is None:
        return "<td></td>"
    return f'<td class="number">{text(_number(value, digits))}</td>' if isinstance(value, int | float) else f"<td>{text(value)}</td>"


def _number(value: float, digits: int | None = None) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}" if digits is None else f"{value:,.{digits}f}"


def _digits(value: Any) -> int:
    text = _number(value) if isinstance(value, float) else ""
    return len(text.partition(".")[2]) if "e" not in text else 6


# ---------------------------------------------------------------- figures


def figure_section(section: Section) -> str:
    parts = [f'<section id="{section.name}"><h2>{text(section.title)}</h2>']
    parts += [f"<p>{text(line)}</p>" for line in section.lines]
    parts += ['<div class="figures">', *(figure(picture, drawn) for picture, drawn in section.drawn), "</div></section>"]
    return "".join(parts)


def figure(picture: Picture, drawn: Drawn) -> str:
    name, title = picture.name, text(picture.title)
    keys = f": arrow keys go through {len(picture.series)} lines or marks" if picture.series else ""
    hover = f' data-of="{name}" tabindex="0"' if picture.series else ""
    drawing = f'<div class="drawing"{hover} role="group" aria-label="{title}{keys}">{drawn.page}</div>'
    return (
        f'<figure id="{name}"><figcaption><h3>{title}<a class="anchor" href="#{name}" aria-label="Link to: {title}">#</a></h3>'
        f"<p>{text(picture.about)}</p></figcaption><div>{drawing}"
        f'<details><summary>Data<span class="unseen">: {title}</span></summary>{data_table(name, title, picture.table)}'
        f'<button class="plain" type="button" data-csv="{name}">CSV</button></details></div></figure>'
    )


def data_table(name: str, title: str, table: Table) -> str:
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows[:MOST_ROWS])
    heads = "".join(f'<th scope="col">{text(h)}</th>' for h in table.headings)
    count = f"{len(table.rows):,} rows"
    cut = f"The first {MOST_ROWS:,} of {count}; the CSV has all." if len(table.rows) > MOST_ROWS else count
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Data: {title}"><table id="{name}-data"><caption>{cut}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


# ---------------------------------------------------------------- runs


def runs_section(material: Material) -> str:
    base = material.run_of_arm(material.baseline) if len(material.arms) > 1 else None
    parts = ['<section id="runs"><h2>Runs</h2>']
    if base is not None:
        parts += [f"<p>Options that differ from those of the baseline, {text(material.baseline)}, are marked and say what it has.</p>"]
    parts += [run_details(number, run, base) for number, run in enumerate(material.runs, 1)]
    return "".join([*parts, "</section>"])


def run_details(number: int, run: Run, base: Run | None) -> str:
    state = f'<span class="state {text(run.state)}">{text(run.state)}</span>'
    parts = [f'<details class="run" id="run-{number}"><summary>{text(run.name)} {state}</summary>']
    if run.error:
        parts += [f"<p>{text(run.error)}</p>"]
    if warnings := run.results.get("warnings"):
        parts += ["<h3>Warnings</h3><ul>", *(f"<li>{text(line)}</li>" for line in warnings), "</ul>"]
    parts += [f"<h3>The command that repeats it</h3><pre>{text(run.again)}</pre>"]
    if run.command:
        parts += [f"<h3>As it was typed</h3><pre>{text(run.command)}</pre>"]
    parts += ["<h3>Made with</h3><dl>", *(f"<dt>{text(key)}</dt><dd>{text(value)}</dd>" for key, value in told_of(run).items()), "</dl>"]
    return "".join([*parts, configuration(run, base), "</details>"])


def configuration(run: Run, base: Run | None) -> str:
    theirs = base.config if base is not None and base is not run else None
    rows, ours = [], run.config
    if not ours:
        return "<p>It has written no configuration.</p>"
    names = list(dict.fromkeys([*ours, *(theirs or {})]))
    for name in names:
        value = told(ours.get(name, "no effect here"))
        if theirs is not None and name not in ("output_dir", "seed") and told(theirs.get(name, "no effect here")) != value:
            there = told(theirs.get(name, "no effect there"))
            value = f"{value} (differs: the baseline has {there})"
            rows.append(f'<tr class="differs"><th scope="row">{text(name)}</th><td>{text(value)}</td></tr>')
        else:
            rows.append(f'<tr><th scope="row">{text(name)}</th><td>{text(value)}</td></tr>')
    heads = '<thead><tr><th scope="col">option</th><th scope="col">value</th></tr></thead>'
    return f"<h3>Configuration</h3><table>{heads}<tbody>{''.join(rows)}</tbody></table>"


def told(value: Any) -> str:
    return "none" if value is None else str(value)


# ---------------------------------------------------------------- data


def packed(table: Table) -> dict[str, Any]:
    """By columns; of a column of words each word once, and where it stands: long names would fill the page."""
    columns: list[Any] = []
    for values in zip(*table.rows, strict=True):
        if values and all(isinstance(value, str) for value in values):
            words = list(dict.fromkeys(values))
            number = {word: i for i, word in enumerate(words)}
            columns.append({"words": words, "at": [number[value] for value in values]})
        else:
            columns.append(list(values))
    return {"headings": list(table.headings), "columns": columns}


def data_of(material: Material, sections: Iterable[Section]) -> dict[str, Any]:
    """All numbers of the page, for programs."""
    tables: dict[str, Any] = {}
    for name, (_, table) in tables_of(material).items():
        tables[name] = packed(table)
    for section in sections:
        for picture, _ in section.drawn:
            tables[picture.name] = {"title": picture.title, **packed(picture.table), "series": list(picture.series)}
    scores, about = ("test", "test_calibrated", "warnings"), ("epoch", "versions", "git", "data")
    runs = [
        {"name": r.name, "arm": r.arm, "seed": r.seed, "state": r.state, "error": r.error, "run": str(r.folder), "config": r.config}
        | {name: r.results[name] for name in scores if name in r.results}
        | {name: r.about[name] for name in about if name in r.about}
        for r in material.runs
    ]
    verdicts = [sentence(v, material.verdicts) for v in material.verdicts.verdicts] if material.verdicts else headline(material)
    return {"title": material.title, "verdicts": verdicts, "baseline": material.baseline, "runs": runs, "tables": tables}
