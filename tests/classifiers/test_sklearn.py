"""The estimator for scikit-learn: its contract, its neighbors, and what it is better at than a plain vote."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits, load_wine
from sklearn.metrics import log_loss
from sklearn.neighbors import KNeighborsClassifier
from sklearn.utils.estimator_checks import parametrize_with_checks

from classifiers.sklearn import NeighborClassifier
from utils import BadOption

Rows = tuple[np.ndarray, np.ndarray]


@parametrize_with_checks([NeighborClassifier(epochs=4)])  # the contract does not depend on how long it trains
def test_contract(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.fixture(scope="module")
def wine() -> Rows:
    x, y = load_wine(return_X_y=True)
    return x, np.array(["red", "white", "rosé"])[y]


@pytest.fixture(scope="module")
def fitted(wine: Rows) -> NeighborClassifier:
    return NeighborClassifier(7, epochs=5, embed_dim=12, random_state=0).fit(*wine)


def test_neighbors_are_the_nearest_embeddings(wine: Rows, fitted: NeighborClassifier) -> None:
    with torch.no_grad():
        embedded = fitted.head_.embed(torch.from_numpy(wine[0]).float()).double().numpy()
    every = np.sqrt(((embedded[:, None] - embedded[None]) ** 2).sum(2))
    distance, index = fitted.kneighbors(wine[0], 5)
    assert (index[:, 0] == np.arange(len(embedded))).all()  # each is a row that was fitted
    np.testing.assert_allclose(distance, np.sort(every, 1)[:, :5], atol=1e-3)  # a root near 0
    others = every + np.diag(np.full(len(every), np.inf))
    distance, index = fitted.kneighbors()  # of the rows themselves, each without itself
    assert index.shape == (len(embedded), 7)
    assert not (index == np.arange(len(embedded))[:, None]).any()
    np.testing.assert_allclose(distance, np.sort(others, 1)[:, :7], atol=1e-5)
    assert (fitted.kneighbors(n_neighbors=7, return_distance=False) == index).all()


def test_a_copy_of_a_row_is_not_its_neighbor_in_training(wine: Rows) -> None:
    x, y = (np.concatenate([part, part[:3]]) for part in wine)
    found = NeighborClassifier(5, epochs=1, embed_dim=6, random_state=0).fit(x, y).kneighbors(return_distance=False)
    assert not (found[:3] == np.arange(len(wine[0]), len(x))[:, None]).any()


def test_the_same_state_gives_the_same_answers_and_leaves_torch_alone(wine: Rows, fitted: NeighborClassifier) -> None:
    torch.manual_seed(5)
    before = torch.rand(1)
    torch.manual_seed(5)
    again = clone(fitted).fit(*wine)
    assert torch.rand(1) == before
    assert np.array_equal(again.predict_proba(wine[0]), fitted.predict_proba(wine[0]))
    other = clone(fitted).set_params(random_state=1).fit(*wine)
    assert not np.array_equal(other.predict_proba(wine[0]), fitted.predict_proba(wine[0]))


def test_it_knows_better_how_sure_to_be_than_a_plain_vote() -> None:
    x, y = load_digits(return_X_y=True)
    train, test = slice(0, 500), slice(500, 1000)
    ours = NeighborClassifier(epochs=10, batch_size=64, embed_dim=32, random_state=0).fit(x[train], y[train])
    plain = KNeighborsClassifier(16).fit(x[train], y[train])
    assert ours.score(x[test], y[test]) > plain.score(x[test], y[test]) - 0.02
    assert log_loss(y[test], ours.predict_proba(x[test])) < log_loss(y[test], plain.predict_proba(x[test]))


def test_features_as_they_are(wine: Rows) -> None:
    found = NeighborClassifier(5, epochs=2, embed_dim=0, random_state=0).fit(*wine)
    assert found.head_.embedder.dim == 13  # and 4 heads don't divide it: one does
    assert found.score(*wine) > 0.9


@pytest.mark.parametrize("name", ["n_neighbors", "epochs", "batch_size", "attention_heads"])
def test_what_can_not_be(name: str, wine: Rows) -> None:
    options: dict[str, Any] = {name: 0}
    with pytest.raises(BadOption, match=f"{name} must be a whole number of at least 1, got 0"):
        NeighborClassifier(**options).fit(*wine)
