"""curves.png: what it draws is what metrics.jsonl has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from evaluation.curves import drawn_curves, title_of

SPREAD = [{"effective_rank": 2.0, "cosine_between_classes": 0.75}, {"effective_rank": 5.0, "cosine_between_classes": -0.25}]


def epochs(*, bank: bool) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = [
        {"epoch": 1, "train": {"knn_nll": 2.0}, "val": {"accuracy": 0.5, "nll": 1.5}},
        {"epoch": 2, "train": {"knn_nll": 1.0}, "val": {"accuracy": 0.75, "nll": 0.5}},
    ]
    return [line | {"embeddings": spread} if bank else line for line, spread in zip(lines, SPREAD, strict=True)]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    found: list[Figure] = []
    save = Figure.savefig

    def kept(self: Figure, *args: Any, **kwargs: Any) -> None:
        found.append(self)
        save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", kept)
    return found


def curves_of(figure: Figure) -> dict[str, list[float]]:
    drawn = {str(line.get_label()): np.asarray(line.get_ydata()).tolist() for axes in figure.axes for line in axes.lines}
    return {label: values for label, values in drawn.items() if values}


def test_the_spread_of_the_embeddings_is_drawn_epoch_by_epoch(drawn: list[Figure]) -> None:
    picture = drawn_curves(epochs(bank=True), best_epoch=2)
    (figure,) = drawn
    curves = curves_of(figure)
    assert curves["training, knn_nll"] == [2, 1]
    assert curves["validation accuracy"] == [50, 75]
    assert curves["cosine between classes"] == [0.75, -0.25]
    assert [2.0, 5.0] in curves.values()  # the effective rank, on its own axis
    for axes in figure.axes:
        low, high = axes.get_ylim()
        assert all(low <= y <= high for line in axes.lines for y in np.asarray(line.get_ydata()).tolist())
    assert picture.startswith(b"\x89PNG")


def test_a_legend_lies_below_the_numbers_of_its_axis(drawn: list[Figure]) -> None:
    drawn_curves(epochs(bank=True), best_epoch=2)
    for axes in drawn[0].axes[:3]:
        legend = axes.get_legend()
        assert legend is not None
        lowest = min(label.get_window_extent().y0 for label in (*axes.get_xticklabels(), axes.xaxis.label))
        assert legend.get_window_extent().y1 <= lowest


@pytest.mark.parametrize("count", [1, 2, 3, 7, 60])
def test_epochs_are_whole_numbers(count: int, drawn: list[Figure]) -> None:
    line = epochs(bank=True)[0]
    drawn_curves([line | {"epoch": n + 1} for n in range(count)], best_epoch=1)
    for axes in drawn[0].axes[:3]:
        low, high = axes.get_xlim()
        shown = [tick for tick in axes.get_xticks() if low <= tick <= high]
        assert shown
        assert all(tick == round(tick) for tick in shown)


def test_the_title_says_the_run_and_how_its_epoch_was_chosen(drawn: list[Figure]) -> None:
    config = {"dataset": "npz:/far/away/$a_{b$.npz", "model": "vit", "layer": "KvtAttention(K=5)", "head": "knn", "seed": 3}
    drawn_curves(epochs(bank=False), best_epoch=2, title=title_of(config), rule="validation NLL")
    title = "$a_{b$.npz: vit with KvtAttention(K=5), head knn, seed 3\nepoch 2 of 2 was chosen: validation NLL"
    assert drawn[0].get_suptitle() == title
    assert title_of({"dataset": "wine", "model": "mlp", "head": "linear", "seed": 0}) == "wine: mlp, head linear, seed 0"


def test_a_head_without_a_bank_has_no_spread(drawn: list[Figure]) -> None:
    drawn_curves(epochs(bank=False), best_epoch=2)
    assert len(drawn[0].axes) == 2
