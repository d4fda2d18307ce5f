"""SVG for a page and for a paper: ids, colors, words, bytes."""

from __future__ import annotations

import io
import itertools
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

from experiments.report.ink import COLORS, TEXT, WIDTH, Picture, Table, cut, drawn, look_of, mark_of, series

WORDS = ' id="x" 0.123456 #010203 $\\frac{ <b>&amp;'


def picture(name: str) -> Picture:
    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.plot([0, 1, 2], [0.00123, 0.00321, 0.00222], marker="o", gid=series(4))
        axes.set_yticks([0.00125, 0.0025])
        axes.set_xlabel(WORDS)

    return Picture(name=name, title=WORDS, about="about <i>", table=Table(("a",), [(1,)]), draw=draw, series=("s",))


def test_figures_in_one_page_have_ids_of_their_own() -> None:
    pages = [drawn(picture(name), files=False).page for name in ("one", "two")]
    ids = [set(re.findall(r'<[^>]+ id="([^"]+)"', page)) for page in pages]
    used = [set(re.findall(r'(?:href="#|url\(#)([^")]+)', page)) for page in pages]
    assert all(used)
    assert not ids[0] & ids[1]
    for name, of_page, of_use in zip(("one", "two"), ids, used, strict=True):
        assert of_use | {f"{name}-title", f"{name}-desc"} == of_page


def test_words_are_left_as_they_are() -> None:
    page = drawn(picture("one"), files=False).page
    root = ET.fromstring(page)
    texts = ["".join(e.itertext()) for e in root.iter("text")]
    assert WORDS.strip() in [t.strip() for t in texts]
    assert {"0.00125", "0.00250"} <= {t.strip() for t in texts}  # shortened are coordinates, not what is read
    assert [e.text for e in root.iter("title")] == [WORDS]
    assert root.attrib["role"] == "img"
    assert [e.attrib["data-series"] for e in root.iter("g") if "data-series" in e.attrib] == ["4"]


def test_color_follows_the_page_and_is_black_on_paper() -> None:
    found = drawn(picture("one"))
    tags = "".join(re.findall(r"<[^>]+>", found.page))
    assert TEXT not in tags
    assert "currentColor" in tags
    assert TEXT not in found.svg.decode()
    assert "currentColor" not in found.svg.decode()


def test_files_are_a_column_wide_and_need_no_font() -> None:
    found = drawn(picture("one"))
    root = ET.fromstring(found.svg)
    assert root.attrib["width"] == f"{72 * WIDTH:.1f}".rstrip("0").rstrip(".") + "pt"
    assert not list(root.iter("{http://www.w3.org/2000/svg}text"))
    with Image.open(io.BytesIO(found.png)) as image:
        assert image.width == round(300 * WIDTH)


def test_the_same_figure_gives_the_same_bytes() -> None:
    assert drawn(picture("one")) == drawn(picture("one"))


def test_the_first_lines_and_marks_differ() -> None:
    assert len({str(look_of(i)) for i in range(24)}) == 24
    assert len({str(mark_of(i)) for i in range(18)}) == 18


def test_cut() -> None:
    assert cut("a\n b") == "a b"
    assert cut("abcdef", 4) == "abc…"


# ---------------------------------------------------------------- colors for everybody

# Of Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB: protanopia, deuteranopia, tritanopia
SEEN = (
    np.eye(3),
    np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
    np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]),
)


def linear(color: str) -> np.ndarray:
    rgb = np.array(to_rgb(color))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]])
    f = np.cbrt(to_xyz @ rgb.clip(1e-6, 1) / np.array([0.95047, 1.0, 1.08883]))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("kind", range(4))
def test_colors_are_told_apart_however_they_are_seen(kind: int) -> None:
    seen = [lab(SEEN[kind] @ linear(color)) for color in COLORS]
    apart = {(a, b): float(np.linalg.norm(seen[a] - seen[b])) for a, b in itertools.combinations(range(len(COLORS)), 2)}
    assert min(apart.values()) > 18, min(apart, key=lambda pair: apart[pair])


@pytest.mark.parametrize("paper", ["#ffffff", "#151515"])
def test_lines_stand_out_on_white_and_on_black(paper: str) -> None:
    """3 : 1, as WCAG 2.2 asks of graphics."""
    light = lambda color: float(np.array([0.2126, 0.7152, 0.0722]) @ linear(color)) + 0.05  # noqa: E731
    for color in COLORS:
        low, high = sorted((light(color), light(paper)))
        assert high / low >= 3, color
