"""A bank in files: what is read is what was written, and what is damaged is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from classifiers.bank import Bank
from classifiers.bank_files import Shards, load_bank, save_bank
from inputs import store
from utils import BadOption


def made(rows: int = 101, dim: int = 7, **options: Any) -> Bank:
    generator = torch.Generator().manual_seed(0)
    bank = Bank(dim, **options)
    bank.add(F.normalize(torch.randn(rows, dim, generator=generator), dim=1), torch.arange(rows) % 5, torch.arange(rows) * 3)
    return bank


@pytest.mark.parametrize("options", [{}, {"kind": "ip"}, {"kind": "IVF4,Flat", "recall": 0.5}, {"cap": 53, "evict": "class-balanced"}])
@pytest.mark.parametrize("rows_in_a_file", [1, 17, 1000])
def test_what_is_read_is_what_was_written(options: dict[str, Any], rows_in_a_file: int, tmp_path: Path) -> None:
    bank = made(copies=torch.arange(400) % 200, **options)
    save_bank(tmp_path, bank, shard=rows_in_a_file * 4 * 7)
    files = list(tmp_path.glob("rows-*.safetensors"))
    assert len(files) == -(-len(bank) // rows_in_a_file)
    again = load_bank(tmp_path)
    before, facts = bank.pack()
    after, facts_again = again.pack()
    assert facts == facts_again
    assert all(torch.equal(before[name], after[name]) for name in before)
    queries, exclude = bank.embeddings[:11], bank.ids[:11]
    for part in ("index", "distance", "label"):
        assert torch.equal(getattr(bank.search(queries, 5, exclude), part), getattr(again.search(queries, 5, exclude), part))
    assert again.add(queries[:1] + 1, [0]) == bank.add(queries[:1] + 1, [0])  # ids go on


def test_no_rows(tmp_path: Path) -> None:
    save_bank(tmp_path, Bank(3))
    assert len(load_bank(tmp_path)) == 0


def test_a_new_content_replaces_the_old_one_whole(tmp_path: Path) -> None:
    save_bank(tmp_path, made(101), shard=28 * 10)
    save_bank(tmp_path, made(31), shard=28 * 10)
    assert len(load_bank(tmp_path)) == 31
    assert len(list(tmp_path.glob("*.safetensors"))) == 4


@pytest.mark.parametrize("damage", ["flipped", "shorter", "gone"])
def test_what_is_damaged_is_refused(damage: str, tmp_path: Path) -> None:
    save_bank(tmp_path, made(), shard=28 * 10)
    victim = sorted(tmp_path.glob("rows-*.safetensors"))[4]
    content = bytearray(victim.read_bytes())
    content[-3] ^= 1
    if damage == "gone":
        victim.unlink()
    else:
        victim.write_bytes(content if damage == "flipped" else content[:-1])
    with pytest.raises(BadOption, match=r"is damaged: rows-|lacks its file rows-"):
        load_bank(tmp_path)


def test_other_folders_are_refused(tmp_path: Path) -> None:
    store.save(tmp_path / "other", {"model": {"w": torch.ones(2)}}, {"seed": 1})
    with pytest.raises(BadOption, match=r"^bank must be a folder that save_bank wrote, got "):
        load_bank(tmp_path / "other")
    with pytest.raises(BadOption, match=r"must hold checkpoint\.json"):
        load_bank(tmp_path / "none")


def test_files_that_do_not_make_what_the_facts_say_are_refused(tmp_path: Path) -> None:
    rows, facts = made().pack()
    wrong = json.loads(json.dumps(facts))
    wrong["shapes"]["embedding"][0] = 10**12
    for told in (wrong, {**facts, "dim": "seven"}, {}):
        store.save(tmp_path, Shards(rows, 10), {"bank": told})
        with pytest.raises(BadOption, match="bank"):
            load_bank(tmp_path)
