"""The plans in recipes/: they are plans, their arms are configurations, and each large one has a small one beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from experiments.plan import BACKBONE, Plan, checked, declared_in, read_plan
from layers import LAYERS, build
from run.complete import with_defaults
from utils import parse_parts

RECIPES = Path(__file__).parent.parent.parent / "recipes"
PLANS = [path for path in sorted(RECIPES.glob("*.yaml")) if "\narms:" in path.read_text()]
SMALL = {"attn_knn_resnet50": "attn_knn_small"}  # the others have one of their own name
PAPERS = {path.stem for path in PLANS} - {"digits_layers"}


def plan_of(path: Path) -> Plan:
    arms, rest = read_plan(str(path), {})
    return checked(Plan(arms=tuple(arms), **{"baseline": arms[0].name, **declared_in(rest)}))


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_a_plan_and_its_arms(path: Path) -> None:
    plan = plan_of(path)
    assert len(plan.seeds) >= 3
    assert f"--plan recipes/{path.name}" in path.read_text()  # how to run it stands at the top
    for arm in plan.arms:
        assert arm.name != BACKBONE
        values = with_defaults({**arm.flags, "resize": arm.flags.get("resize", 0)}, shape=(3, 32, 32), summary={"train": 1000})
        for call, _ in parse_parts(values["layer"], "layer"):
            build(call, dim=8, num_heads=1, grid=(14, 14), num_prefix_tokens=1)
        assert set(arm.published) <= {"accuracy", "cifar100", "nll", "ece"}
    if path.stem in PAPERS:
        assert plan.conditions
        assert any(arm.published for arm in plan.arms)


@pytest.mark.parametrize("name", sorted(name for name in PAPERS if not name.endswith("_small")))
def test_a_large_plan_has_a_small_one_with_its_controls(name: str) -> None:
    path = RECIPES / f"{SMALL.get(name, f'{name}_small')}.yaml"
    large, small = plan_of(RECIPES / f"{name}.yaml"), plan_of(path)
    assert len(small.seeds) == 5
    assert yaml.safe_load(path.read_text())["threads"] == 1
    controls = [{arm.name for arm in plan.arms if not arm.published} for plan in (large, small)]
    assert len(controls[1]) >= len(controls[0]) >= 1


@pytest.mark.parametrize("name", sorted(PAPERS))
def test_honest_controls(name: str) -> None:
    """Random candidates regularize: so do token dropout and augmentation. A vote that is calibrated stands beside a linear head that is,
    and views beside models that have seen such."""
    plan = plan_of(RECIPES / f"{name}.yaml")
    of_arms = [arm.flags for arm in plan.arms]
    plain = [of for of in of_arms if of.get("layer") == "Attention"]
    if any("random" in str(of.get("layer")) for of in of_arms):
        assert any(of.get("token_dropout") for of in plain)
        assert any(of["augment"] for of in plain)
    if any("knn" in str(of.get("head")) for of in of_arms):
        assert plan.calibrated
        assert plan.arm(plan.baseline).flags["head"] == "linear"
    assert all(of["augment"] for of in of_arms if of.get("tta"))


def test_nine_layers_on_digits() -> None:
    plan = plan_of(RECIPES / "digits_layers.yaml")
    assert (len(plan.arms), plan.seeds, plan.baseline) == (9, (0, 1, 2, 3, 4), "Attention")
    names = [arm.flags["layer"].partition("(")[0] for arm in plan.arms]
    assert len(set(names)) == 9
    assert set(names) <= set(LAYERS)
