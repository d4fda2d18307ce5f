"""What the bank finds: against a brute force in float64, ties, offsets, exclusion, approximate kinds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import classifiers.bank
import classifiers.index
from classifiers.bank import Bank
from classifiers.index import MISSING, check_kind, recipe
from tests.classifiers.reference import assert_exact, brute_force, filled
from utils import BadOption

# ---------------------------------------------------------------- exactness


@pytest.mark.parametrize("kind", ["flat", "ip", "auto"])
@pytest.mark.parametrize(("rows", "dim", "k"), [(1, 3, 1), (5, 1, 5), (211, 13, 11), (1009, 37, 17)])
def test_exact(kind, rows, dim, k):
    bank, queries = filled(rows, dim, kind)
    assert_exact(bank, queries, k)
    assert_exact(bank, queries[:3], k)  # FAISS takes another path for few queries


@pytest.mark.parametrize("kind", ["flat", "ip"])
@pytest.mark.parametrize("seed", range(8))
def test_random_cases_with_duplicates_ties_and_foreign_ids(kind, seed):
    """Whole numbers: every distance is exact, so the ids must be the brute force's, also where the k-th place is tied."""
    generator = torch.Generator().manual_seed(seed)
    rows, dim, k = (int(torch.randint(2, high, (), generator=generator)) for high in (300, 12, 30))
    values = torch.randint(-2, 3, (rows, dim), generator=generator).float() * (1, 3, 1000)[seed % 3]
    ids = torch.randperm(10 * rows, generator=generator)[:rows]
    bank = Bank(dim, kind=kind)
    bank.add(values, torch.arange(rows) % 5, ids)
    k = min(k, rows)
    queries = values[torch.randint(rows, (29,), generator=generator)]
    exclude = ids[torch.randint(rows, (29, 3), generator=generator)]
    exclude[::2, 1:] = -1
    for banned in (None, exclude[:, 0], exclude):
        found = assert_exact(bank, queries, k, banned)
        assert (found.index.numpy() == brute_force(bank, queries, k, banned)[0]).all()


@pytest.mark.parametrize("kind", ["flat", "ip"])
@pytest.mark.parametrize("proposals", [classifiers.bank.PROPOSALS, 100])
def test_all_rows_equal(kind, proposals, monkeypatch):
    """All of them must be looked at, a few queries at a time."""
    monkeypatch.setattr(classifiers.bank, "PROPOSALS", proposals)
    bank = Bank(5, kind=kind)
    ids = torch.randperm(307)
    bank.add(torch.full((307, 5), 0.1), torch.zeros(307, dtype=torch.long), ids)
    found = bank.search(torch.full((31, 5), 0.3), 7)
    assert (found.index == torch.arange(7)).all()
    found = bank.search(torch.full((31, 5), 0.3), 7, exclude=torch.full((31,), 2))
    assert (found.index == torch.tensor([0, 1, 3, 4, 5, 6, 7])).all()


def test_duplicated_rows_of_real_numbers_by_lowest_id():
    """Equal vectors must get equal distances, whichever column of FAISS's matrix product they are."""
    generator = torch.Generator().manual_seed(3)
    once = F.normalize(torch.randn(53, 41, generator=generator), dim=1)
    bank = Bank(41, kind="flat")
    bank.add(once.repeat(11, 1), torch.zeros(583, dtype=torch.long), torch.randperm(583, generator=generator))
    queries = F.normalize(torch.randn(37, 41, generator=generator), dim=1)
    assert (bank.search(queries, 17).index.numpy() == brute_force(bank, queries, 17)[0]).all()
    assert (bank.search(once, 4).index.numpy() == brute_force(bank, once, 4)[0]).all()


@pytest.mark.parametrize("kind", ["flat", "ip"])
def test_equal_distances_that_float32_does_not_see_as_equal(kind):
    """Rows are one vector in other orders. To a query of equal numbers they are equally far: exactly, but not in float32 sums."""
    generator = torch.Generator().manual_seed(4)
    vector = torch.randint(-4095, 4096, (37,), generator=generator) / 4096  # squares of 24 bits: float64 sums are exact
    rows = torch.stack([vector[torch.randperm(37, generator=generator)] for _ in range(509)])
    bank = Bank(37, kind=kind)
    bank.add(rows, torch.zeros(509, dtype=torch.long), torch.randperm(509, generator=generator))
    queries = (torch.arange(1, 32) / (31 if kind == "ip" else 32))[:, None].expand(31, 37)  # ip: 24 x 12 bits are exact too
    for k in (1, 7, 300):
        found = bank.search(queries, k)
        assert (found.index == torch.arange(k)).all()
        assert (found.distance.diff(dim=1) >= 0).all()


