"""A bank on disk: exact without codes, nearly so with them, found by ids, and refused where it is not whole."""

from __future__ import annotations

import copy
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import classifiers.disk_bank
from classifiers.bank import Bank
from classifiers.disk_bank import DiskBank, build_bank
from tests.classifiers.reference import assert_exact
from utils import BadOption

ROWS, DIM = 3011, 13


def in_clusters(rows: int, seed: int) -> Tensor:
    centers = torch.randn(37, DIM, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(centers[torch.randint(37, (rows,), generator=generator)] + 0.3 * torch.randn(rows, DIM, generator=generator), dim=1)


def stream(rows: Tensor, block: int = 500) -> Iterator[tuple[Tensor, Tensor]]:
    for part in torch.arange(len(rows)).split(block):
        yield rows[part], part % 7


def in_memory(rows: Tensor) -> Bank:
    bank = Bank(DIM, kind="flat")
    bank.add(rows, torch.arange(len(rows)) % 7)
    return bank


@pytest.mark.parametrize("part", [7, 500, 10_000])
def test_without_codes_it_is_exact(part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are read in parts, the last of which may have fewer than are wanted."""
    monkeypatch.setattr(classifiers.disk_bank, "PART", part * 4 * DIM)
    rows = in_clusters(ROWS, 1)
    rows[100:140] = rows[100]
    bank, queries = build_bank(tmp_path, DIM, stream(rows), codes="none"), rows[80:180]
    own = torch.arange(80, 180)
    for exclude in (None, own, torch.stack([own, own + 1], 1)):
        wanted = in_memory(rows).search(queries, 9, exclude)
        for name, other in vars(wanted).items():
            assert torch.equal(getattr(bank.search(queries, 9, exclude), name), other), name
    assert_exact(bank, queries[:11], 5)


@pytest.mark.parametrize("codes", ["float16", "int8"])
def test_what_codes_propose_is_ranked_exactly(
    codes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Built in parts; distances and embeddings are those of the rows, not of their codes."""
    monkeypatch.setattr(classifiers.disk_bank, "PART", 1000 * 4 * DIM)
    rows, own = in_clusters(ROWS, 1), torch.arange(0, ROWS, 10)
    bank = build_bank(tmp_path, DIM, stream(rows), codes=codes, recall=0.95)
    found, wanted = bank.search(rows[own], 9, own), in_memory(rows).search(rows[own], 9, own)
    assert (found.index[:, :, None] == wanted.index[:, None]).any(2).float().mean() > 0.93
    assert (found.index != own[:, None]).all()
    assert torch.equal(found.embedding, rows[found.index])
    assert torch.equal(found.label, found.index % 7)
    true = (rows[own][:, None] - found.embedding).square().sum(2)
    assert torch.allclose(found.distance, true, atol=1e-6)
    assert (found.distance.diff(dim=1) >= 0).all()
    said = capfd.readouterr()
    assert said.out == ""
    assert [line.split(":")[0] for line in said.err.splitlines() if not line.startswith("faiss")] == ["bank", "index"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.json", "labels.i64", "lists.index", "lists.ivfdata", "rows.f32"]


def test_it_is_opened_elsewhere_copied_and_sent(tmp_path: Path) -> None:
    rows, own = in_clusters(ROWS, 1), torch.arange(50)
    bank = build_bank(tmp_path / "here", DIM, stream(rows))
    wanted = bank.search(rows[own], 5, own)
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    for other in (DiskBank(tmp_path / "there"), copy.deepcopy(bank), pickle.loads(pickle.dumps(bank))):
        assert len(other) == ROWS
        assert torch.equal(other.search(rows[own], 5, own).index, wanted.index)
    part = bank.sample(100)
    assert torch.equal(part.search(part.embeddings, 1).index[:, 0], part.ids)
    taken = bank.take(wanted.index)
    assert torch.equal(taken[0], wanted.embedding)


@pytest.mark.parametrize("name", ["rows.f32", "labels.i64", "lists.index", "lists.ivfdata"])
def test_what_is_damaged_is_refused(name: str, tmp_path: Path) -> None:
    build_bank(tmp_path, DIM, stream(in_clusters(ROWS, 1)))
    content = bytearray((tmp_path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadOption, match=f"is damaged: {name} does not have the SHA-256"):
        DiskBank(tmp_path)
    (tmp_path / name).write_bytes(content[:-4])
    with pytest.raises(BadOption, match=f"is damaged: {name} has "):
        DiskBank(tmp_path)


def test_its_rows_stay_as_they_are(tmp_path: Path) -> None:
    rows = in_clusters(ROWS, 1)
    bank = build_bank(tmp_path, DIM, stream(rows), codes="none")
    for call in (lambda: bank.add(rows[:1], [0]), lambda: bank.refresh([0], [0], [([0], rows[:1])])):
        with pytest.raises(BadOption, match="its rows are on disk"):
            call()
    with pytest.raises(BadOption, match="too large for a checkpoint"):
        bank.pack()
    assert torch.equal(DiskBank(tmp_path).embeddings, rows)


def test_what_cannot_be_built_is_said(tmp_path: Path) -> None:
    rows = in_clusters(11, 1)
    with pytest.raises(BadOption, match="codes must be one of float16, int8, none"):
        build_bank(tmp_path, DIM, stream(rows), codes="int4")
    with pytest.raises(BadOption, match="bank must have rows"):
        build_bank(tmp_path / "none", DIM, [])
    with pytest.raises(BadOption, match="embeddings must hold neither NaN nor Inf; row 3"):
        build_bank(tmp_path / "nan", DIM, stream(rows.index_fill(0, torch.tensor([3]), torch.nan)))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    with pytest.raises(BadOption, match="must be written to an empty folder"):
        build_bank(tmp_path / "full", DIM, stream(rows))
    with pytest.raises(BadOption, match=r"must hold checkpoint\.json"):
        DiskBank(tmp_path / "nan")  # what was begun is no bank


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the kernel does not say how it reads a file")
def test_rows_are_read_one_here_one_there_and_in_order_where_all_are_looked_at(tmp_path: Path) -> None:
    """Around a single row nothing is read ahead: of rows that do not fit memory, that would be most of what is read."""

    def read_ahead() -> bool:
        entries = Path("/proc/self/smaps").read_text().split(str(tmp_path / "rows.f32"))[1:]
        (flags,) = {next(line for line in entry.splitlines() if line.startswith("VmFlags:")) for entry in entries}
        assert ("rr" in flags.split()) != ("sr" in flags.split())  # random, sequential
        return "sr" in flags.split()

    bank = build_bank(tmp_path, DIM, stream(in_clusters(ROWS, 1)))
    assert not read_ahead()
    assert [read_ahead() for _ in bank._parts()] == [True]
    assert not read_ahead()
    assert next(bank._parts()) == slice(0, ROWS)  # left early
    assert not read_ahead()
