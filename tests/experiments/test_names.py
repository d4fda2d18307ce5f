"""Names of finished runs: what tells them apart, and no more."""

from __future__ import annotations

from experiments.comparison import names_of


def test_what_follows_from_the_head_is_not_told() -> None:
    linear = {"head": "linear", "dropout_ramp": False, "standardize": False, "lr": 0.1}
    attention = {"head": "attn-knn", "dropout_ramp": True, "standardize": True, "lr": 0.1, "k_train": 16, "lr_attention": 5e-4}
    assert names_of([linear, attention]) == ["linear", "attn-knn"]


def test_what_somebody_chose_against_the_default_is() -> None:
    plain = {"head": "attn-knn", "dropout_ramp": True, "lr_attention": 5e-4}
    steady, slow = {**plain, "dropout_ramp": False}, {**plain, "lr_attention": 1e-4}
    names = ["attn-knn, lr_attention=0.0005, dropout_ramp=True", "attn-knn, lr_attention=0.0005, dropout_ramp=False"]
    assert names_of([plain, steady, slow, {"head": "linear", "dropout_ramp": False}]) == [
        *names, "attn-knn, lr_attention=0.0001, dropout_ramp=True", "linear, dropout_ramp=False",
    ]  # fmt: skip
    assert names_of([plain, steady]) == ["dropout_ramp=True", "dropout_ramp=False"]
