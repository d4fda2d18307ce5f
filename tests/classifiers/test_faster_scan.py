"""Faster scans of a bank's rows: what they say is true, the bank's answers stay the same, and they are made where they pay."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import native
from classifiers import bank as bank_module
from classifiers import faster_scan, rounded
from classifiers.bank import Bank
from classifiers.disk_bank import build_bank
from classifiers.rounded import Rounded
from classifiers.scan import prove
from classifiers.sketch import Sketch

pytestmark = pytest.mark.skipif(not native.available(), reason="no C compiler here")

SCANS = (Sketch, Rounded)


def rows_of(case: str, count: int, dim: int, seed: int = 0) -> Tensor:
    """`flat`: mostly in five directions, as embeddings of a trained model; the other names say what they are."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, dim, generator=generator)
    if case == "flat":
        x = torch.randn(count, 5, generator=generator) @ torch.randn(5, dim, generator=torch.Generator().manual_seed(99)) + 0.02 * x
    if case == "far":
        x = x + 1000
    if case in ("short", "long"):
        return x * (1e-17 if case == "short" else 1e16)
    if case == "of all lengths":
        return x * torch.logspace(-3, 3, count)[torch.randperm(count, generator=generator)][:, None]
    if case == "equal":
        return x[:7].repeat(count // 7 + 1, 1)[:count]
    return x if case == "far" else F.normalize(x, dim=1)


def distances(queries: Tensor, rows: Tensor, inner: bool) -> Tensor:
    q, x = queries.double(), rows.double()
    return -(q @ x.T) if inner else (q[:, None] - x).square().sum(2)


@pytest.mark.parametrize("kind", SCANS)
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("case", ["flat", "unit", "far", "short", "long", "of all lengths", "equal"])
def test_no_other_row_is_nearer_than_a_scan_says(kind, inner, case):
    rows, queries = rows_of(case, 1009, 67), torch.cat([rows_of(case, 1009, 67)[:17], rows_of(case, 20, 67, seed=1)])
    true, squared = distances(queries, rows, inner), queries.square().sum(1)
    made = [kind(rows, inner)]
    while isinstance(made[-1], Sketch) and (narrower := made[-1].narrower()):
        made.append(narrower)
    assert len(made) == (2 if kind is Sketch else 1)  # 16 and 8 axes
    for one in made:
        for count in (2, 23, 200):
            slots, beyond = one(queries, squared, count)
            assert (slots.sort(1).values.diff(dim=1) > 0).all()  # each row once
            others = true.scatter(1, slots, torch.inf).min(1).values
            assert (others >= beyond).all(), (count, (others - beyond).min())


@pytest.mark.parametrize("inner", [False, True])
def test_what_a_scan_says_is_near_the_truth(inner):
    """A bound that were always minus infinity would be true as well."""
    rows = rows_of("flat", 1009, 67)
    true = distances(rows[:50], rows, inner).sort(1).values
    for kind, slack in ((Sketch, 0.1), (Rounded, 0.02)):
        _, beyond = kind(rows, inner)(rows[:50], rows[:50].square().sum(1), 60)
        assert (beyond > true[:, 59] - slack).all()


@pytest.mark.parametrize("what", ["rows", "queries", "products"])
def test_rounding_that_hides_the_nearest_is_counted_on(what, monkeypatch):
    """Five rows look better than five that are nearer: what rounding takes from the latter all goes one way."""
    query, worse, better = torch.ones(64), torch.ones(64), torch.ones(64)
    if what == "rows":  # to the nearest of 8 bits, the better ones lose a 256th
        worse[0], better[:] = 1 + 2**-7, 1 + 0.99 * 2**-8
    if what == "queries":  # the query does, where only the better ones are
        query[:32] = 1 + 0.99 * 2**-8
        worse[:32], worse[32], better[32:] = 0, 1 + 2**-6, 0
    if what == "products":  # 8 and 8.0234 are equal in 8 bits
        worse[8:], better[8:], better[8] = 0, 0, 2**-6 + 2**-7
        monkeypatch.setattr(rounded, "GUESSED", 2)  # from two rows of zeros, no good guess
    half = torch.cat([torch.zeros(1, 64), worse.expand(5, 64), better.expand(5, 64)])
    slots, beyond = Rounded(torch.cat([half, -half]), True)(query[None], query.square().sum()[None], 5)
    assert slots.tolist() == [[1, 2, 3, 4, 5]]
    assert better @ query > worse @ query
    assert beyond <= -(better.double() @ query.double())


@pytest.fixture
def small(monkeypatch):
    """Faster scans are made for small banks, and of each kind whatever the processor."""
    for name, value in {"ROWS": 500, "SKETCHED": 16, "ROUNDED": 16, "WORTH": 0.5}.items():
        monkeypatch.setattr(faster_scan, name, value)
    monkeypatch.setattr(Rounded, "fast", staticmethod(lambda: True))


def filled(rows: Tensor, kind: str = "flat", **options) -> Bank:
    bank = Bank(rows.shape[1], kind=kind, **options)
    bank.add(rows, torch.arange(len(rows)) % 7)
    return bank


def scan_of(bank: Bank) -> Sketch | Rounded | None:
    return bank._faster_scan._scan


@pytest.mark.parametrize("kind", ["flat", "ip"])
@pytest.mark.parametrize(
    ("case", "expected"), [("flat", Sketch), ("unit", Rounded), ("far", Rounded), ("of all lengths", None), ("equal", None)]
)
def test_the_bank_answers_as_before(kind, case, expected, small, monkeypatch):
    rows = rows_of(case, 1201, 67)
    copies = torch.arange(1201) % 7 if case == "equal" else torch.arange(1201)
    bank, plain = (filled(rows, kind, copies=copies) for _ in range(2))
    monkeypatch.setattr(plain, "_faster_scan", faster_scan.FasterScan())
    monkeypatch.setattr(plain._faster_scan, "of", lambda *_: None)
    generator = torch.Generator().manual_seed(5)
    for k in (16, 1, 9, 20, 300):
        for banned in (0, 1, 3):
            ids = torch.randint(1201, (61,), generator=generator)
            exclude = torch.stack([ids, *torch.randint(-1, 1201, (2, 61), generator=generator)], 1)[:, :banned] if banned else None
            found, wanted = (one.search(rows[ids], k, exclude) for one in (bank, plain))
            for part in ("index", "distance", "label", "embedding", "mask"):
                assert torch.equal(getattr(found, part), getattr(wanted, part)), (k, banned, part)
    assert isinstance(scan_of(bank), expected or type(None)), scan_of(bank)


def test_many_rows_and_queries_at_the_center(small):
    """Their scores are 0 and equal, and so is the guess; then come worse ones."""
    half = rows_of("unit", 300, 67)
    rows = torch.cat([torch.zeros(40, 67), half, -half])
    queries, found = torch.cat([rows[:24], rows[100:200]]), []
    for scan in (None, Rounded(rows, inner=False)):
        bank = filled(rows)
        bank._faster_scan._scan, bank._faster_scan._asked = scan, 1 << 40
        found.append(bank.search(queries, 5))
        assert (found[-1].index[:24] == torch.arange(5)).all()
    assert torch.equal(found[0].index, found[1].index)
    assert torch.equal(found[0].distance, found[1].distance)


@pytest.mark.parametrize("kind", SCANS)
def test_products_with_rows_that_are_all_equal(kind):
    """Centered they are nothing, so that all there is is the rounding of float64."""
    generator = torch.Generator().manual_seed(6)
    rows, queries = torch.randn(1, 67, generator=generator).expand(1009, 67), torch.randn(300, 67, generator=generator)
    true = (queries.double()[:, None] * rows[:1].double()).sum(2)[:, 0].neg()  # as `rank_products` computes them
    _, beyond = kind(rows, True)(queries, queries.square().sum(1), 5)
    assert (beyond <= true).all()


def test_half_precision_around_a_search_changes_nothing(small):
    bank = filled(rows_of("unit", 1009, 67))
    found = bank.search(bank.embeddings[:60], 5)
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype=dtype):
            again = bank.search(bank.embeddings[:60], 5)
        assert torch.equal(again.index, found.index)
        assert torch.equal(again.distance, found.distance)
    assert isinstance(scan_of(bank), Rounded)


