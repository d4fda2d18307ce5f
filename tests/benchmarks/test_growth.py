"""Growth: lines through points that were made by hand, and every series at tiny sizes. Never a timing."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks import machine
from benchmarks.growth import Grown, measured, page, power_law, short, straight_line, write
from benchmarks.growth_series import Series, Sizes, all_series
from benchmarks.timing import CPU, Ask, Effort, Group, Spread, Watch

TINY = Sizes(
    rows=(300, 600, 900),
    dims=(8, 12, 16),
    classes=(3, 7, 30),
    ks=(2, 3, 5),
    images=(2, 3, 5),
    sides=(8, 12, 16),
    judged=(20, 40, 60),
    calibrated=(2, 3, 5),
    dim=8,
    middle=300,
    queries=11,
    batch=4,
    features=6,
    some_classes=5,
    rounds=2,
)


def by_hand(points: tuple[int, ...], seconds: list[float], peaks: tuple[float, ...] | None = None) -> Grown:
    def side(watch: Watch) -> None:
        watch.took(1.0)

    group = Group("growth", "as said", ("call",), ("2",), {str(p): side for p in points}, Effort(2, 1.0), memory=False)
    return Grown(Series("a sum", "rows", "row", 1, points, group), tuple(Spread(s, s, s) for s in seconds), peaks)


def test_a_power_law_is_found() -> None:
    x = [2, 4, 8, 16]
    c, exponent, error, off = power_law(x, [3 * n**1.5 for n in x])
    assert (c, exponent) == pytest.approx((3, 1.5))
    assert (error, off) == pytest.approx((0, 0), abs=1e-9)


def test_the_standard_error_is_that_of_least_squares() -> None:
    """Logarithms (0, 0), (1, 1 + d), (2, 2): the slope stays 1, and residuals are -d/3, 2d/3, -d/3, so s^2 = 6/9 d^2, Sxx = 2."""
    d = 0.3
    _, exponent, error, off = power_law([1, math.e, math.e**2], [1, math.exp(1 + d), math.exp(2)])
    assert exponent == pytest.approx(1)
    assert error == pytest.approx(math.sqrt(6 / 9 * d**2 / 2))
    assert off == pytest.approx(math.exp(2 * d / 3) - 1)


def test_a_straight_line_is_found_from_10_to_10_000() -> None:
    x = [10, 100, 1000, 10_000]
    assert straight_line(x, [5 + 2 * n for n in x]) == pytest.approx((5, 2, 0), abs=1e-6)
    assert straight_line(x, [0.001 * n for n in x]).fixed == pytest.approx(0, abs=1e-9)


def test_memory_of_one_more_is_that_between_the_last_two() -> None:
    assert by_hand((2, 4, 8), [1, 2, 4], (50, 10, 18)).bytes_each == 2 * 2**20
    assert by_hand((2, 4, 8), [1, 2, 4]).bytes_each is None


@pytest.mark.parametrize(("seconds", "text"), [(2.5, "2.50 s"), (0.0123, "12.3 ms"), (2e-6, "2 µs"), (-3e-8, "-30 ns"), (0, "0 ns")])
def test_seconds_of_any_size(seconds: float, text: str) -> None:
    assert short(seconds) == text


def test_every_series_runs_and_is_written(tmp_path: Path) -> None:
    found = [measured(series) for series in all_series(TINY)]
    assert {grown.series.axis for grown in found} == {"rows", "dimensions", "classes", "neighbors", "images", "tokens"}
    for grown in found:
        assert not grown.series.group.absent
        assert len(grown.seconds) == len(grown.series.points) == 3
        assert all(math.isfinite(value) and value > 0 for spread in grown.seconds for value in spread)
    facts = machine.about(Ask(threads=1, clock="cpu", device=CPU))
    write(tmp_path, found, facts)
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads((tmp_path / "growth.json").read_text())["series"]) == len(found)
    assert (tmp_path / "growth.md").read_text() == page(found, facts)


def test_the_table_says_what_was_found() -> None:
    """By hand: log10 of the seconds has slope .9608, and the middle point lies .0210 below the line, 4.9 %."""
    text = page([by_hand((10, 100, 1000), [0.012, 0.102, 1.002], (1, 2, 92))], machine.about(Ask(threads=1, clock="cpu", device=CPU)))
    row = [cell.strip() for cell in next(line for line in text.splitlines() if line.startswith("| a sum")).split("|")[1:-1]]
    assert row[:4] == ["a sum, a row", "rows", "10: 12 ms", "1,000: 1.00 s"]
    assert row[4:6] == ["0.96 ± 0.02", "0.99"]  # log10(1.002 / 0.102) = .992; sqrt(6 / 4 x .0210^2 / 2) = .018
    assert row[6:] == ["2 ms + 1 ms", "5% / 0%", "96.5 MB", "105 kB"]
    assert "- a sum (as said), a row, by rows: 10: 12 ms; 100: 102 ms; 1,000: 1.00 s" in text
