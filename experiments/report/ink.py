"""From a figure to ink: SVG that a page can hold beside others, and files for a paper. The same figure gives the same bytes."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from PIL import Image

from experiments.report.material import plain

WIDTH = 3.4  # inches: a column of a paper, and a phone
DPI = 300  # of a PNG
# Stands for the color of the text around: black on paper, light in the dark. Its opacity is for lines that stay behind.
TEXT = "#010203"
# Told apart in all common kinds of color blindness, on white and on black (a test measures it); lines and marks differ as well.
COLORS = ("#0077bb", "#d55e00", "#8d47fc", "#8a894d", "#b2337f", "#b37477")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
MARKS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
LEGEND = 10  # names that a legend can hold
STYLE: Any = {
    "font.size": 8,
    "font.family": ["DejaVu Sans"],
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "text.color": TEXT,
    "axes.edgecolor": TEXT,
    "axes.labelcolor": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "grid.color": TEXT,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.5,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.3,
    "lines.markersize": 4,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
    "image.composite_image": False,
    "text.parse_math": False,  # a name with dollars is no formula
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
}


@dataclass(frozen=True)
class Table:
    """The data of a figure."""

    headings: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure that will be drawn. `name`: its anchor and its files. `series`: what lines and marks of it are called, by number."""

    name: str
    title: str
    about: str
    table: Table
    draw: Callable[[Figure], None]
    height: float = 2.5
    series: tuple[str, ...] = ()


@dataclass(frozen=True)
class Drawn:
    """`page` goes into HTML; the others are files."""

    page: str
    svg: bytes
    png: bytes


def drawn(picture: Picture, *, files: bool = True) -> Drawn:
    with mpl.rc_context(STYLE | {"svg.hashsalt": picture.name}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of glyphs that the font lacks
        figure = Figure(figsize=(WIDTH, picture.height), layout="constrained")
        picture.draw(figure)
        if engine := figure.get_layout_engine():
            engine.execute(figure)
        figure.set_layout_engine("none")
        page = for_page(_svg(figure, "none"), picture)
        if not files:
            return Drawn(page, b"", b"")
        # Outlines instead of letters: no converter looks for a font, and no PDF that is made of it lacks one.
        paper = _svg(figure, "path").replace(TEXT, "#000000")
        figure.set(dpi=DPI, facecolor="white")
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
    return Drawn(page, paper.encode(), _png(canvas))


def _png(canvas: FigureCanvasAgg) -> bytes:
    """NOTE: not by matplotlib, which keeps an opaque paper's transparency and squeezes it hardest: twice the time, a tenth of the bytes."""
    png = io.BytesIO()
    Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").save(png, "png", compress_level=3, dpi=(DPI, DPI))
    return png.getvalue()


def _svg(figure: Figure, fonts: str) -> str:
    text = io.StringIO()
    with mpl.rc_context({"svg.fonttype": fonts}):
        # NOTE: by the canvas, because savefig draws twice
        FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return re.sub(r"<metadata>.*?</metadata>", "", text.getvalue(), flags=re.DOTALL)


def for_page(svg: str, picture: Picture) -> str:
    """SVG inside HTML: ids of its own, the page's text color, words for who can't see it; no request and no prolog."""
    svg = re.sub(r"<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    used = set(re.findall(r'href="#([^"]+)"', svg)) | set(re.findall(r"url\(#([^)]+)\)", svg))

    def named(match: re.Match[str]) -> str:
        found = match[1]
        if series := re.fullmatch(r"series_(\d+)", found):
            return f' data-series="{series[1]}"'
        return f' id="{picture.name}-{found}"' if found in used else ""

    def inside(tag: re.Match[str]) -> str:
        """NOTE: only in tags: between them are words and numbers that are read."""
        if "base64," in tag[0]:
            return re.sub(r"\s+", " ", tag[0].replace("base64,\n", "base64,")).replace("xlink:href", "href")
        found = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", tag[0]).replace("xlink:href", "href")
        found = re.sub(r'(href="#|url\(#)', lambda m: f"{m[1]}{picture.name}-", re.sub(r' id="([^"]*)"', named, found))
        # Numbers as fine as a screen can show, and no blank lines: half the size.
        return re.sub(r"\s+", " ", re.sub(r"(\d+\.\d\d)\d+", r"\1", found.replace(TEXT, "currentColor")))

    svg = re.sub(r"\n\s*", "\n", re.sub(r"<[^>]+>", inside, svg))
    box = re.search(r'viewBox="[^"]*"', svg)
    title, about = escape(plain(picture.title)), escape(plain(picture.about))
    words = f'<title id="{picture.name}-title">{title}</title><desc id="{picture.name}-desc">{about}</desc>'
    start = f'<svg {box[0] if box else ""} role="img" aria-labelledby="{picture.name}-title {picture.name}-desc">{words}'
    return (start + svg[svg.index(">") + 1 :]).strip()


# ---------------------------------------------------------------- for who draws


def look_of(number: int) -> dict[str, Any]:
    """Color and dashes of a line by its number: the first 24 differ."""
    return {"color": COLORS[number % len(COLORS)], "linestyle": DASHES[number // len(COLORS) % len(DASHES)]}


def mark_of(number: int) -> dict[str, Any]:
    return {"color": COLORS[number % len(COLORS)], "marker": MARKS[number % len(MARKS)], "linestyle": "none"}


def series(number: int) -> str:
    """The id of an artist, of which the page makes its name."""
    return f"series_{number}"


def cut(text: str, most: int = 44) -> str:
    """Short enough for a figure in column width; the table has all of it."""
    words = " ".join(plain(text).split())
    return words if len(words) <= most else f"{words[: most - 1]}…"


def legend_below(figure: Figure, handles: Sequence[Any], names: Sequence[str]) -> None:
    """Below the axes, never on a curve; nothing where names are too many to be read."""
    if 1 < len(names) <= LEGEND:
        columns = 1 if max(map(len, names)) > 24 else 2
        figure.legend(handles, [cut(name, 54) for name in names], loc="outside lower left", ncols=columns, handlelength=2.4)


def legend_height(names: Sequence[str]) -> float:
    """Inches that a legend takes."""
    if not 1 < len(names) <= LEGEND:
        return 0.0
    return 0.08 + 0.16 * (len(names) if max(map(len, names)) > 24 else (len(names) + 1) // 2)


def whole_epochs(axes: Any) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def log_scale(axes: Any, *, x: bool = False) -> None:
    """With plain numbers at 1, 2 and 5."""
    (axes.set_xscale if x else axes.set_yscale)("log")
    axis = axes.xaxis if x else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())
    axes.minorticks_off()
