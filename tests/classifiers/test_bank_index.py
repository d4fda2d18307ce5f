"""Approximate kinds of index: what they find, what a factory string learns, and what FAISS would print."""

from __future__ import annotations

import io
import os
import re
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import classifiers.approximate
import classifiers.bank
import native
from classifiers.approximate import Proposer, centroids, check_kind, least_effort, recipe
from classifiers.bank import Bank
from classifiers.faiss_library import load_faiss, silenced
from classifiers.index import MISSING
from tests.classifiers.reference import brute_force, filled
from utils import BadOption

load_faiss()  # it may say which kernels it takes


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
    bank = Bank(3, kind="IVF64,Flat", recall=0.1)
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
    bank.add(-before, range(5))  # in slots of rows that leave
    for queries in (before, -before):
        found = bank.search(queries, 11)
        assert torch.isin(found.index, bank.ids).all()
        assert all(len(row.unique()) == 11 for row in found.index)  # a slot's entries of earlier rows are dead


def in_clusters(rows: int, dim: int, seed: int) -> torch.Tensor:
    centers = torch.randn(29, dim, generator=torch.Generator().manual_seed(0)) / 2
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(centers[torch.arange(rows) % 29] + 0.5 * torch.randn(rows, dim, generator=generator), dim=1)


@pytest.mark.parametrize("kind", ["IVF40,Flat", "PCA13,IVF40,Flat", "HNSW4", "PCA13,HNSW4"])
def test_how_much_a_search_looks_at_follows_from_measured_recall(kind, capfd):
    """New rows find as much; who wants more looks at more; for another k it is measured anew."""
    rows, queries = in_clusters(2003, 13, 1), in_clusters(301, 13, 2)
    efforts = []
    for wanted in (0.5, 0.9, 0.99):
        bank = Bank(13, kind=kind, recall=wanted)
        bank.add(rows, torch.zeros(len(rows), dtype=torch.long))
        found = bank.search(queries, 7)
        flat = Bank(13, kind="flat")
        flat.add(rows, torch.zeros(len(rows), dtype=torch.long))
        nearest = flat.search(queries, 7)
        recall = (found.index[:, :, None] == nearest.index[:, None]).any(2).float().mean()
        assert recall >= wanted - 0.01, recall
        bank.search(queries[:5], 3)
        assert bank._proposer is not None
        assert set(bank._proposer.efforts) == {7, 3}
        efforts.append(bank._proposer.efforts[7])
    said = capfd.readouterr().err
    assert all(said.count(f"index: {kind} looks at {effort} of ") for effort in efforts)
    assert efforts == sorted(efforts)
    assert efforts[0] < efforts[2] < (40 if "IVF" in kind else 400)


def test_two_standard_errors_below_the_mean_are_wanted(capfd):
    """Of 100 rows, 10 find half of their neighbors with 2 lists: the mean is .95, its standard error sqrt(.09 x .25 / 100) = .015."""
    bank = Bank(13, kind="IVF8,Flat")
    bank.add(in_clusters(2003, 13, 1), torch.zeros(2003, dtype=torch.long))
    bank.search(torch.zeros(1, 13), 3)
    proposer, few = bank._proposer, torch.ones(100)
    few[:10] = 0.5
    for wanted, effort in ((0.919, 2), (0.921, 3), (0.5, 1)):
        proposer.choose(7, wanted, lambda effort: few * 0.6 if effort < 2 else few if effort < 3 else torch.ones(100))
        assert proposer.efforts[7] == effort
    assert "2 of 8 lists for 7 neighbors (recall 0.950 ± 0.015 on 100 rows of the bank)" in capfd.readouterr().err


def test_codes_too_coarse_for_the_recall_are_said(capfd):
    bank = Bank(13, kind="IVF8,PQ13x1")
    bank.add(in_clusters(2003, 13, 1), torch.zeros(2003, dtype=torch.long))
    bank.search(in_clusters(5, 13, 2), 7)
    said = capfd.readouterr().err
    found = r"looks at \d of 8 lists for 7 neighbors \(recall 0\.\d+ ± 0\.\d+ on 500 rows of the bank, not surely 0\.99: more would"
    assert re.search(found, said)


