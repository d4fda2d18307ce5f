"""A plan is what was declared; what joins later is told from it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments import plan as plans
from experiments.grid import Arm
from experiments.plan import Plan, checked, extended, permit, read, read_plan, seeds_of, sources_of
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
    assert (body["family"], body["margin"], body["margin_means"]) == (["B"], None, "0.3 points of accuracy")
    write_json(tmp_path / plans.FILE, {**body, "baseline": "B"})
    with pytest.raises(BadOption, match="changed since it was written"):
        read(tmp_path)


def test_a_pipe_is_no_plan(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / plans.FILE)
    with pytest.raises(BadOption, match=r"^output_dir must hold a whole plan\.json"):
        read(tmp_path)


STRANGE: dict[str, tuple[Any, ...]] = {
    "seeds": (7, [], [1, "a"], [-1], [True], None),
    "baseline": (None, 7),
    "looks": ("x", [2.5]),
    "margin": ("", True),
    "within": (7, [1]),
    "threads": (0, 1.5),
    "backbone": ("x", [1]),
    "later_seeds": ({}, "x"),
    "calibrated": (1,),
    "arms": ([], [{"name": 7, "flags": {}}], [{"name": "A", "flags": 7}], [{"name": "A", "flags": {}, "exploratory": None}]),
}


@pytest.mark.parametrize("name", list(STRANGE))
def test_a_plan_that_is_signed_again_has_its_form(tmp_path: Path, name: str) -> None:
    body = json.loads(json.dumps(PLAN.body()))
    del body["sha256"]
    for value in STRANGE[name]:
        (tmp_path / plans.FILE).write_text(resigned({**body, name: value}))
        with pytest.raises(BadOption, match=r"^output_dir must hold a whole plan\.json"):
            read(tmp_path)


def resigned(body: object) -> str:
    return json.dumps({**body, "sha256": plans.digest_of(body)} if isinstance(body, dict) else body)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda body: [], "output_dir must hold a whole plan.json"),
        (lambda body: "plan", "output_dir must hold a whole plan.json"),
        (lambda body: {**body, "color": 1}, r"of a version with other entries \(color\)"),
        (lambda body: {**body, "arms": [{**body["arms"][0], "shade": 1}]}, r"of a version with other entries \(shade\)"),
        (lambda body: {**body, "arms": [{"name": "A"}]}, "output_dir must hold a whole plan.json"),
        (lambda body: {**body, "arms": 3}, "output_dir must hold a whole plan.json"),
        (lambda body: {name: value for name, value in body.items() if name != "seeds"}, "output_dir must hold a whole plan.json"),
    ],
)
def test_what_is_no_plan_json(tmp_path: Path, change: Callable[[dict[str, Any]], object], words: str) -> None:
    body = PLAN.body()
    del body["sha256"]
    (tmp_path / plans.FILE).write_text(resigned(change(body)))
    with pytest.raises(BadOption, match=words):
        read(tmp_path)


@pytest.mark.parametrize(
    ("metric", "given", "words"),
    [
        ("accuracy", None, "0.3 points of accuracy"),
        ("accuracy", 1.5, "1.5 points of accuracy"),
        ("nll", None, "2 % of the baseline's NLL"),
        ("nll", 0.01, "0.01 nats of NLL"),
        ("ece", None, "0.005 of ECE"),
    ],
)
def test_the_margin_in_words(metric: str, given: float | None, words: str) -> None:
    assert replace(PLAN, metric=metric, margin=given).margin_means == words


def test_the_last_verdict_is_made_with_all_declared_seeds() -> None:
    """Else seeds after the last look would run and count for nothing."""
    plan = replace(PLAN, seeds=tuple(range(10)), looks=(3, 5))
    assert plan.verdicts_after == (3, 5, 10)
    assert extended(plan, [], {"seeds": tuple(range(12))}).verdicts_after == (3, 5, 10)
    assert replace(plan, looks=()).verdicts_after == ()


def test_code_runs_because_it_was_typed_and_not_because_a_plan_names_it(tmp_path: Path) -> None:
    one, other = str(tmp_path / "one.py"), str(tmp_path / "other.py")
    plan = replace(PLAN, arms=(PLAN.arms[0], Arm("C", {"plugin": one}), Arm("D", {"plugin": other})))
    plans.permit(plan, {"plugin": f"{one} | {other}"})
    plans.permit(PLAN, {})
    for typed in ({}, {"plugin": one}):
        with pytest.raises(BadOption, match=r"plugin must be typed: the plan names .*, and no code runs because a file names it"):
            plans.permit(plan, typed)


def test_flags_of_a_plan_that_is_gone_on_with_are_checked() -> None:
    with pytest.raises(BadOption, match=r"^lr must be above 0, in plan\.json, got -1\.0$"):
        permit(replace(PLAN, arms=(Arm("A", {"lr": -1.0}),)), {})
    with pytest.raises(BadOption, match=r"^colour is not an option.*, in plan\.json$"):
        permit(replace(PLAN, backbone={"colour": 1}), {})
    permit(PLAN, {})


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
        (("  two: {accuracy: 77.64, where: a paper}", "  [one, two]"), "must hold 'published:' as an arm and 'score: number' for each"),
        (("two: {accuracy: 77.64, where: a paper}", "two: 77.64"), "must hold 'published:' as an arm and 'score: number' for each"),
        (("  two: {layer", "  one: {layer"), r"must be a YAML file \('one' is there twice\)"),
        (("one: {layer: Attention}", "one: [layer]"), "must give arm 'one' as 'flag: value' lines"),
        ((YAML, "- one\n- two\n"), "plan must hold 'option: value' lines"),
        ((YAML, "two arms"), "plan must hold 'option: value' lines"),
        ((YAML, ""), "plan must hold 'option: value' lines"),
    ],
)
def test_what_is_no_plan_file(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(YAML.replace(*change))
    with pytest.raises(BadOption, match=words):
        read_plan(str(path), {})


def test_seeds_of_a_plan_file_are_how_many_or_these() -> None:
    for given, seeds in ((3, (0, 1, 2)), ([7], (7,)), ([3, 7, 11], (3, 7, 11)), ("3,7", (3, 7))):
        assert plans.declared_in({"seeds": given}) == {"seeds": seeds}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"seeds": []}, "seeds must be how many"),
        ({"seeds": ["a", 3]}, "seeds must be how many"),
        ({"seeds": {"a": 1}}, "seeds must be how many"),
        ({"calibrated": "maybe"}, "calibrated must be true or false, got 'maybe'"),
        ({"within": 3}, "within must name at least two predictors"),
        ({"looks": "soon"}, "looks must be whole numbers"),
        ({"margin": "little"}, "margin must be a number"),
    ],
)
def test_what_a_plan_file_cannot_declare(given: dict[str, Any], words: str) -> None:
    with pytest.raises(BadOption, match=words):
        plans.declared_in(given)