@pytest.mark.parametrize("kind", ["flat", "ip"])
def test_one_scan_is_enough_far_from_the_origin(kind, monkeypatch):
    """Centered, FAISS's rounding is small against the distances, and no query needs a second look. Near it, nothing is copied."""
    scans, scan = [], classifiers.bank.scan

    def counted(*given):
        scans.append(len(given[0]))
        return scan(*given)

    monkeypatch.setattr(classifiers.bank, "scan", counted)
    generator = torch.Generator().manual_seed(6)
    for offset in (0.0, 1000.0):
        bank = Bank(13, kind=kind)
        bank.add(torch.randn(503, 13, generator=generator) + offset, torch.zeros(503, dtype=torch.long))
        queries = torch.randn(67, 13, generator=generator) + offset
        assert_exact(bank, queries, 5)
        assert (bank._shifted is not None) == (offset > 0)
        for step in range(3):  # rows that come later are centered too
            new = queries[step::3] + 0.5
            bank.add(new, torch.ones(len(new), dtype=torch.long))
            assert_exact(bank, new, 5)
            bank.replace(bank.ids[step : step + 5], queries[:5] - step)
            assert_exact(bank, queries - step, 5)
    assert sum(scans) <= 1.1 * 2 * 335  # 335 queries at each offset; hardly any is looked at twice


@pytest.mark.parametrize("kind", ["flat", "ip"])
@pytest.mark.parametrize("offset", [0.0, 1000.0, 30000.0])
def test_far_from_the_origin(kind, offset):
    """FAISS alone finds a third of the neighbors at offset 1000."""
    generator = torch.Generator().manual_seed(1)
    bank = Bank(131, kind=kind)
    bank.add(torch.randn(503, 131, generator=generator) + offset, torch.zeros(503, dtype=torch.long))
    queries = torch.randn(67, 131, generator=generator) + offset
    assert_exact(bank, queries, 10)
    found = bank.search(queries, 10).index.numpy()
    assert (found == brute_force(bank, queries, 10)[0]).mean() == 1.0


def test_clusters_far_apart():
    """No center helps here: only the bound and the exact ranking do."""
    generator = torch.Generator().manual_seed(1)
    far = torch.tensor([1000.0, -1000.0]).repeat_interleave(251)[:, None]
    bank = Bank(31, kind="flat")
    bank.add(0.01 * torch.randn(502, 31, generator=generator) + far, torch.zeros(502, dtype=torch.long))
    queries = 0.01 * torch.randn(41, 31, generator=generator) - 1000
    assert (bank.search(queries, 9).index.numpy() == brute_force(bank, queries, 9)[0]).all()


@pytest.mark.parametrize("scale", [1e-18, 1e-12, 1e12, 1e17])
def test_tiny_and_huge(scale):
    bank, queries = filled(101, 7)
    bank.refresh(bank.embeddings * scale)
    found = bank.search(queries * scale, 5).index
    assert (found.numpy() == brute_force(bank, queries * scale, 5)[0]).all()