def test_a_sketch_is_as_narrow_as_it_can_be(small):
    """Five directions and little else: of 64 dimensions 16 axes are tried, then 8."""
    bank = filled(rows_of("flat", 1009, 64))
    bank.search(bank.embeddings[:60], 5)
    scan = scan_of(bank)
    assert isinstance(scan, Sketch)
    assert scan.axes.shape == (64, 8)


def test_nearly_all_queries_are_done_with_the_faster_scan(small, monkeypatch):
    left: list[int] = []

    def counted(*given):
        left.append(prove(*given))
        return left[-1]

    monkeypatch.setattr(bank_module, "prove", counted)
    for case in ("flat", "unit"):
        bank = filled(rows_of(case, 1009, 67))
        for _ in range(2):
            bank.search(bank.embeddings[:100], 9, exclude=bank.ids[:100])
        assert len(left) == 2
        assert max(left) <= 5, case
        left.clear()


def test_a_scan_is_made_once_so_many_queries_were_asked_and_again_after_rows_changed(small, monkeypatch):
    monkeypatch.setattr(faster_scan, "WORTH", 2)  # 128 queries
    bank = filled(rows_of("flat", 1009, 64))
    queries = bank.embeddings[:50].clone()
    seen = []
    for step in range(8):
        if step == 4:
            bank.add(rows_of("flat", 3, 64, seed=2), torch.zeros(3, dtype=torch.long))
        bank.search(queries, 5)
        seen.append(scan_of(bank) is not None)
    assert seen == [False, False, True, True] * 2
    bank.refresh(bank.labels, bank.ids, [(bank.ids, bank.embeddings)])
    assert scan_of(bank) is None
    for other in (copy.deepcopy(bank), Bank.unpack(*bank.pack())):
        assert scan_of(other) is None
        for _ in range(3):
            other.search(queries, 5)
        assert scan_of(other) is not None


