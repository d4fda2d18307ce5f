"""A plan is what was declared; what joins later is told from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments import plan as plans
from experiments.grid import Arm
from experiments.plan import Plan, checked, extended, read, read_plan, seeds_of, sources_of
from inputs.store import write_json
from utils import BadOption

PLAN = Plan(arms=(Arm("A", {"layer": "A"}), Arm("B", {"layer": "B", "K": 9}, published={"accuracy": 77.6})), seeds=(0, 1), baseline="A")
YAML = """
about: a try
seeds: 2
baseline: two
metric: nll
common: {dataset: digits, num_epochs: 3}
arms:
  one: {layer: Attention}
  two: {layer: KvtAttention(K=4), num_epochs: 5, lr: 1e-3}
published:
  two: {accuracy: 77.64, where: a paper}
"""


def test_a_plan_comes_back_as_it_was_written(tmp_path: Path) -> None:
    assert read(tmp_path) is None
    write_json(tmp_path / plans.FILE, PLAN.body())
    assert read(tmp_path) == PLAN
    body = json.loads((tmp_path / plans.FILE).read_text())
    assert body["family"] == ["B"]
    write_json(tmp_path / plans.FILE, {**body, "baseline": "B"})
    with pytest.raises(BadOption, match="changed since it was written"):
        read(tmp_path)


def test_what_joins_is_exploratory() -> None:
    more = extended(PLAN, [PLAN.arms[1], Arm("C", {"layer": "C"})], {"seeds": (0, 1, 2, 3)})
    assert [(arm.name, arm.exploratory) for arm in more.arms] == [("A", False), ("B", False), ("C", True)]
    assert (more.seeds, more.later_seeds, more.family) == ((0, 1, 2, 3), (2, 3), ["B"])
    assert extended(PLAN, [], {"seeds": (0,)}) == PLAN  # nothing that was declared is taken back


def test_what_was_declared_stays() -> None:
    with pytest.raises(BadOption, match="metric contradicts the plan, which has accuracy, got 'nll'"):
        extended(PLAN, [], {"metric": "nll"})
    with pytest.raises(BadOption, match=r"has arm 'B' with another --K \(9\)"):
        extended(PLAN, [Arm("B", {"layer": "B", "K": 4})], {})


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (Plan(arms=PLAN.arms, seeds=(0,), baseline="Aa"), "baseline must be one of the arms A, B"),
        (Plan(arms=PLAN.arms, seeds=(0, 0), baseline="A"), "seeds must name each seed once"),
        (Plan(arms=PLAN.arms, seeds=(0, 1, 2), baseline="A", looks=(2, 5)), "looks must be rising numbers of seeds from 2 to 3"),
        (Plan(arms=(Arm("A", {}), Arm("A", {})), seeds=(0,), baseline="A"), "must give every arm once"),
        (Plan(arms=(Arm("A(1)", {}), Arm("A 1", {})), seeds=(0,), baseline="A 1"), "differ in letters or digits"),
    ],
)
def test_what_is_no_plan(plan: Plan, words: str) -> None:
    with pytest.raises(BadOption, match=words):
        checked(plan)


def test_seeds_and_predictors() -> None:
    assert seeds_of("3") == (0, 1, 2)
    assert seeds_of("3, 7,11") == (3, 7, 11)
    assert sources_of("linear.raw | uniform.raw,a.raw") == ("linear.raw", "uniform.raw", "a.raw")
    for text in ("0", "-1", "a", "1,", ""):
        with pytest.raises(BadOption, match="seeds must be"):
            seeds_of(text)


def test_a_plan_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(YAML)
    arms, rest = read_plan(str(path), {"num_epochs": "1"})
    assert [arm.name for arm in arms] == ["one", "two"]
    assert arms[1].flags == {"dataset": "digits", "num_epochs": 1, "layer": "KvtAttention(K=4)", "lr": 0.001}
    assert arms[1].published == {"accuracy": 77.64, "where": "a paper"}
    assert plans.declared_in(rest) == {"seeds": (0, 1), "baseline": "two", "metric": "nll"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("arms:", "arm:"), "must hold 'arms:'"),
        (("layer: Attention", "layr: Attention"), r"layr is not an option \(did you mean 'layer'\?\), in arm 'one'"),
        (("seeds: 2", "seed: 2"), r"has 'seed', which is none of .*\(did you mean 'seeds'\?\)"),
        (("  two: {accuracy", "  three: {accuracy"), "published numbers of an arm 'three'"),
        (("layer: Attention", "layer: Attention, plugin: mine.py"), "plugin must be typed"),
        (("layer: Attention", "layer: Attention, seed: 3"), "must leave --seed to the comparison"),
        (("num_epochs: 3", "num_epochs: three"), "num_epochs must be a whole number"),
    ],
)
def test_what_is_no_plan_file(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(YAML.replace(*change))
    with pytest.raises(BadOption, match=words):
        read_plan(str(path), {})
