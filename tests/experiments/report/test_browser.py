"""The page in a real Chromium: no error, no request; sorting, filtering, hover, keys and CSV; axe-core; light and dark, narrow and wide.

Where AXE names axe-core's axe.min.js (npm), it looks for what people with disabilities stumble over. Where SHOTS names a folder,
screenshots are left there to be looked at.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.report.command import sections
from experiments.report.material import gather, plain
from experiments.report.page import page
from tests.experiments.report.browser import CHROMIUM, DRIVER, Browser, browser
from tests.experiments.report.made import HOSTILE, hostile_comparison

WHERE = "no chromium and chromedriver here (apt-get install chromium chromium-driver)"
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=WHERE)
AXE = os.environ.get("AXE", "")
RIGHT, ESCAPE = "\ue014", "\ue00c"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = hostile_comparison(tmp_path_factory.mktemp("browser") / "compared")
    material = gather([str(folder)])
    (folder / "report.html").write_text(page(material, sections(material)))
    return folder / "report.html"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_opens_without_an_error_or_a_request_and_fits(chromium: Browser, file: Path, width: int, scheme: str) -> None:
    chromium.media(prefers_color_scheme=scheme)
    chromium.console()
    chromium.requests()
    chromium.open(file, width)
    assert chromium.console() == []
    assert [address for address in chromium.requests() if not address.startswith("data:")] == [file.resolve().as_uri()]
    assert chromium.run("return window.broken") is None
    assert chromium.run("return document.documentElement.scrollWidth <= window.innerWidth")
    flat = "filter(s => s.getBoundingClientRect().height < 40).map(s => s.closest('figure').id)"
    assert chromium.run(f"return Array.from(document.querySelectorAll('figure svg')).{flat}") == []
    ink = chromium.run("return getComputedStyle(document.querySelector('#scores svg')).color")
    paper = chromium.run("return getComputedStyle(document.body).backgroundColor")
    assert (ink, paper) == (("rgb(27, 27, 27)", "rgb(255, 255, 255)") if scheme == "light" else ("rgb(233, 233, 233)", "rgb(21, 21, 21)"))
    if folder := os.environ.get("SHOTS"):
        height = chromium.run("return document.documentElement.scrollHeight")
        chromium.size(width, min(height, 16000))
        chromium.screenshot(Path(folder) / f"report-{width}-{scheme}.png")


def test_a_heading_sorts_and_says_so(chromium: Browser, file: Path) -> None:
    chromium.open(file)
    names = "return Array.from(document.querySelectorAll('#arms-table tbody th')).map(c => c.textContent)"
    sorts = "return Array.from(document.querySelectorAll('#arms-table thead th')).map(c => c.getAttribute('aria-sort'))"
    click = "document.querySelectorAll('#arms-table thead button')[arguments[0]].click()"
    arms = [plain(name) for name in HOSTILE]
    assert chromium.run(names) == arms
    assert set(chromium.run(sorts)) == {"none"}
    heads = chromium.run("return Array.from(document.querySelectorAll('#arms-table thead th')).map(c => c.textContent)")
    difference = heads.index("difference (points)")
    chromium.run(click, difference)  # -5.8, 3.3, 16.1, 21.7; the baseline has none and stays last
    assert chromium.run(names) == [*arms[1:], arms[0]]
    chromium.run(click, difference)
    assert chromium.run(names) == [*arms[:0:-1], arms[0]]
    assert [s for s in chromium.run(sorts) if s != "none"] == ["descending"]


def test_a_table_is_filtered_by_name(chromium: Browser, file: Path) -> None:
    chromium.open(file)
    typed = "const f = document.getElementById('each-run-filter'); f.value = arguments[0]; f.dispatchEvent(new Event('input'));"
    shown = "document.querySelectorAll('#each-run-table tbody tr:not([hidden])').length"
    left = f"return [{shown}, document.getElementById('each-run-filter-count').textContent]"
    assert chromium.run(typed + left, "HYPERLINK") == [3, "3 of 15 shown"]
    assert chromium.run(typed + left, "") == [15, "15 of 15 shown"]


def test_hover_and_arrow_keys_name_the_run(chromium: Browser, file: Path) -> None:
    chromium.open(file)
    tip = "return [document.getElementById('tip').textContent, document.querySelectorAll('#val-accuracy .lit').length]"
    place = (
        "const g = document.querySelector('#val-accuracy [data-series=\"3\"] path');"
        "g.scrollIntoView({block: 'center', behavior: 'instant'});"
        "const p = g.getPointAtLength(g.getTotalLength() / 3).matrixTransform(g.getScreenCTM()); return [p.x, p.y]"
    )
    chromium.point(*chromium.run(place))
    assert chromium.run(tip) == [f"{plain(HOSTILE[3])}, seed 0", 1]
    chromium.point(2, 2)
    chromium.run("document.querySelector('#val-accuracy .drawing').focus()")
    chromium.keys(RIGHT, RIGHT)
    assert chromium.run(tip) == [f"{plain(HOSTILE[1])}, seed 0", 1]
    chromium.keys(ESCAPE)
    assert chromium.run(tip) == ["", 0]


def test_csv_has_all_rows_and_no_formula(chromium: Browser, file: Path) -> None:
    chromium.open(file)
    lines = chromium.run("return report.csv('scores')").splitlines()
    assert lines[0] == "arm,accuracy,from,to,seeds,each seed"
    assert len(lines) == 1 + len(HOSTILE)
    assert lines[2].startswith('"""><img src=x onerror=""window.broken=1"">",')
    assert lines[5].startswith("\"'=HYPERLINK(")


def test_axe_finds_no_serious_violation(chromium: Browser, file: Path) -> None:
    if not AXE:
        pytest.skip("AXE names no axe.min.js of axe-core")
    for scheme in ("light", "dark"):
        chromium.media(prefers_color_scheme=scheme)
        chromium.open(file)
        chromium.run("for (const d of document.querySelectorAll('details')) d.open = true;")
        chromium.run(Path(AXE).read_text())
        told = "r.violations.map(v => [v.impact, v.id, v.nodes.length, v.nodes[0].html])"
        found = chromium.run_async(f"const done = arguments[0]; axe.run().then(r => done({told}))")
        assert [v for v in found if v[0] in ("serious", "critical")] == []