def test_many_k_from_one_search():
    bank, queries = filled(211, 13)
    widest = bank.search(queries, 31)
    for k in (1, 2, 7, 31):
        for mine, alone in zip(vars(widest.top(k)).values(), vars(bank.search(queries, k)).values(), strict=True):
            assert (mine == alone).all()
    with pytest.raises(BadOption, match=r"k must be from 1 to the number of neighbors searched \(31\), got 32"):
        widest.top(32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types_and_views(dtype):
    bank, queries = filled(211, 13)
    given = queries.to(dtype)
    assert (bank.search(given, 5).index == bank.search(given.float(), 5).index).all()
    strided = torch.stack([queries, queries], 2)[..., 0].requires_grad_()
    assert (bank.search(strided, 5).index == bank.search(queries, 5).index).all()
    assert not bank.search(strided, 5).embedding.requires_grad
    assert (bank.search(queries.numpy(), 5).index == bank.search(queries, 5).index).all()
    assert bank.search(queries[:0], 5).embedding.shape == (0, 5, 13)


def test_float32_is_not_copied():
    rows = torch.randn(5, 3)
    assert classifiers.index.checked_rows(rows, 3, "queries")[0].data_ptr() == rows.data_ptr()


# ---------------------------------------------------------------- exclusion, and what is missing


def test_never_oneself():
    """Leave-one-out by id; with the row itself its distance is 0."""
    bank, _ = filled(101, 7)
    found = bank.search(bank.embeddings, 100, exclude=bank.ids)
    assert (found.index != bank.ids[:, None]).all()
    assert found.mask.all()
    assert (bank.search(bank.embeddings, 1).index[:, 0] == bank.ids).all()
    found = bank.search(bank.embeddings, 101, exclude=bank.ids)  # one fewer than asked for
    assert found.mask.sum(1).eq(100).all()
    assert (found.index[:, 100] == MISSING).all()


def test_mixed_rows_exclude_both_and_everything_may_be_excluded():
    bank, queries = filled(11, 7)
    pairs = torch.tensor([[3, 5], [0, -1], [-1, -1]])
    found = assert_exact(bank, queries[:3], 11, pairs)
    assert found.mask.sum(1).tolist() == [9, 10, 11]
    none = bank.search(queries[:2], 3, exclude=torch.arange(11).expand(2, 11))
    assert not none.mask.any()
    assert (none.label == 0).all()


def test_table_is_a_leave_one_out_search():
    bank, _ = filled(103, 7)
    distance, index = bank.table(11, block=17)
    found = bank.search(bank.embeddings, 11, exclude=bank.ids)
    assert (index == found.index).all()
    assert (distance == found.distance).all()
    embedding, label, mask = bank.take(index)
    assert (embedding == found.embedding).all()
    assert (label == found.label).all()
    assert mask.all()
    embedding, label, mask = bank.take(torch.tensor([[5, -1], [103, 2]]))
    assert mask.tolist() == [[True, False], [False, True]]
    assert (embedding[~mask] == 0).all()
    assert (label[~mask] == 0).all()
    assert bank.table(103)[1][:, 102].eq(MISSING).all()


# ---------------------------------------------------------------- approximate kinds


@pytest.mark.parametrize("kind", ["hnsw", "ivf", "ivfpq", "IVF16,Flat", "HNSW16", "PQ7x4", "Flat", "L2norm,Flat", "OPQ2,IVF8,PQ2x4"])
def test_approximate_kinds(kind):
    """A good share of the true neighbors; what is found has exact distances in order, and never a row that does not exist."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(29, 14, generator=generator)
    rows = F.normalize(centers[torch.arange(1013) % 29] + 0.3 * torch.randn(1013, 14, generator=generator), dim=1)
    bank = Bank(14, kind=kind)
    bank.add(rows, torch.arange(1013) % 29)
    queries = rows[:47]
    found = bank.search(queries, 5, exclude=torch.arange(47))
    wanted, _ = brute_force(bank, queries, 5, torch.arange(47))
    recall = np.mean([len(set(a) & set(b)) / 5 for a, b in zip(found.index.numpy(), wanted, strict=True)])
    assert recall > 0.7, recall
    assert (found.index != torch.arange(47)[:, None]).all()
    true = (queries[:, None] - found.embedding).square().sum(2)
    assert torch.allclose(found.distance[found.mask], true[found.mask], atol=1e-6)
    assert (found.distance.diff(dim=1)[found.mask[:, 1:]] >= 0).all()
    assert (found.label[found.mask] == bank.labels[found.index[found.mask]]).all()


@pytest.mark.parametrize("kind", ["hnsw", "ivf", "ivfpq"])
@pytest.mark.parametrize("dim", [2, 3, 7, 13])
def test_named_kinds_at_any_size(kind, dim):
    for rows in (1, 2, 11, 257, 311):
        bank, queries = filled(rows, dim, kind)
        found = bank.search(queries, min(5, rows))
        assert found.mask.any(1).all()


def test_under_full_lists_are_masked():
    """One row a list, and few lists looked at: fewer than k are found. FAISS says -1, the bank masks."""
    bank = Bank(3, kind="IVF64,Flat")
    generator = torch.Generator().manual_seed(0)
    bank.add(torch.randn(97, 3, generator=generator), torch.ones(97, dtype=torch.long))
    found = bank.search(torch.randn(11, 3, generator=generator), 90)
    assert not found.mask.all()
    assert (found.label[found.mask] == 1).all()
    assert (found.index[~found.mask] == MISSING).all()
    assert found.mask.diff(dim=1).sum() <= 11  # the missing stand last


@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_approximate_kinds_follow_what_is_written(kind):
    bank, _ = filled(401, 7, kind, cap=449)
    generator = torch.Generator().manual_seed(5)
    for step in range(12):
        rows = F.normalize(torch.randn(41, 7, generator=generator), dim=1)
        ids = bank.add(rows, torch.full((41,), step))
        found = bank.search(rows, 1)
        assert (found.index[:, 0] == ids).float().mean() > 0.9
        assert torch.isin(found.index, bank.ids).all()
    assert bank._proposer is not None
    assert len(bank._proposer.slot_of) <= 1.25 * 449
    before = bank.embeddings[:5].clone()
    bank.replace(bank.ids[:5], -before)
    for queries in (before, -before):
        found = bank.search(queries, 11)
        assert torch.isin(found.index, bank.ids).all()
        assert all(len(row.unique()) == 11 for row in found.index)  # where it was, and where it is


def test_auto_says_what_it_chose(monkeypatch, capsys):
    monkeypatch.setattr(classifiers.index, "AUTO_FLAT_ROWS", 300)
    monkeypatch.setattr(classifiers.index, "AUTO_HNSW_ROWS", 500)
    bank, queries = filled(299, 7, "auto")
    bank.search(queries, 3)
    assert bank._proposer is None
    bank.add(queries, torch.zeros(len(queries), dtype=torch.long))
    bank.search(queries, 3)
    assert "HNSW32 (322 rows" in capsys.readouterr().err
    assert recipe("auto", 501, 7).startswith("IVF")


# ---------------------------------------------------------------- factory strings


@pytest.mark.parametrize("kind", ["PQ4x4", "IVF8,PQ4x4", "OPQ4,IVF4,PQ4x4", "IVF4,RQ2x4", "HNSW16_PQ4x4", "IVF4,PQ2+2", "PCA8,IVF8,Flat"])
def test_few_rows_are_said_once_and_not_by_faiss(kind, capfd):
    """FAISS would print a line for each of its k-means, which OPQ has hundreds of."""
    check_kind(kind, 16, 300)
    said = capfd.readouterr()
    assert len(said.err.splitlines()) == 1
    assert "from 300 rows (fewer than 39 for each: it may miss neighbors)" in said.err
    bank = Bank(16, kind=kind)
    bank.add(torch.randn(300, 16, generator=torch.Generator().manual_seed(0)), torch.arange(300) % 3)
    assert bank.search(torch.zeros(2, 16), 5).mask.any()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("", "must be one of auto, .* or a FAISS factory string, got ''"),
        ("IVF301,Flat", r"must have at most as many lists as the bank has rows \(300\), not 301"),
        ("IVF16,PQ4x9", r"must have at most as many values of a code as the bank has rows \(300\), not 512"),
        ("OPQ4,IVF4,PQ4x9", r"must have at most as many values of a code as the bank has rows \(300\), not 512"),
        ("IVF0,Flat", "must have at least one list"),
        ("IVF8,PQ5", r"FAISS says: The dimension of the vector \(d\) should be a multiple"),
        ("IVFF", "FAISS says: could not parse index string IVFF"),
    ],
)
def test_a_factory_string_that_does_not_fit_the_rows(kind, rule):
    with pytest.raises(BadOption, match=rule) as caught:
        check_kind(kind, 16, 300)
    assert "::" not in str(caught.value)


def test_many_rows_are_not_worth_a_word(capfd):
    for kind in ("ivf", "ivfpq", "auto", "IVF4,Flat", "HNSW16", "Flat"):
        check_kind(kind, 16, 300)
    assert capfd.readouterr() == ("", "")
