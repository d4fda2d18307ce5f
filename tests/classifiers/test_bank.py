"""What the bank finds: against a brute force in float64, ties, offsets, exclusion."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import classifiers.bank
import classifiers.scan
import native
from classifiers.bank import Bank
from classifiers.index import MISSING, rank_products
from classifiers.scan import scan_in_float64
from tests.classifiers.reference import assert_exact, brute_force, filled, rewritten

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
@pytest.mark.parametrize("proposals", [classifiers.scan.PROPOSALS, 100])
def test_all_rows_equal(kind, proposals, monkeypatch):
    """All of them must be looked at, a few queries at a time."""
    monkeypatch.setattr(classifiers.scan, "PROPOSALS", proposals)
    bank = Bank(5, kind=kind)
    ids = torch.randperm(307)
    bank.add(torch.full((307, 5), 0.1), torch.zeros(307, dtype=torch.long), ids)
    found = bank.search(torch.full((31, 5), 0.3), 7)
    assert (found.index == torch.arange(7)).all()
    found = bank.search(torch.full((31, 5), 0.3), 7, exclude=torch.full((31,), 2))
    assert (found.index == torch.tensor([0, 1, 3, 4, 5, 6, 7])).all()


@pytest.mark.skipif(not native.available(), reason="no C compiler here")
@pytest.mark.parametrize("kind", ["flat", "ip"])
@pytest.mark.parametrize("dim", [1, 8, 20, 32, 64, 80, 256])
def test_with_and_without_compiled_code_the_same_is_found(kind, dim, monkeypatch):
    """Rows some of which are there several times, itself left out, few and many neighbors."""
    generator = torch.Generator().manual_seed(dim)
    rows = F.normalize(torch.randn(800, dim, generator=generator), dim=1)[torch.randint(800, (1201,), generator=generator)]
    bank = Bank(dim, kind=kind)
    bank.add(rows, torch.arange(1201) % 7, torch.randperm(1201, generator=generator))
    asked = [(k, count) for k in (1, 2, 9, 16, 64, 300) for count in (1, 37)]
    scanned, scan = [], native.scan

    def counted(queries, rows, more, count):
        scanned.append((len(queries), count))
        return scan(queries, rows, more, count)

    with monkeypatch.context() as patch:
        patch.setattr(native, "scan", counted)
        found = [bank.search(rows[:count], k, exclude=bank.ids[:count]) for k, count in asked]
    assert [count for queries, count in scanned if queries == 37] == [10, 11, 18, 25, 73]  # k, itself and eight more, of at most 256
    monkeypatch.setattr(native, "takes", lambda *_: False)
    for (k, count), ours in zip(asked, found, strict=True):
        without = bank.search(rows[:count], k, exclude=bank.ids[:count])
        for part in ("index", "distance", "label", "embedding", "mask"):
            assert torch.equal(getattr(ours, part), getattr(without, part)), (k, count, part)
    assert (found[5].index.numpy() == brute_force(bank, rows[:37], 9, bank.ids[:37])[0]).all()


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


@pytest.mark.parametrize("M", [5, 11, 13, 100])
def test_products_that_float32_puts_in_another_order(M):
    """Rows whose products with a query differ in the eighth figure, some of them not allowed."""
    generator = torch.Generator().manual_seed(M)
    queries, near = (F.normalize(torch.randn(count, 131, generator=generator), dim=1) for count in (1, 1))
    rows = near + 1e-6 * torch.randn(200, 131, generator=generator)
    queries = (near + 0.1 * queries).repeat(23, 1) + 0.01 * torch.randn(23, 131, generator=generator)
    slots = torch.stack([torch.randperm(200, generator=generator)[:M] for _ in range(23)])
    allowed = torch.rand(23, M, generator=generator) > 0.3
    allowed[:, 0] = True
    true = (queries.double()[:, None] * rows.double()[slots]).sum(2).neg().masked_fill(~allowed, torch.inf)
    wanted = true.sort(1)
    order, distance = rank_products(queries, rows, slots, slots, allowed, 5, rows.square().sum(1))
    there = distance[:, :5] < torch.inf
    assert torch.equal(order[:, :5][there], wanted.indices[:, :5][there])
    assert torch.equal(distance[:, :5], wanted.values[:, :5])


@pytest.mark.parametrize("scale", [1e-22, 1e-23, 1e-30])
def test_products_of_rows_whose_squares_float32_takes_for_nothing(scale):
    generator = torch.Generator().manual_seed(9)
    near = torch.rand(1, 131, generator=generator) + 0.5
    rows = near * (1 + 1e-6 * torch.randn(503, 131, generator=generator)) * scale
    queries = near + torch.rand(23, 131, generator=generator)
    bank = Bank(131, kind="ip")
    bank.add(rows, torch.zeros(503, dtype=torch.long))
    assert (bank.search(queries, 5).index.numpy() == brute_force(bank, queries, 5)[0]).all()


@pytest.mark.parametrize("kind", ["flat", "ip"])
def test_one_scan_is_enough_for_unit_rows(kind, monkeypatch):
    """The scan's rounding is small against the distances, and hardly any query needs a second look, in float64."""
    scans, scan, again = [], classifiers.bank.scan, []

    def counted(*given):
        scans.append(len(given[0]))
        return scan(*given)

    def counted_again(queries, rows, count, inner):
        again.append(len(queries))
        return classifiers.scan.scan_in_float64(queries, rows, count, inner)

    monkeypatch.setattr(classifiers.bank, "scan", counted)
    monkeypatch.setattr(classifiers.bank, "scan_in_float64", counted_again)
    bank, queries = filled(503, 13, kind)
    for step in range(3):  # rows that come later, too
        assert_exact(bank, queries, 5)
        bank.add(F.normalize(queries + 0.5, dim=1), torch.full((23,), step))
    assert sum(scans) == 69
    assert sum(again) <= 7