@pytest.mark.parametrize("case", ["flat", "unit"])
def test_no_scan_is_kept_that_is_not_enough_for_what_is_asked(case, small):
    """Of 1009 rows 60 lie in a crowd, in which no faster scan tells who is nearest; then queries come from there only."""
    rows = rows_of(case, 1009, 67)
    rows[:60] = rows[0] + 1e-4 * torch.randn(60, 67, generator=torch.Generator().manual_seed(3))
    bank, plain = filled(rows), filled(rows)
    bank.search(rows[100:200], 5)
    assert scan_of(bank) is not None
    assert torch.equal(bank.search(rows[:60], 5).index, plain.search(rows[:60], 5).index)
    assert scan_of(bank) is None
    bank.search(rows[100:200], 5)
    assert scan_of(bank) is None


@pytest.mark.parametrize("without", ["compiled code", "queries", "rows", "dimensions"])
def test_where_none_is_made(without, small, monkeypatch):
    if without == "compiled code":
        monkeypatch.setattr(native, "available", lambda: False)
    bank = filled(rows_of("flat", 400 if without == "rows" else 1009, 15 if without == "dimensions" else 64))
    for _ in range(20):
        bank.search(bank.embeddings[: 3 if without == "queries" else 60], 5)
    assert scan_of(bank) is None


def test_a_bank_on_disk_makes_none_in_memory(small, tmp_path):
    rows = rows_of("flat", 1009, 64)
    bank = build_bank(tmp_path / "bank", 64, [(rows, torch.zeros(1009, dtype=torch.long))], codes="none")
    for _ in range(3):
        found = bank.search(rows[:60], 5)
    assert scan_of(bank) is None
    assert torch.equal(found.index, filled(rows).search(rows[:60], 5).index)


def test_a_processor_without_bfloat16_rounds_nothing(small, monkeypatch):
    monkeypatch.setattr(Rounded, "fast", staticmethod(lambda: False))
    bank = filled(rows_of("unit", 1009, 67))
    bank.search(bank.embeddings[:100], 5)
    assert scan_of(bank) is None
    monkeypatch.undo()
    for flags, fast in (("flags : avx512f", False), ("flags : avx512f avx512_bf16", True), ("flags : amx_bf16", True)):
        monkeypatch.setattr(native, "processor", lambda flags=flags: flags)
        assert Rounded.fast() == fast
        with torch.backends.mkldnn.flags(enabled=False):  # then torch multiplies number by number
            assert not Rounded.fast()
