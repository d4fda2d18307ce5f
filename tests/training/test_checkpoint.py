"""Checkpoints: found by what a user names; optimizers and random generators go on exactly where they were."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from classifiers.bank import Bank
from inputs.store import INDEX, load, save
from training.checkpoint import find, load_whole, pack_optimizer, pieces_of, unpack_optimizer
from utils import BadOption

# ---------------------------------------------------------------- what a user may name


def test_find(tmp_path):
    run = tmp_path / "run"
    for name in ("best", "last"):
        save(run / "checkpoints" / name, {"model": {"w": torch.arange(5)}}, {})
    best, last = run / "checkpoints" / "best", run / "checkpoints" / "last"
    assert find(run) == find(str(run)) == find(run / "checkpoints") == find(best) == find(best / INDEX) == best
    assert find(next(last.glob("model-*"))) == find(last) == find(run, prefer="last") == last
    (best / INDEX).unlink()
    with pytest.raises(BadOption, match=r"^checkpoint lacks checkpoints/best/checkpoint.json, got '.*run'"):
        find(run)  # not silently other weights
    assert find(run, prefer="last") == find(last) == last
    for file in best.iterdir():
        file.unlink()
    best.rmdir()
    assert find(run) == last  # stopped in its first epoch: there never was a best one


def test_a_bank_in_pieces_is_read_whole(tmp_path):
    bank = Bank(3, copies=[0, 1, 1, 3, 4])
    bank.add(torch.arange(15.0).view(5, 3), [0, 1, 1, 0, 2], [4, 2, 0, 1, 3])
    pieces, facts = pieces_of(bank)
    ((name, rows),) = pieces.items()
    first, second = ({key: part[at] for key, part in rows.items() if key != "copies"} for at in (slice(0, 2), slice(2, 5)))
    save(tmp_path, {"model": {"w": torch.ones(2)}, name: {**first, "copies": rows["copies"]}, "bank-00001": second}, facts)
    tensors, facts = load_whole(tmp_path, "bank")
    again = Bank.unpack(tensors["bank"], facts["bank"])
    for name in ("embeddings", "labels", "ids", "copies"):
        assert torch.equal(getattr(again, name), getattr(bank, name))
    assert list(load_whole(tmp_path, "model")[0]) == ["model"]


def test_find_refuses_what_is_no_checkpoint(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"x")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(BadOption, match=r"^checkpoint must be a run or a checkpoint that exists"):
        find(tmp_path / "none")
    for name in ("model.pt", "model.safetensors"):
        with pytest.raises(BadOption, match=r"^checkpoint must be a run, a folder in its checkpoints, or the checkpoint.json in one"):
            find(tmp_path / name)
    with pytest.raises(BadOption, match=r"^start must hold a checkpoint \(checkpoints/last/checkpoint.json\)"):
        find(tmp_path, prefer="last", flag="start")


# ---------------------------------------------------------------- optimizers and random generators

OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.03),
    "fused": lambda groups: torch.optim.AdamW(groups, lr=0.03, fused=True),
    "amsgrad": lambda groups: torch.optim.AdamW(groups, lr=0.03, amsgrad=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.03, betas=(0.8, 0.95)),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.03),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.03, momentum=0.9, nesterov=True),
}


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    torch.manual_seed(100 + number)
    optimizer.zero_grad()
    model(torch.randn(11, 5)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 3])
def test_an_optimizer_goes_on_exactly_where_it_was(kind, steps, tmp_path):
    def build(model: nn.Module) -> torch.optim.Optimizer:
        first, second = model[0], model[2]  # type: ignore[index]
        groups = [{"params": first.parameters(), "weight_decay": 0.5, "name": "backbone"}, {"params": second.parameters(), "lr": 0.07}]
        return OPTIMIZERS[kind](groups)

    model = network()
    optimizer = build(model)
    for number in range(steps):
        step(model, optimizer, number)
    packed, facts = pack_optimizer(optimizer)
    save(tmp_path, {"model": model.state_dict(), "training": packed}, {"optimizer": facts})

    again = network()
    found, read = load(tmp_path)
    again.load_state_dict(found["model"])
    other = build(again)
    unpack_optimizer(other, found["training"], read["optimizer"])
    assert type(other.param_groups[0].get("betas", ())) is tuple
    before, after = optimizer.state_dict(), other.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert after["state"].keys() == before["state"].keys()
    for number in range(steps, steps + 3):
        step(model, optimizer, number)
        step(again, other, number)
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)