@pytest.mark.parametrize("kind", ["flat", "ip"])
@pytest.mark.parametrize("spread", [1e-2, 1e-4, 1e-6])
def test_unit_rows_that_are_nearly_one(kind, spread, monkeypatch):
    """What an embedder gives that tells no rows apart: float32 products do not tell them apart either, float64 does, in one scan."""
    again = []

    def counted(queries, rows, count, inner):
        again.append(count)
        return classifiers.scan.scan_in_float64(queries, rows, count, inner)

    monkeypatch.setattr(classifiers.bank, "scan_in_float64", counted)
    generator = torch.Generator().manual_seed(7)
    rows = F.normalize(torch.ones(41) + spread * torch.randn(1013, 41, generator=generator), dim=1)
    bank = Bank(41, kind=kind)
    bank.add(rows, torch.zeros(1013, dtype=torch.long))
    found = bank.search(rows[:67], 7, exclude=torch.arange(67)).index
    longer = (kind, spread) == ("ip", 1e-2)  # here a longer list in float32 is enough
    assert again == ([] if longer else [64])  # 4 (7 + 1 + 8)
    assert (found.numpy() == brute_force(bank, rows[:67], 7, torch.arange(67))[0]).all()


def test_few_queries_with_many_rows_as_near_are_scanned_once_more_in_float32(monkeypatch):
    """Two of 40 lie in a crowd of rows that float32 does not tell apart; a longer list has rows from beyond it."""
    scans = []
    for name in ("scan", "scan_in_float64"):
        made = getattr(classifiers.bank, name)

        def counted(queries, rows, *rest, name=name, made=made):
            scans.append((name, len(queries), rest[-2]))
            return made(queries, rows, *rest)

        monkeypatch.setattr(classifiers.bank, name, counted)
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(1013, 17, generator=generator)
    rows[:20] = rows[0] + 1e-5 * torch.randn(20, 17, generator=generator)
    rows = F.normalize(rows, dim=1)
    bank = Bank(17, kind="flat")
    bank.add(rows, torch.zeros(1013, dtype=torch.long))
    queries = rows[18:58]
    assert (bank.search(queries, 5).index.numpy() == brute_force(bank, queries, 5)[0]).all()
    assert scans == [("scan", 40, 14), ("scan", 2, 56)]


@pytest.mark.parametrize("inner", [True, False])
def test_a_scan_in_float64(inner, monkeypatch):
    """In blocks of queries and of rows. Far from the origin the distances are right to the rounding of float64."""
    monkeypatch.setattr(classifiers.scan, "SCORES", 500)  # 4 queries, 71 rows
    generator = torch.Generator().manual_seed(8)
    rows, queries = (torch.randn(count, 7, generator=generator) + 1000 for count in (101, 11))
    score, slots = scan_in_float64(queries, rows, 5, inner)
    true = queries.double() @ rows.double().T if inner else (queries.double()[:, None] - rows.double()).square().sum(2)
    wanted = true.sort(1, descending=inner)
    assert (slots == wanted.indices[:, :5]).all()
    assert (score - wanted.values[:, :5]).abs().max() < 1e-8  # of squared lengths of 7e6


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
    """Only the bound and the exact ranking help here."""
    generator = torch.Generator().manual_seed(1)
    far = torch.tensor([1000.0, -1000.0]).repeat_interleave(251)[:, None]
    bank = Bank(31, kind="flat")
    bank.add(0.01 * torch.randn(502, 31, generator=generator) + far, torch.zeros(502, dtype=torch.long))
    queries = 0.01 * torch.randn(41, 31, generator=generator) - 1000
    assert (bank.search(queries, 9).index.numpy() == brute_force(bank, queries, 9)[0]).all()


