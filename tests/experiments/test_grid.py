"""Alternatives in flags, by hand."""

from __future__ import annotations

import pytest

from experiments.grid import alternatives, arms_of
from utils import BadOption


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("A", ["A"]),
        ("A | B|C", ["A", "B", "C"]),
        ("KvtAttention(K=4|9|16)", ["KvtAttention(K=4)", "KvtAttention(K=9)", "KvtAttention(K=16)"]),
        ("A(x=1|2, y=3|4)", ["A(x=1, y=3)", "A(x=1, y=4)", "A(x=2, y=3)", "A(x=2, y=4)"]),
        ("A*6,B(K=4|9)*6 | C()", ["A*6,B(K=4)*6", "A*6,B(K=9)*6", "C()"]),
        ("A(K=1|2),B(K=3|4)", ["A(K=1),B(K=3)", "A(K=1),B(K=4)", "A(K=2),B(K=3)", "A(K=2),B(K=4)"]),
        ("A(t='x|y')", ["A(t='x|y')"]),  # text in quotes is text
        ("A(size=(1, 2)|(3, 4))", ["A(size=(1, 2))", "A(size=(3, 4))"]),
    ],
)
def test_alternatives(text: str, wanted: list[str]) -> None:
    assert alternatives("layer", text) == wanted


@pytest.mark.parametrize("text", ["A |", "| A", "A || B", "A | A", "A(K=2|2)", "A(K=2"])
def test_what_is_no_alternative(text: str) -> None:
    with pytest.raises(BadOption, match="layer must"):
        alternatives("layer", text)


def test_arms_are_the_product_and_named_by_what_differs() -> None:
    arms = arms_of({"layer": "Attention | KvtAttention(K=4|9)", "dataset": "digits", "lr": "1e-3|2e-3"})
    assert [arm.name for arm in arms] == [
        *("Attention, lr=1e-3", "Attention, lr=2e-3", "KvtAttention(K=4), lr=1e-3"),
        *("KvtAttention(K=4), lr=2e-3", "KvtAttention(K=9), lr=1e-3", "KvtAttention(K=9), lr=2e-3"),
    ]
    assert arms[3].flags == {"layer": "KvtAttention(K=4)", "dataset": "digits", "lr": 0.002}


def test_values_have_their_types() -> None:
    arms = arms_of({"augment": "true|no", "num_epochs": "3", "head": "linear+attn-knn"})
    assert [arm.flags for arm in arms] == [{"augment": value, "num_epochs": 3, "head": "linear+attn-knn"} for value in (True, False)]
    assert [arm.name for arm in arms] == ["augment=true", "augment=no"]
    with pytest.raises(BadOption, match="augment must be true or false, got 'maybe'"):
        arms_of({"augment": "maybe"})
    with pytest.raises(BadOption, match="at most 1000 arms, got 1331"):
        arms_of({name: "|".join(map(str, range(11))) for name in ("K", "num_layers", "num_heads")})
