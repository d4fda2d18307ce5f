"""New content for a bank, in blocks as they are computed: equal to the bit to one that was added at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from classifiers import HEADS, Bank
from classifiers.classifier import Classifier
from inputs.batches import Batches
from inputs.rows import Data, Split
from tests.classifiers.reference import assert_exact, filled
from training.bank import build_bank, order_in_bank
from utils import BadOption, Diverged

ROWS, DIM = 101, 7
CAPS: list[dict[str, Any]] = [{}, {"cap": 211}, {"cap": 37}, {"cap": 37, "evict": "class-balanced"}]


def content(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Labels (few of the high ones) and embeddings of ROWS rows with these ids."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(5, (ROWS,), generator=generator).square() // 4
    return labels, torch.randn(int(ids.max()) + 1, DIM, generator=generator)[ids]


def in_blocks(ids: Tensor, embeddings: Tensor, sizes: list[int], order: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows in another order, a few at a time."""
    for part in order.split(sizes):
        yield ids[part], embeddings[part]


def assert_same(one: Bank, other: Bank) -> None:
    (rows, rest), (wanted, wanted_rest) = one.pack(), other.pack()
    assert rest == wanted_rest
    assert all(torch.equal(rows[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("options", CAPS)
@pytest.mark.parametrize("seed", range(3))
def test_as_if_added_at_once(options, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(3 * ROWS, generator=generator)[:ROWS]
    labels, embeddings = content(ids)
    wanted = Bank(DIM, kind="flat", **options)
    wanted.add(embeddings, labels, ids)
    bank = Bank(DIM, kind="flat", **options)
    order = torch.randperm(ROWS, generator=generator)
    bank.refresh(labels, ids, in_blocks(ids, embeddings, [17, 0, 1, 53, 30], order))
    assert_same(bank, wanted)
    queries = torch.randn(23, DIM, generator=generator)
    for grown in (bank, wanted):
        assert grown.add(queries, [1] * 23).tolist() == list(range(int(ids.max()) + 1, int(ids.max()) + 24))
    assert_same(bank, wanted)
    assert_exact(bank, queries, 5)


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
def test_new_content_for_a_bank_that_has_some(kind):
    """Nothing of the old rows is found again; ids and ages go on from where they were."""
    bank, queries = filled(307, DIM, kind)
    bank.search(queries, 3)
    ids = torch.arange(ROWS) + 300
    labels, embeddings = content(ids)
    bank.refresh(labels, ids, [(ids, embeddings)])
    labels += 1  # the bank has its own
    embeddings += 1
    assert bank.ids.tolist() == list(range(300, 401))
    assert torch.equal(bank.labels, labels - 1)
    assert bank.pack()[0]["birth"].tolist() == list(range(307, 408))
    assert assert_exact(bank, queries, 3).mask.all()
    assert bank.add(queries[:2], [0, 0]).tolist() == [401, 402]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda ids, rows: [(ids[:-2], rows[:-2])], "embeddings must come for all 101 rows, got 99"),
        (lambda ids, rows: [(ids, rows), (ids[:1], rows[:1])], "embeddings must come once for each row, but some came again"),
        (lambda ids, rows: [(ids[[5, *range(101)]], rows[[5, *range(101)]])], "embeddings must come once for each row"),
        (lambda ids, rows: [(ids + 1000, rows)], "embeddings must come for all 101 rows, got 0"),
        (lambda ids, rows: [], "embeddings must come for all 101 rows, got 0"),
        (lambda ids, rows: [(ids[:50], rows[:50]), (ids[50:], rows[50:] / 0)], "embeddings must hold neither NaN nor Inf; row 0"),
        (lambda ids, rows: [(ids, rows[:, :5])], "embeddings must have the bank's dimension, (rows, 7), got (101, 5)"),
        (lambda ids, rows: [(ids[:50], rows)], "ids must be whole numbers, one for each of 101 rows"),
    ],
)
def test_blocks_that_are_refused(change, line):
    """The bank stays as it was."""
    bank, _ = filled(11, DIM)
    before = bank.pack()
    ids = torch.arange(ROWS)
    labels, embeddings = content(ids)
    with pytest.raises(BadOption) as caught:
        bank.refresh(labels, ids, change(ids, embeddings))
    assert line in str(caught.value)
    after = bank.pack()
    assert after[1] == before[1]
    assert all(torch.equal(after[0][name], part) for name, part in before[0].items())


def test_ids_and_labels_that_are_refused():
    bank = Bank(DIM)
    with pytest.raises(BadOption, match="ids must differ"):
        bank.refresh([0, 1], [3, 3], [])
    with pytest.raises(BadOption, match="ids must be whole numbers, one for each of 2 rows"):
        bank.refresh([0, 1], [3, 4, 5], [])
    with pytest.raises(BadOption, match="labels must be at least 0, got -1"):
        bank.refresh([0, -1], [3, 4], [])


# ---------------------------------------------------------------- the bank of a run


def a_run(options: dict[str, Any]) -> tuple[Classifier, Batches]:
    torch.manual_seed(0)
    head = HEADS["knn"](5, 3, embed_dim=DIM, k_train=3, **options)
    x = np.random.default_rng(0).normal(size=(ROWS, 5)).astype(np.float32)
    split = Split(x, np.arange(ROWS) % 3)
    data = Data("numbers", "table", (5,), ("a", "b", "c"), split, None, split, flip=False, fitted={})
    return Classifier(nn.Linear(5, 5), head, 3, {}), Batches(split, data, batch_size=17, device=torch.device("cpu"), seed=3)


@pytest.mark.parametrize(("options", "cap"), [({}, None), ({"bank_cap": 37}, 37), ({"bank_cap": 37, "bank_evict": "class-balanced"}, 37)])
def test_the_bank_of_a_run_is_that_of_all_embeddings_at_once(options, cap):
    model, rows = a_run(options)
    build_bank(model, rows)
    bank = model.head.bank
    assert bank is not None
    with torch.no_grad():
        embeddings = torch.cat([model.head.embed(model.backbone(batch.x)) for batch in rows.epoch()])
    wanted = Bank(DIM, **model.head.bank_options)
    ids = torch.arange(ROWS) if cap is None else order_in_bank(ROWS, 3)
    wanted.add(embeddings[ids], rows.target[ids], ids)
    assert len(bank) == (cap or ROWS)
    assert_same(bank, wanted)
    assert not bank.embeddings.requires_grad


def test_a_model_that_gives_nan_has_no_bank():
    model, rows = a_run({})
    assert isinstance(rows.x, Tensor)
    rows.x[[18, 20, 33]] = torch.nan
    with pytest.raises(Diverged, match=r"^the model gives NaN for 3 of 17 rows$"):
        build_bank(model, rows)
    assert model.head.bank is None