@pytest.mark.parametrize(
    ("recall", "wanted", "least", "most", "effort"),
    [
        (lambda e: e / 100, 0.5, 1, 100, 52),  # found within an eighth: 32, 64, 48, 56, 52
        (lambda e: e / 100, 0.0, 1, 100, 1),
        (lambda e: e / 100, 0.02, 1, 100, 2),
        (lambda e: 1.0, 0.99, 7, 9, 7),
        (lambda e: e / 100, 1.0, 1, 100, 100),
        (lambda e: min(e, 10) / 100, 0.9, 1, 100, 10),  # 11 and more give the same
        (lambda e: 0.3, 0.9, 1, 1, 1),
    ],
)
def test_least_effort(recall, wanted, least, most, effort):
    assert least_effort(recall, wanted, least, most) == (effort, recall(effort))


def test_auto_says_what_it_chose(monkeypatch, capsys):
    monkeypatch.setattr(classifiers.approximate, "most_flat", lambda dim: 300)
    monkeypatch.setattr(classifiers.bank, "most_flat", lambda dim: 300)
    bank, queries = filled(299, 7, "auto")
    bank.search(queries, 3)
    assert bank._proposer is None
    bank.add(queries, torch.zeros(len(queries), dtype=torch.long))
    bank.search(queries, 3)
    assert "IVF17,Flat (322 rows; flat up to 300)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("compiled", "rows", "dim", "text"),
    [
        (False, 1_000_000, 64, ""),
        (False, 400_000, 256, ""),
        (False, 430_000, 256, "IVF655,Flat"),
        (False, 10**7, 8, "IVF3162,Flat"),
        (True, 10**7, 64, ""),  # 20.8 million are a minute
        (True, 5 * 10**6, 256, ""),
        (True, 21 * 10**6, 64, "IVF4582,Flat"),
    ],
)
def test_auto_is_flat_as_long_as_an_exact_search_takes_a_minute(compiled, rows, dim, text, monkeypatch):
    """A graph over a million rows of 64 took longer to build than 300 s; FAISS looks at all of them for 10,000 queries in 32."""
    monkeypatch.setattr(native, "available", lambda: compiled)
    assert recipe("auto", rows, dim) == text


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
    said = capfd.readouterr().err
    assert said.startswith(f"index: {kind} looks at")
    assert len(said.splitlines()) == 1
    os.write(2, b"heard again")
    assert capfd.readouterr().err == "heard again"


@pytest.mark.parametrize("stream", [None, io.StringIO()])  # as under pythonw, and in a notebook
def test_silence_ends_whatever_happens(stream, capfd, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream)
    before = len(os.listdir("/dev/fd"))

    def fails() -> None:
        with silenced():
            os.write(2, b"not heard")
            raise RuntimeError("of FAISS")

    with pytest.raises(RuntimeError, match="of FAISS"):
        fails()
    os.write(2, b"heard")
    assert capfd.readouterr().err == "heard"
    assert len(os.listdir("/dev/fd")) == before


def test_silence_where_nothing_is_heard(capfd):
    kept = os.dup(2)
    os.close(2)
    try:
        with silenced():
            pass
        with pytest.raises(OSError):
            os.fstat(2)
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@pytest.mark.parametrize(
    ("kind", "learned"),
    [
        ("Flat", []),
        ("L2norm,Flat", []),
        ("HNSW32_SQ8", []),
        ("ITQ,LSH", []),
        ("IVF4,LSQ2x5", [(4, "lists")]),
        ("PLSQ2x2x5", []),
        ("PCAR6,IVF7,Flat", [(7, "lists")]),
        ("IVF2k,Flat", [(2048, "lists")]),
        ("IVF1M_HNSW32,Flat", [(1048576, "lists")]),
        ("IVF64(IVF3,Flat),Flat", [(64, "lists"), (3, "lists")]),
        ("IMI2x5,PQ2x3", [(32, "values of a code"), (8, "values of a code")]),
        ("HNSW8_61+PQ4", [(61, "lists"), (256, "values of a code")]),
        ("Residual61,PQ4x3", [(61, "lists"), (8, "values of a code")]),
        ("Residual2x5,PQ4x3", [(32, "values of a code"), (8, "values of a code")]),
        ("PQ4", [(256, "values of a code")]),
        ("PQ4x5np", [(32, "values of a code")]),
        ("IVF7,PQ4x4fsr_64", [(7, "lists"), (16, "values of a code")]),
        ("IVF7,PQ2+2", [(7, "lists"), (256, "values of a code")]),
        ("OPQ4_8,IVF7,PQ4x3", [(7, "lists"), (256, "values of a code"), (8, "values of a code")]),
        ("IVF7,PQ4x3,Refine(PQ8x5)", [(7, "lists"), (8, "values of a code"), (32, "values of a code")]),
        ("RQ1x6_2x4", [(64, "values of a code")]),
        ("PRQ2x3x4", [(16, "values of a code")]),
    ],
)
def test_what_a_factory_string_learns(kind, learned):
    assert centroids(kind) == learned


