"""What figures show, against hand-made expectations: risk, bins, confusion, the Pareto front, sweeps, the long tail, the gallery's rows."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.metrics import METRICS, Answers
from experiments.plan import FILE, read
from experiments.report import comparing, confidence, sweeps, training
from experiments.report.facts import runs_table, score_table
from experiments.report.gallery import EACH, Layout, chosen, small, tallest
from experiments.report.ink import Picture
from experiments.report.material import Material, gather
from inputs.store import write_json
from tests.experiments.report.made import comparison_at, run_at


def answers(confidence_: list[float], right: list[bool], label: list[int] | None = None) -> Answers:
    labels = np.array(label or [0] * len(right))
    sure, ok = np.array(confidence_), np.array(right)
    return Answers(labels, np.where(ok, labels, labels + 1), sure, np.log(sure), sure, sure, 3)


def table_of(pictures: list[Picture], name: str) -> list[tuple[object, ...]]:
    (found,) = (p for p in pictures if p.name == name)
    return [tuple(row) for row in found.table.rows]


# ---------------------------------------------------------------- confidence


def test_risk_is_the_error_rate_of_the_most_confident() -> None:
    a = answers([0.9, 0.5, 0.8, 0.6], [True, False, False, True])  # by confidence: right, wrong, right, wrong
    assert confidence.risks(a, np.array([0.25, 0.5, 0.75, 1.0])).tolist() == pytest.approx([0, 1 / 2, 1 / 3, 1 / 2])


def test_rows_of_equal_confidence_share_their_risk() -> None:
    for right in ([True, False, True], [False, True, True], [True, True, False]):
        a = answers([0.7, 0.7, 0.7], right)
        assert confidence.risks(a, np.array([1 / 3, 2 / 3, 1.0])).tolist() == pytest.approx([1 / 3] * 3)


def test_bins_give_the_calibration_error() -> None:
    draw = np.random.default_rng(0)
    a = answers((draw.random(97) * 0.99 + 0.01).tolist(), (draw.random(97) < 0.6).tolist())
    rows, sure, right = confidence.binned([a])
    some = rows > 0
    assert rows.sum() == 97
    assert (rows[some] * np.abs(sure - right)[some]).sum() / 97 == pytest.approx(METRICS["ece"].of(a))
    assert confidence.binned([answers([1.0], [True])])[0].tolist() == [0] * 14 + [1]  # exactly sure is in the last


def test_confusion_counts_all_seeds(tmp_path: Path) -> None:
    folder = comparison_at(tmp_path / "c", {"a": {"lr": 0.1}, "b": {"lr": 0.2}}, 2)
    material = gather([str(folder)])
    counts = confidence.counts_of(material, "a")
    assert counts is not None
    assert counts.sum(1).tolist() == [40, 40, 40]
    by_hand = sum(int((cell.said["raw"].predicted == cell.said["raw"].label).sum()) for cell in material.of("a"))
    assert counts.trace() == by_hand
    rows = table_of(list(confidence.pictures(material, 1)), "confusion-1")
    assert sum(int(str(row[2])) for row in rows) == 120
    assert {row[0] for row in rows} == {"cat", "dog", "eel"}
    assert rows[0][0] != rows[0][1]  # what was taken for another comes first


def test_no_confusion_of_more_classes_than_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    material = gather([str(comparison_at(tmp_path / "c", {"a": {"lr": 0.1}, "b": {"lr": 0.2}}, 1))])
    monkeypatch.setattr(confidence, "MOST_CONFUSED", 2)  # there are three
    assert "confusion-1" not in {picture.name for picture in confidence.pictures(material, 1)}


# ---------------------------------------------------------------- cost


FRONTS = [(True, True, [0, 3]), (False, True, [3, 4]), (True, False, [0, 2]), (False, False, [2])]


@pytest.mark.parametrize(("less", "higher", "front"), FRONTS)
def test_the_pareto_front(less: bool, higher: bool, front: list[int]) -> None:
    points = [(1.0, 5.0), (2.0, 5.0), (4.0, 1.0), (3.0, 9.0), (4.0, 8.0)]
    assert comparing.pareto(points, less_cost=less, higher=higher) == front


def test_a_cost_that_all_share_is_no_price(tmp_path: Path) -> None:
    material = gather([str(comparison_at(tmp_path / "c", {"a": {"lr": 0.1}, "b": {"lr": 0.2}}, 2))])
    found = list(comparing.pictures(material))
    assert [p.name for p in found] == [
        "forest", "scores", "cost-seconds", "cost-images-per-second", "only-seconds", "only-images-per-second", "only-peak-memory-mb",
    ]  # fmt: skip
    (row,) = table_of(found, "forest")
    assert row[0] == "b"
    verdicts = material.verdicts
    assert verdicts is not None
    (v,) = verdicts.verdicts
    assert v.estimate is not None
    assert row[1:4] == pytest.approx((100 * v.estimate.mean, 100 * v.low, 100 * v.high), abs=1e-5)


# ---------------------------------------------------------------- epochs


def test_curves_have_each_run_and_its_values(tmp_path: Path) -> None:
    runs = [run_at(tmp_path / name, {"lr": lr}, 0) for name, lr in (("a", 0.1), ("b", 0.2))]
    found = list(training.pictures(gather([str(run) for run in runs])))
    assert [p.name for p in found] == ["val-accuracy", "val-nll", "train-loss", "effective-rank", "cosine"]
    assert found[0].series == ("lr=0.1, seed 0", "lr=0.2, seed 0")
    assert table_of(found, "val-nll")[:2] == [("lr=0.1", 0, 1, 1.0), ("lr=0.1", 0, 2, 0.5)]
    assert table_of(found, "train-loss")[1][3] == pytest.approx(1.1)  # 2 / 2 + 0.1
    assert training.points_of(gather([str(runs[0])]).runs[0], lambda e: float("nan"), 1) == []


def test_what_joined_a_plan_later_is_marked(tmp_path: Path) -> None:
    folder = comparison_at(tmp_path, {"a": {"layer": "A"}, "b": {"layer": "B"}, "c": {"layer": "C"}}, 3)
    plan = read(folder)
    assert plan
    plan = replace(plan, arms=(*plan.arms[:2], replace(plan.arms[2], exploratory=True)), later_seeds=(2,))
    write_json(folder / FILE, plan.body())
    found = gather([str(folder)])
    marked = " (exploratory)"
    names = [f"{arm}, seed {seed}{marked if arm == 'c' or seed == 2 else ''}" for seed in range(3) for arm in "abc"]
    assert [row[0] for row in runs_table(found).rows] == names
    assert [row[0] for row in score_table(found).rows] == ["a", "b", "c" + marked]
    assert {row[score_table(found).headings.index("seeds")] for row in score_table(found).rows} == {"3 (1 exploratory)"}
    assert [row[0] for row in comparing.forest(found).table.rows] == ["b" + marked, "c" + marked]  # both rest on the later seed


# ---------------------------------------------------------------- what an option does


def swept(folder: Path, arms: dict[str, dict[str, object]]) -> Material:
    return gather([str(comparison_at(folder, arms, 1))])


def test_arms_that_differ_in_one_option_make_a_line(tmp_path: Path) -> None:
    arms: dict[str, dict[str, object]] = {f"n{x}, {m}": {"noise": x, "model": m} for m in ("a", "b") for x in (0.2, 0.0, 0.1)}
    found = list(sweeps.pictures(swept(tmp_path / "c", arms)))
    noise = table_of(found, "sweep-noise")
    assert [(row[0], row[1]) for row in noise] == [(f"n{x}, {m}", x) for m in ("a", "b") for x in (0.0, 0.1, 0.2)]
    assert {p.name for p in found} == {"sweep-noise", "long-tail"}


def test_k_in_a_layer_and_rates_of_wrong_labels_are_numbers(tmp_path: Path) -> None:
    assert sweeps.value_of({"layer": "Kvt(K=9, a=1)"}, "K") == 9
    assert sweeps.value_of({"layer": "Kvt(K=9) | Kvt(K=4)"}, "K") is None
    assert sweeps.value_of({"layer": "Attention"}, "K") is None
    assert sweeps.value_of({"label_noise": "0.4:asymmetric"}, "label_noise") == 0.4
    assert sweeps.value_of({}, "label_noise") == 0
    arms: dict[str, dict[str, object]] = {f"K={k}": {"layer": f"Kvt(K={k})"} for k in (16, 4)}
    arms["dense"] = {"layer": "Attention"}
    assert [row[:2] for row in table_of(list(sweeps.pictures(swept(tmp_path / "c", arms))), "sweep-k")] == [("K=4", 4.0), ("K=16", 16.0)]


def test_several_k_in_one_run(tmp_path: Path) -> None:
    of_k = {str(k): {"accuracy": 0.5 + k / 100} for k in (25, 1, 5)}
    votes = {"uniform": of_k, "one": {"1": {"accuracy": 1}}}
    run = run_at(tmp_path / "r", {"head": "knn"}, 0, predictors={"scores": {}, "by_k": {"raw": votes}})
    found = list(sweeps.pictures(gather([str(run)])))
    assert table_of(found, "by-k") == [("uniform", 1, 51.0), ("uniform", 5, 55.0), ("uniform", 25, 75.0)]


def test_a_long_tail_has_rare_classes_left_and_even_ones_no_figure(tmp_path: Path) -> None:
    run = run_at(tmp_path / "r", {"head": "knn"}, 0)
    material = gather([str(run)])
    rows = table_of(list(sweeps.pictures(material)), "long-tail")
    assert [row[1:3] for row in rows] == [("eel", 10), ("dog", 20), ("cat", 60)]
    said = material.cells[0].said["raw"]
    assert rows[0][3] == pytest.approx(100 * said.right[said.label == 2].mean(), abs=1e-3)
    even = run_at(tmp_path / "e", {"head": "knn"}, 0, data={"class_counts": [10, 9, 8]})
    assert not list(sweeps.pictures(gather([str(even)])))


def test_of_very_many_votes_one_of_each_arm_is_drawn(tmp_path: Path) -> None:
    names = ("linear", "uniform", "distance", "attention", "interpolation")
    votes = {name: {"1": {"accuracy": 0.5}, "5": {"accuracy": 0.75}} for name in names}
    for lr in (0.1, 0.2, 0.3):
        run_at(tmp_path / str(lr), {"lr": lr}, 0, predictors={"scores": {}, "by_k": {"raw": votes}})
    (found,) = [p for p in sweeps.pictures(gather([str(tmp_path)])) if p.name == "by-k"]
    assert found.series == tuple(f"lr={lr}: interpolation" for lr in (0.1, 0.2, 0.3))
    assert len(found.table.rows) == 3 * 4 * 2  # the linear head looks at no neighbors
    assert found.about.endswith("Drawn is one predictor of each arm; the data have all.")


@pytest.mark.parametrize(
    ("unit", "most", "wanted", "shown"),
    [("M", 85.8, "M", 85.8), ("M", 0.1, "M", 0.1), ("M", 0.0088, "thousand", 8.8), ("M", 0.00008, "", 80), ("GFLOPs", 2e-4, "MFLOPs", 0.2),
     ("GFLOPs", 2e-8, "kFLOPs", 0.02), ("s", 1e-9, "s", 1e-9)],
)  # fmt: skip
def test_costs_of_small_models_are_in_smaller_units(unit: str, most: float, wanted: str, shown: float) -> None:
    found, scale = comparing.in_unit(unit, most)
    assert (found, most * scale) == (wanted, pytest.approx(shown))


# ---------------------------------------------------------------- the gallery


def test_pictures_of_few_depths_stand_side_by_side() -> None:
    flat, deep = Layout(3, 1, 1.0), Layout(3, 4, 1.0)
    assert (flat.across, deep.across) == (3, 4)
    assert flat.height < 1.5 < 3 < deep.height
    places = {layout: [layout.place(query, depth) for query in range(3) for depth in range(layout.depths)] for layout in (flat, deep)}
    for layout, found in places.items():
        for (x, y), (other_x, other_y) in itertools.combinations(found, 2):
            assert abs(x - other_x) >= 1 or abs(y - other_y) >= layout.tall  # none covers another
        assert max(y for _, y in found) + layout.tall <= layout.height


def test_the_gallery_shows_right_rows_hesitant_mistakes_and_the_surest() -> None:
    sure = [0.9, 0.5, 0.8, 0.4, 0.7, 0.6, 0.95, 0.3]
    right = [True, True, False, False, False, False, False, True]
    kinds = chosen(answers(sure, right))
    assert [kind for kind, _ in kinds] == ["right"] * EACH + ["wrong, not sure"] * 2 + ["surest mistake"] * 2
    assert [row for kind, row in kinds if kind == "surest mistake"] == [6, 2]
    assert [row for kind, row in kinds if kind == "wrong, not sure"] == [3, 5]
    assert len({row for _, row in kinds}) == len(kinds)
    assert chosen(answers([0.5, 0.6], [True, True]))[-1][0] == "right"
    assert chosen(answers([0.5], [False])) == [("surest mistake", 0)]


def test_images_are_small_in_a_page() -> None:
    image = small(np.linspace(0, 1, 200 * 100 * 3).reshape(200, 100, 3))
    assert image.shape == (48, 24, 3)
    assert tallest([image]) == 2.0
    assert small(np.full((8, 8, 3), 0.5)).shape == (8, 8, 3)
