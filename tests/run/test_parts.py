"""The parts of a run: what can't work together or with these rows is refused, before anything is written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from config import Config
from dataset import Data
from run.checks import check_evaluation, check_neighbors
from run.complete import complete
from run.finish import rows_for_ood
from run.parts import ALL, Kept, build_model, foreign_rows, load_data, loaders
from run.saved import check_same, with_absolute_paths
from training.bank import order_in_bank
from utils import BadOption

FAKE = "fake(train=97, test=31, size=8, classes=3)"
CPU = torch.device("cpu")


def completed(**given: Any) -> tuple[Config, Data]:
    given = {"dataset": FAKE, **given}
    data = load_data(given)
    return complete(given, data), data


# ---------------------------------------------------------------- what can't work


@pytest.mark.parametrize("cap", range(3, 9))
def test_a_cap_that_would_lose_a_class(cap: int) -> None:
    data = load_data({"dataset": FAKE})
    stays = data.train.y[order_in_bank(len(data.train), 0).numpy()][-cap:]
    lost = sorted({0, 1, 2} - set(stays.tolist()))
    config = completed(head="knn", k_train=1)[0].but(bank_cap=cap)
    if lost:
        rule = f"bank_cap keeps no row of {', '.join(map(str, lost))}; --bank_evict class-balanced does, got {cap}"
        with pytest.raises(BadOption, match=rule):
            check_neighbors(config, data)
    else:
        check_neighbors(config, data)
    check_neighbors(config.but(bank_evict="class-balanced"), data)


def test_a_sample_has_neighbors_to_spare() -> None:
    assert completed(head="knn", k_train=5, neighbor_sample=0.08)[0].head.neighbor_sample == 0.08  # 7 of 88
    with pytest.raises(BadOption, match=r"neighbor_sample must leave at least k_train \+ 2 \(7\) of the bank's 88 rows, got 0.07"):
        completed(head="knn", k_train=5, neighbor_sample=0.07)
    with pytest.raises(BadOption, match="of the bank's 44 rows"):
        completed(head="knn", k_train=5, neighbor_sample=0.08, bank_cap=44)


def test_a_cache_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config, data = completed(freeze_backbone=True, feature_cache=str(tmp_path / "file" / "cache"))
    with pytest.raises(BadOption, match="feature_cache must be a directory that can be written"):
        check_evaluation(config, data, ALL)


def test_foreign_rows_are_blamed_on_their_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, data = completed(dataset="digits")
    for name, rule in (
        ("digitz", r"ood must be one of .*\(did you mean 'digits'\?\), got 'digitz'"),
        ("npz:none.npz", "ood must be a file that can be read .*, got 'none.npz'"),
        ("cifar10", "ood must hold cifar-10-batches-py"),
        (FAKE, r"ood must have one channel: digits has 1, got 'fake\(.*\) with 3'"),
    ):
        with pytest.raises(BadOption, match=f"^{rule}"):
            foreign_rows(config.but(data_path=str(tmp_path)), data, name, CPU)
    color, three = completed()
    two = "fake(train=8, test=5, size=8, channels=2)"
    with pytest.raises(BadOption, match="ood must have one channel, or 3: fake"):
        foreign_rows(color, three, two, CPU)
    rows, table = completed(dataset="wine")
    with pytest.raises(BadOption, match=r"ood must have the columns that the model was trained on, 13 of numbers .*, not 4"):
        foreign_rows(rows, table, "iris", CPU)
    assert "own rows" not in capsys.readouterr().err
    assert rows_for_ood(config.but(ood="digits"), data, CPU) is not None
    assert "ood: these are the run's own rows" in capsys.readouterr().err


def test_files_of_foreign_rows_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = with_absolute_paths({"ood": "npz:a.npz", "dataset": "csv:b.csv:y"})
    assert given == {"ood": f"npz:{tmp_path}{os.sep}a.npz", "dataset": f"csv:{tmp_path}{os.sep}b.csv:y"}
    assert with_absolute_paths({"ood": "digits"}) == {"ood": "digits"}


def test_tables_and_images_are_told_apart() -> None:
    """An image model asked about a table, the other way round, and a table with other columns."""
    images, wine = load_data({"dataset": FAKE}), load_data({"dataset": "wine"})
    with pytest.raises(BadOption, match=r"^dataset has the rows of a table, and the model reads images"):
        load_data({"dataset": "wine"}, images.fitted)
    facts = {"classes": list(wine.classes), "shape": list(wine.shape), "config": {"resize": 0}}
    with pytest.raises(BadOption, match=r"^dataset has images, and the model reads the rows of a table"):
        check_same(images, facts)
    with pytest.raises(BadOption, match=r"^dataset must have the columns that the model was trained on, 13 of numbers"):
        load_data({"dataset": "iris"}, wine.fitted)


def test_features_of_other_rows_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config, data = completed(freeze_backbone=True, num_layers=1, num_heads=1, d_hidden=6, d_mlp=7)
    model = build_model(config, data, CPU)
    kept = loaders(config, data, model, CPU, Kept(tmp_path / "run" / "features"))
    before = sorted(tmp_path.rglob("*"))
    assert before
    again = loaders(config, data, model, CPU, Kept())
    assert sorted(tmp_path.rglob("*")) == before
    assert torch.equal(next(again.test.epoch()).x, next(kept.test.epoch()).x)