@pytest.mark.parametrize(
    ("kind", "most"), [("IVF31,Flat", 31), ("RQ1x5_2x4", 32), ("PRQ2x2x5", 32), ("IMI2x5,Flat", 32), ("HNSW8_257+PQ2", 257)]
)
def test_faiss_wants_as_many_rows_as_there_are_centroids(kind, most):
    """So the string was read as FAISS reads it."""
    assert max(centroids(kind))[0] == most
    rows = torch.randn(most, 16, generator=torch.Generator().manual_seed(0))
    Proposer(kind, rows)
    with pytest.raises(BadOption, match="index cannot be built over"):
        Proposer(kind, rows[1:])


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("", "must be one of auto, .* or a FAISS factory string, got ''"),
        ("IVF301,Flat", r"must have at most as many lists as the bank has rows \(300\), not 301"),
        ("IVF16,PQ4x9", r"must have at most as many values of a code as the bank has rows \(300\), not 512"),
        ("OPQ4,IVF4,PQ4x9", r"must have at most as many values of a code as the bank has rows \(300\), not 512"),
        ("IVF0,Flat", "must have at least one list"),
        ("IVF8,PQ5", r"FAISS says: The dimension of the vector \(d\) should be a multiple"),
        ("IVFF", r"or a FAISS factory string \(did you mean 'ivf'\?\): 'IVFF' is no part that is known, got 'IVFF'"),
        ("HNSW0", "HNSW0 must have from 4 to 256 links"),  # ended the process
        ("HNSW1", "HNSW1 must have from 4 to 256 links"),  # crashed it
        ("HNSW16,Flat,Flat", "its parts do not make one"),
        ("LSH0", "LSH0 must have from 1 to 1024 bits"),
        ("PCA0,Flat", "PCA0 must have from 1 to 16 dimensions"),
        ("PCA17,Flat", "PCA17 must have from 1 to 16 dimensions"),
        ("OPQ4_99999,IVF4,PQ4", "OPQ4_99999 must have from 1 to 16 dimensions"),
        ("IVF4,PQ4x24", "x24 must have from 1 to 12 bits"),
        ("IVF9999999999999999,Flat", "IVF9999999999999999 must have from 0 to 2097152 lists"),
        ("IVF9M,Flat", "IVF9 must have from 0 to 2097152 lists"),
        ("RQ64x12", "64 x 12 bits make more than 8192 values"),
        ("," * 20_000, r"of at most 120 characters \(20,000 found\)"),
        ("IVF4(" * 20, "is no part that is known"),
        ("Flat,IVF4", "its parts do not make one"),
        ("IVF16", "its parts do not make one"),
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


def test_recall_is_measured_on_rows_of_all_kinds_where_they_come_in_turns(monkeypatch):
    """10,000 rows of which each 20th is alike: at even distances, the rows that are looked at would be of one kind."""
    kinds, looked_at = torch.eye(20), []
    rows = kinds[torch.arange(10_000) % 20] + 0.01 * torch.randn(10_000, 20, generator=torch.Generator().manual_seed(0))
    bank = Bank(20, kind="ivf")
    bank.add(rows, torch.zeros(10_000, dtype=torch.long))
    exact = bank._exact

    def noted(rows, *rest):
        looked_at.append(rows)
        return exact(rows, *rest)

    monkeypatch.setattr(bank, "_exact", noted)
    bank.search(rows[:3], 5)
    (measured,) = looked_at
    assert len(measured) == 500
    assert len(measured.argmax(1).unique()) == 20