@pytest.mark.parametrize("scale", [1e-18, 1e-12, 1e12, 1e17])
def test_tiny_and_huge(scale):
    bank, queries = filled(101, 7)
    rewritten(bank, bank.embeddings * scale)
    found = bank.search(queries * scale, 5).index
    assert (found.numpy() == brute_force(bank, queries * scale, 5)[0]).all()


@pytest.mark.parametrize("kind", ["flat", "ip"])
def test_one_query_whose_proposals_are_more_than_a_block(kind):
    """All rows are equally near, so that all 3,001 are proposed: more numbers than one block of the ranking."""
    bank = Bank(131, kind=kind)
    bank.add(torch.full((3001, 131), 0.1), torch.zeros(3001, dtype=torch.long), torch.randperm(3001))
    assert (bank.search(torch.full((1, 131), 0.3), 1000).index == torch.arange(1000)).all()


def test_many_k_from_one_search():
    """The first k of a wider search are what a search for k finds, to the bit."""
    bank, queries = filled(211, 13)
    widest = bank.search(queries, 31)
    for k in (1, 2, 7, 31):
        for wide, alone in zip(vars(widest).values(), vars(bank.search(queries, k)).values(), strict=True):
            assert (wide[:, :k] == alone).all()


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


def test_what_was_found_is_taken_by_id():
    bank, _ = filled(103, 7)
    found = bank.search(bank.embeddings, 11, exclude=bank.ids)
    embedding, label, mask = bank.take(found.index)
    assert (embedding == found.embedding).all()
    assert (label == found.label).all()
    assert mask.all()
    embedding, label, mask = bank.take(torch.tensor([[5, -1], [103, 2]]))
    assert mask.tolist() == [[True, False], [False, True]]
    assert (embedding[~mask] == 0).all()
    assert (label[~mask] == 0).all()


# ---------------------------------------------------------------- copies


@pytest.mark.parametrize("kind", ["flat", "ip", "HNSW8"])
def test_who_excludes_a_row_excludes_its_copies(kind):
    """Rows in groups of three that are the same: neighbors of a row are those of other groups, as if its group were not there."""
    rows = F.normalize(torch.randn(67, 5, generator=torch.Generator().manual_seed(0)), dim=1).repeat(3, 1)
    ids = torch.arange(len(rows))
    bank = Bank(5, kind=kind, copies=ids % 67)
    bank.add(rows, ids % 2)
    others = bank.search(rows, 7, exclude=ids)
    assert others.mask.all()
    assert (others.index % 67 != ids[:, None] % 67).all()
    assert kind == "ip" or (others.distance > 1e-6).all()
    for again in (Bank.unpack(*bank.pack()), bank.sample(len(bank))):
        assert torch.equal(again.search(rows, 7, exclude=ids).distance, others.distance) or kind == "HNSW8"
    bank.add(rows[:1], [0])  # a later row has no copies, and is excluded by its own id alone
    assert bank.search(rows[:1], 1, exclude=[[0, len(rows)]]).index.item() % 67 != 0
    assert bank.search(rows[:1], 1, exclude=[len(rows)]).index.item() % 67 == 0


def test_many_copies_leave_enough_others():
    """More copies than FAISS is asked for at first."""
    generator = torch.Generator().manual_seed(0)
    row, rest = torch.randn(1, 5, generator=generator), torch.randn(40, 5, generator=generator)
    rows = torch.cat([row.expand(90, 5), rest])
    bank = Bank(5, kind="flat", copies=torch.cat([torch.zeros(90, dtype=torch.long), torch.arange(90, 130)]))
    bank.add(rows, torch.arange(130) % 2)
    found = bank.search(rows[:3], 11, exclude=torch.arange(3))
    order = (rest - row).norm(dim=1).argsort()[:11] + 90
    assert (found.index == order).all()
