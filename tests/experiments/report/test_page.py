"""The page without a browser: what it holds, what it must not hold, and that the same runs give the same bytes."""

from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from experiments.cells import place_of
from experiments.read import PREDICTIONS, RESULTS, kept, results
from experiments.report.command import Asked, build, sections, watch
from experiments.report.facts import predictors_table
from experiments.report.ink import Table
from experiments.report.material import gather, plain
from experiments.report.page import MOST_ROWS, as_json, page, sortable
from main import main
from tests.experiments.report.made import EPOCHS, HOSTILE, comparison_at, hostile_comparison, run_at
from utils import BadOption

VOID = {"meta", "link", "input", "br", "img", "hr"}


class Read(HTMLParser):
    """All tags with their attributes, the text of each kind of tag, and whether tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.figures: list[dict[str, int]] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attributes}))
        self.texts.setdefault(tag, []).append("")
        if tag == "figure":
            self.figures.append({})
        elif "figure" in self.open:
            self.figures[-1][tag] = self.figures[-1].get(tag, 0) + 1
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attributes}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        if self.open:
            self.texts[self.open[-1]][-1] += text

    def named(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]


def unpacked(table: dict[str, Any]) -> list[list[Any]]:
    """The columns of a table in the page's JSON."""
    return [[column["words"][i] for i in column["at"]] if isinstance(column, dict) else column for column in table["columns"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hostile_comparison(tmp_path_factory.mktemp("report") / "compared")


@pytest.fixture(scope="module")
def html(folder: Path) -> str:
    material = gather([str(folder)])
    return page(material, sections(material))


@pytest.fixture(scope="module")
def read(html: str) -> Read:
    return Read(html)


def test_one_heading_unique_ids_and_links_that_lead_somewhere(read: Read) -> None:
    assert len(read.named("h1")) == len(read.named("main")) == 1
    ids = [attributes["id"] for _, attributes in read.tags if "id" in attributes]
    assert len(ids) == len(set(ids)) > 50
    inside = [a["href"][1:] for tag, a in read.tags if a.get("href", "").startswith("#") and tag != "image"]
    told = [word for _, a in read.tags for word in a.get("aria-labelledby", "").split()]
    used = [name for _, a in read.tags for value in a.values() for name in re.findall(r"url\(#([^)]+)\)", value)]
    assert used
    assert set(inside + told + used) <= set(ids)


def test_the_page_asks_for_nothing(read: Read) -> None:
    for tag, attributes in read.tags:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            assert attributes.get(name, "#").startswith(("#", "data:")), (tag, attributes)
        for name in set(attributes) - {"aria-label", "content"}:  # words
            assert "url(" not in attributes[name].replace("url(#", ""), (tag, attributes)
    assert "url(" not in "".join(read.texts["style"])
    assert "@import" not in read.texts["style"][0]
    (policy,) = (a["content"] for a in read.named("meta") if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'; img-src data:;")


def test_every_figure_has_a_title_words_and_its_data(read: Read) -> None:
    figures = [a["id"] for a in read.named("figure")]
    expected = {"forest", "scores", "cost-seconds", "only-seconds", "val-accuracy", "val-nll", "train-loss", "effective-rank", "cosine"}
    expected |= {"risk-coverage", "long-tail"}
    expected |= {f"{kind}-{arm}" for kind in ("reliability", "confusion") for arm in range(1, 6)}
    assert expected <= set(figures)
    for name, held in zip(figures, read.figures, strict=True):
        assert held["h3"] == held["svg"] == held["table"] == held["details"] == held["title"] == held["desc"] == 1, name
        assert held["tr"] > 1, name
    assert all(a["role"] == "img" and a["aria-labelledby"] for a in read.named("svg"))
    assert all(a.get("scope") for a in read.named("th"))


def test_what_comes_from_outside_stays_text(html: str, read: Read) -> None:
    assert len(read.named("script")) == 2
    assert not read.named("img")
    assert not [a for _, a in read.tags for name in a if name.startswith("on")]
    headings = read.texts["h3"]
    for name in HOSTILE:
        assert any(text.startswith(f"Reliability: {plain(name)[:40]}") for text in headings), name
    assert "\x1b" not in html
    assert "\u202e" not in html
    body = json.loads(read.texts["script"][0])
    assert unpacked(body["tables"]["arms"])[0] == [plain(name) for name in HOSTILE]


def test_json_in_a_script_cannot_end_it() -> None:
    value = {"</script><!--": ["\u2028&", float("nan"), 1.5, None]}
    text = as_json(value)
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"</script><!--": ["\u2028&", None, 1.5, None]}


def test_a_failed_cell_is_told_and_ends_nothing(read: Read) -> None:
    items = " ".join(read.texts["li"])
    assert f"{plain(HOSTILE[1])}, seed 2: failed: {plain(HOSTILE[2])}" in items
    assert "cells without a result that counts: 1 failed" in items
    body = json.loads(read.texts["script"][0])
    assert [run["state"] for run in body["runs"]].count("failed") == 1


def test_the_verdict_comes_first_and_configurations_are_compared(read: Read) -> None:
    assert [a["id"] for a in read.named("section")][:2] == ["verdict", "table"]
    differ = [a for a in read.named("tr") if a.get("class") == "differs"]
    assert len(differ) == (5 - 1) * 3 * 2 - 2  # layer and note of each run beside the baseline's; the failed one has none
    assert any(text.startswith("python main.py --config ") for text in read.texts["pre"])


def test_the_data_of_a_figure_is_in_the_page_twice_and_alike(read: Read) -> None:
    tables = json.loads(read.texts["script"][0])["tables"]
    assert set(tables) == {"arms", "each-run"} | {a["id"] for a in read.named("figure")}
    arm, seed, epoch, _ = unpacked(tables["val-accuracy"])
    assert len(arm) == 14 * EPOCHS <= MOST_ROWS
    assert list(zip(arm, seed, epoch, strict=True))[6] == (plain(HOSTILE[1]), 0, 2)
    assert tables["val-accuracy"]["series"][0] == f"{plain(HOSTILE[0])}, seed 0"


def test_the_same_runs_give_the_same_bytes(tmp_path: Path) -> None:
    run = run_at(tmp_path / "run", {"lr": 0.1}, 0)
    found = []
    for place in ("one", "two"):
        out = tmp_path / place
        assert main(["report", str(run), "--output_dir", str(out), "--without_pictures"]) == 0
        found.append({f.relative_to(out): f.read_bytes() for f in sorted(out.rglob("*")) if f.is_file()})
    assert found[0] == found[1]
    assert len(found[0]) > 15
    assert {f.suffix for f in found[0]} == {".html", ".svg", ".png"}


# ---------------------------------------------------------------- what it can be about


def test_of_one_run(tmp_path: Path) -> None:
    run = run_at(tmp_path / "run", {"layer": "Attention", "dataset": "digits"}, 3)
    material = gather([str(run)])
    read = Read(page(material, sections(material)))
    assert any("on 60 test rows, one seed" in text and "Calibration took NLL from" in text for text in read.texts["li"])
    assert read.texts["h1"] == ["Attention, seed 3, on digits"]
    assert read.texts["h2"][:2] == ["Result", "Table"]
    assert [a["id"] for a in read.named("table") if a.get("class") == "sortable"] == ["each-run-table"]
    assert not read.named("input")  # a filter of one line
    assert "forest" not in [a["id"] for a in read.named("figure")]


def test_of_one_arm_its_predictors_are_told(tmp_path: Path) -> None:
    for seed in (0, 1):
        both = {"raw": {"accuracy": 0.5 + 0.25 * seed, "nll": 1.0, "ece": 0.25}, "calibrated": {"accuracy": 0.5}}
        of_each = {"uniform": both, "distance": {**both, "train_leave_one_out": 0.5}}
        run_at(tmp_path / str(seed), {"head": "knn"}, seed, predictors={"scores": of_each})
    material = gather([str(tmp_path)])
    found = predictors_table(material)
    assert found is not None
    assert list(found.rows) == [[name, 62.5, 1.0, 0.25, 50.0, None, None] for name in ("uniform", "distance")]
    read = Read(page(material, sections(material)))
    assert [a["id"] for a in read.named("table") if a.get("class") == "sortable"] == ["arms-table", "predictors-table", "each-run-table"]
    assert any("nothing to compare it with" in text for text in read.texts["p"])


def test_numbers_of_a_column_have_as_many_digits() -> None:
    shown = sortable("t", "T", Table(("name", "x", "n"), [("a", 53.2, 1), ("b", 1055.71, 2000), ("c", None, 3)]))
    assert re.findall(r"<td[^>]*>([^<]*)</td>", shown) == ["53.20", "1", "1,055.71", "2,000", "", "3"]


def test_of_a_folder_with_runs_in_every_state(tmp_path: Path) -> None:
    run_at(tmp_path / "a" / "0", {"lr": 0.1}, 0)
    run_at(tmp_path / "a" / "1", {"lr": 0.1}, 1)
    run_at(tmp_path / "b", {"lr": 0.2}, 0)
    damaged = run_at(tmp_path / "c", {"lr": 0.3}, 0)
    (damaged / "results.json").write_text("{")
    going = run_at(tmp_path / "d", {"lr": 0.4}, 0)
    (going / "results.json").unlink()
    with (going / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 6, "tr')  # a line that is being written
    material = gather([str(tmp_path)])
    assert material.arms == ("lr=0.1", "lr=0.2", "lr=0.3", "lr=0.4")
    assert [run.state for run in material.runs[:4]] == ["done", "done", "done", "unreadable"]
    assert material.runs[3].error
    assert not material.runs[4].results
    assert len(material.runs[4].epochs) == EPOCHS
    assert material.verdicts is not None
    assert [v.verdict == "no result" for v in material.verdicts.verdicts] == [False, True, True]
    read = Read(page(material, sections(material)))
    curves = json.loads(read.texts["script"][0])["tables"]["val-accuracy"]["series"]
    assert curves == ["lr=0.1, seed 0", "lr=0.1, seed 1", "lr=0.2, seed 0", "lr=0.3, seed 0", "lr=0.4, seed 0"]


def test_arms_are_named_by_what_tells_them_apart(tmp_path: Path) -> None:
    """An option that one of them does not have is told where nothing else differs."""
    flags: list[dict[str, Any]] = [{"head": "linear"}, *({"head": "knn", "embed_dim": d, "k_train": 16} for d in (0, 32))]
    runs = [str(run_at(tmp_path / str(number), of, 0)) for number, of in enumerate(flags)]
    assert gather(runs).arms == ("linear", "knn, embed_dim=0", "knn, embed_dim=32")
    assert gather(runs[:2]).arms == ("linear", "knn")


def test_of_runs_that_were_compared_by_path(tmp_path: Path, capsys: Any) -> None:
    """The verdict is that of `compare`: its baseline, metric, margin, and which predictors inside the runs were arms."""
    runs = [str(run_at(tmp_path / str(seed), {}, seed)) for seed in range(3)]
    words = ["--within", "linear.raw,linear.calibrated", "--baseline", "linear.calibrated", "--metric", "nll", "--margin", "0.5"]
    assert main(["compare", *runs, *words, "--output_dir", str(tmp_path / "compared")]) == 0
    told = capsys.readouterr().out
    material = gather([str(tmp_path / "compared")])
    assert material.arms == ("linear.raw", "linear.calibrated")
    read = Read(page(material, sections(material)))
    sentence = next(line for line in told.splitlines() if line.startswith("linear.raw ") and "linear.calibrated" in line)
    assert any(text.startswith(sentence[:80]) for text in read.texts["li"])
    assert material.verdicts is not None
    assert (material.metric.name, material.verdicts.comparison.margin) == ("nll", 0.5)
    assert [material.of(arm)[0].said.keys() for arm in material.arms] == [{"raw": 0}.keys(), {"calibrated": 0}.keys()]
    assert len(material.runs) == 3


def test_runs_of_other_rows_are_shown_and_not_compared(tmp_path: Path) -> None:
    one, two = (run_at(tmp_path / name, {"lr": lr}, 0, test_rows=name) for name, lr in (("a", 0.1), ("b", 0.2)))
    material = gather([str(one), str(two)])
    assert material.verdicts is None
    assert "same test rows" in material.why_not
    read = Read(page(material, sections(material)))
    assert any("same test rows" in text for text in read.texts["p"])
    assert {"scores", "reliability-2"} <= {a["id"] for a in read.named("figure")}


def test_watch_builds_until_no_run_is_left(tmp_path: Path) -> None:
    arms = {"slow": {"lr": 0.1}, "quick": {"lr": 0.2}}
    folder = comparison_at(tmp_path / "compared", arms, 2, pending=[("quick", 1)])
    seen: list[str] = []

    def wait(seconds: float) -> None:
        seen.append((folder / "report.html").read_text())
        if len(seen) == 2:
            run_at(place_of(folder, "quick", 1).run, arms["quick"], 1)

    material = watch(Asked([str(folder)], watch=True), folder, wait)
    assert len(seen) == 2
    assert seen[0] == seen[1]  # nothing has changed, and nothing was built
    assert 'id="going"' in seen[0]
    assert "3 done, 1 pending" in seen[0]
    build(material, Asked([str(folder)], without_pictures=True), folder)
    last = (folder / "report.html").read_text()
    assert "4 runs, 2 arms: 4 done" in last
    assert 'id="going"' not in last


@pytest.mark.parametrize("words", [[], ["nowhere"], ["."]])
def test_what_is_no_run_is_refused(words: list[str], tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_hundred_runs_fit(tmp_path: Path) -> None:
    folder = comparison_at(tmp_path / "compared", {f"lr={i}": {"lr": i} for i in range(20)}, 5)
    material = gather([str(folder)])
    content = page(material, sections(material)).encode()
    assert len(material.runs) == 100
    assert len(content) < 15e6
    assert "Figures of the first 12 of 20 arms." in content.decode()


def test_pipes_in_a_strangers_run_are_not_waited_for(tmp_path: Path) -> None:
    run = run_at(tmp_path / "run", {"lr": 0.1}, 0)
    for name in ("args.txt", "metrics.jsonl"):
        (run / name).unlink()
        os.mkfifo(run / name)
    (found,) = gather([str(run)]).runs
    assert (found.state, found.epochs, found.command) == ("done", (), "")
    for name, read in ((PREDICTIONS, kept), (RESULTS, results)):
        (run / name).unlink()
        os.mkfifo(run / name)
        with pytest.raises(BadOption, match=rf"needs a {name} that can be read in every run \(it is a pipe, a device or a directory\)"):
            read(run)
