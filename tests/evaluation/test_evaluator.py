"""What a run says of its predictors: fitted to the rows they may see, and counted again here from the stored bank with NumPy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from classifiers.predictors import Vote
from classifiers.retrieved import Block, Retrieved
from config import Action
from evaluation.baselines import Predictors
from evaluation.evaluator import Evaluator
from inputs import store
from inputs.batches import Sets
from run import prepare
from run.loaded import Loaded, load
from run.prepare import prepare_loaded
from run.run import run
from tests.run.test_run import TINY

LEAST = np.finfo(np.float32).eps  # what a vote without a prior says of a class that no neighbor has
SMALL: dict[str, Any] = {**TINY, "num_epochs": 1, "calibrate": "head"}
EMBEDDED: dict[str, Any] = {**SMALL, "embed_dim": 8, "k_train": 5}


def options(head: str) -> dict[str, Any]:
    return {**(SMALL if head == "linear" else EMBEDDED), "head": head}


class Finished(NamedTuple):
    loaded: Loaded
    evaluator: Evaluator
    sets: Sets


def opened(folder: Path, **given: Any) -> Finished:
    loaded = load(str(folder), given)
    evaluator = prepare_loaded(loaded)
    return Finished(loaded, evaluator, evaluator.sets)


def evaluated(folder: Path, out: Path, **given: Any) -> dict[str, Any]:
    """As it stands in results.json."""
    run({**given, "output_dir": str(out)}, Action(test_only=True, checkpoint=str(folder)))
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    return found


def stored_bank(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings and labels of the bank of a run, in the order of ids."""
    groups, _ = store.load(folder / "checkpoints" / "best")
    bank = groups.get("bank") or groups["baseline_bank"]
    order = bank["id"].argsort()
    return bank["embedding"][order].double().numpy(), bank["label"][order].numpy()


def nearest(rows: np.ndarray, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Squared distances and row numbers (N, k)."""
    squared = ((queries[:, None] - rows[None]) ** 2).sum(2)
    order = squared.argsort(1, kind="stable")[:, :k]
    return np.take_along_axis(squared, order, 1), order


def counted(weights: np.ndarray, labels: np.ndarray, num_classes: int) -> np.ndarray:
    """The weight of each class, (N, C); weights sum to 1."""
    votes = np.stack([(weights * (labels == c)).sum(1) for c in range(num_classes)], 1)
    found: np.ndarray = votes / weights.sum(1, keepdims=True)
    return found


def assert_scores(found: dict[str, float], probs: np.ndarray, target: np.ndarray) -> None:
    assert found["accuracy"] == (probs.argmax(1) == target).mean()
    assert found["nll"] == pytest.approx(-np.log(np.maximum(probs[np.arange(len(target)), target], LEAST)).mean(), rel=1e-5)


# ---------------------------------------------------------------- which rows may be looked at


class Fit(NamedTuple):
    retrieved: Retrieved
    target: Tensor
    mode: str


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Fit], list[Fit]]:
    """Every fit of a confidence, and of an attention to the bank's own rows; they are done as ever."""
    confidence: list[Fit] = []
    attention: list[Fit] = []
    calibrate, train_attention = Predictors.calibrate, prepare.train_attention

    def watched(predictors: Predictors, retrieved: Retrieved, target: Tensor, seed: int) -> None:
        confidence.append(Fit(retrieved, target, predictors.mode))
        calibrate(predictors, retrieved, target, seed)

    def trained(vote: Vote, retrieved: Retrieved, target: Tensor, seed: int) -> None:
        attention.append(Fit(retrieved, target, "attention"))
        train_attention(vote, retrieved, target, seed)

    monkeypatch.setattr(Predictors, "calibrate", watched)
    monkeypatch.setattr(prepare, "train_attention", trained)
    return confidence, attention


@pytest.mark.parametrize("head", ["linear", "attn-knn", "linear+attn-knn"])
def test_the_confidence_is_fitted_to_validation_rows_only(head: str, fits: tuple[list[Fit], list[Fit]], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run({**options(head), "output_dir": str(folder)}, Action())
    evaluated(folder, tmp_path / "again", calibrate="temperature")  # fitted anew, from the checkpoint
    loaded, _, sets = opened(folder)
    data = loaded.data
    assert data.val is not None
    assert sets.val is not None
    wanted = loaded.model.of_rows(sets.val)
    assert (stored_bank(folder)[1] == data.train.y).all()
    for fit, mode in zip(fits[0], ("head", "temperature"), strict=True):
        assert fit.mode == mode
        assert torch.equal(fit.retrieved.features, wanted)
        assert torch.equal(fit.target, torch.from_numpy(data.val.y))


def test_an_attention_over_a_bank_is_trained_on_training_rows_that_are_not_their_own_neighbors(
    fits: tuple[list[Fit], list[Fit]], tmp_path: Path
) -> None:
    run({**options("linear"), "output_dir": str(tmp_path / "run")}, Action())
    loaded = load(str(tmp_path / "run"), {})
    (fit,) = fits[1]
    assert torch.equal(fit.target, torch.from_numpy(loaded.data.train.y))
    assert torch.equal(fit.retrieved.embedding.double(), torch.from_numpy(stored_bank(tmp_path / "run")[0]))
    assert fit.retrieved.mask.all()
    assert not (fit.retrieved.index == torch.arange(len(fit.target))[:, None]).any()


def write_images(path: Path, change: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (101, 8, 8), np.uint8)
    y = np.arange(101) % 3
    x_test, y_test = x[70:], y[70:]
    if change == "labels":
        y_test = np.random.default_rng(1).permutation(y_test)
    if change == "images":
        x_test = 255 - x_test[::-1]
    np.savez(path, x_train=x[:70], y_train=y[:70], x_test=x_test, y_test=y_test)


@pytest.fixture(scope="module", params=["linear", "linear+attn-knn"])
def trained_on(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A run on the same training rows, with other test rows if so wanted."""
    folder = tmp_path_factory.mktemp("runs")
    given = {**options(request.param), "dataset": f"npz:{folder / 'rows.npz'}", "val_fraction": 0.2}

    def of(change: str) -> Path:
        out = folder / change
        if not out.exists():
            write_images(folder / "rows.npz", change)
            run({**given, "output_dir": str(out)}, Action())
        return out

    return of


@pytest.mark.parametrize("change", ["labels", "images"])
def test_nothing_that_is_kept_depends_on_the_test_rows(change: str, trained_on: Callable[[str], Path]) -> None:
    first, second = trained_on("nothing"), trained_on(change)
    scores = [json.loads((folder / "results.json").read_text())["test"] for folder in (first, second)]
    assert scores[0] != scores[1]  # the test rows did change
    (one, _), (two, _) = (store.load(folder / "checkpoints" / "best") for folder in (first, second))
    assert one.keys() == two.keys() >= {"model", "predictors"}
    for group, tensors in one.items():
        assert tensors.keys() == two[group].keys()
        assert [name for name in tensors if not torch.equal(tensors[name], two[group][name])] == [], group


# ---------------------------------------------------------------- several k, and as many as are worth it


CLASSES, DIM = 3, 6


def table() -> tuple[np.ndarray, ...]:
    """Test rows lie very near a training row, or not: a vote by distance rests on few neighbors, or on many."""
    rng = np.random.default_rng(0)
    y = np.arange(97) % CLASSES
    x = np.eye(DIM)[y] + 0.5 * rng.normal(size=(97, DIM))
    some = rng.permutation(97)[:41]
    x_test = x[some] + 10 ** rng.uniform(-3, 0, (41, 1)) * rng.normal(size=(41, DIM))
    return x, y, x_test, np.where(rng.random(41) < 0.2, (y[some] + 1) % CLASSES, y[some])


class Tables(NamedTuple):
    folder: Path
    rows: np.ndarray
    labels: np.ndarray
    queries: np.ndarray
    target: np.ndarray


@pytest.fixture(scope="module", params=["linear", "attn-knn"])
def tables(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """Ready-made features: an embedding is a row at length 1."""
    folder = tmp_path_factory.mktemp("runs")
    x, y, x_test, y_test = table()
    np.savez(folder / "rows.npz", x_train=x, y_train=y, x_test=x_test, y_test=y_test)
    given: dict[str, Any] = dict(dataset=f"npz:{folder / 'rows.npz'}", model="identity", freeze_backbone=True, head=request.param)
    given |= {"embed_dim": 0, "attention_heads": 2, "k_train": 7} if request.param == "attn-knn" else {}
    run({**given, "calibrate": "none", "num_epochs": 2, "output_dir": str(folder / "run")}, Action())
    rows, labels = stored_bank(folder / "run")
    queries = x_test.astype(np.float32).astype(np.float64)
    return Tables(folder / "run", rows, labels, queries / np.linalg.norm(queries, axis=1, keepdims=True), y_test)


def inverse(squared: np.ndarray) -> np.ndarray:
    weights = 1 / np.sqrt(squared)
    found: np.ndarray = weights / weights.sum(1, keepdims=True)
    return found


def fewest(weights: np.ndarray) -> np.ndarray:
    """The exp(entropy) heaviest, rounded up, at weights that sum to 1."""
    share = weights / weights.sum(1, keepdims=True)
    count = np.ceil(np.exp(-(share * np.log(np.maximum(share, 1e-300))).sum(1)) - 1e-4)
    place = np.empty_like(share)
    np.put_along_axis(place, (-share).argsort(1, kind="stable"), np.arange(share.shape[1])[None].repeat(len(share), 0), 1)
    share = share * (place < count[:, None])
    found: np.ndarray = share / share.sum(1, keepdims=True)
    return found


def test_a_vote_of_several_k_is_the_mean_of_their_votes(tables: Tables, tmp_path: Path) -> None:
    found = evaluated(tables.folder, tmp_path, k_ensemble="1,5")["predictors"]
    assert (found["k"], found["ensemble"]) == (5, [1, 5])
    squared, index = nearest(tables.rows, tables.queries, 5)
    labels = tables.labels[index]
    for name, weights in (("uniform", np.ones_like(squared)), ("distance", inverse(squared))):
        of_k = [counted(weights[:, :k], labels[:, :k], CLASSES) for k in (1, 5)]
        assert_scores(found["scores"][name]["raw"], (of_k[0] + of_k[1]) / 2, tables.target)
        for alone in of_k:  # the mean is neither of them
            nll = -np.log(np.maximum(alone[np.arange(len(alone)), tables.target], LEAST)).mean()
            assert found["scores"][name]["raw"]["nll"] != pytest.approx(nll, rel=1e-4)


def test_adaptive_k_keeps_the_heaviest_neighbors(tables: Tables, tmp_path: Path) -> None:
    found = evaluated(tables.folder, tmp_path, k_eval="7", adaptive_k=True)["predictors"]["scores"]
    squared, index = nearest(tables.rows, tables.queries, 7)
    labels, all_of_them = tables.labels[index], np.full_like(squared, 1 / 7)
    few = fewest(inverse(squared))
    assert 1 < ((few > 0).sum(1) < 7).sum() < len(few)  # some rows need all, some do not
    assert_scores(found["distance"]["raw"], counted(few, labels, CLASSES), tables.target)
    np.testing.assert_allclose(fewest(all_of_them), all_of_them)  # equal weights keep all
    without = evaluated(tables.folder, tmp_path / "all", k_eval="7")["predictors"]["scores"]
    assert found["uniform"]["raw"] == without["uniform"]["raw"]
    assert found["distance"]["raw"]["nll"] != without["distance"]["raw"]["nll"]


def test_adaptive_attention_rests_on_the_heaviest_neighbors(tables: Tables, tmp_path: Path) -> None:
    """Among the baselines the attention too; the rest of its vote (prior, temperature) is as without."""
    _, evaluator, sets = opened(tables.folder, k_eval="7", adaptive_k=True)
    vote = evaluator.predictors.raw["attention"]
    assert isinstance(vote, Vote)
    vote.eval()
    block: Block = evaluator.retrieve(sets.test).block(slice(None))
    near = block.neighbors
    squared, index = nearest(tables.rows, tables.queries, 7)
    assert (near.index.numpy() == index).all()
    np.testing.assert_allclose(near.distance, squared, atol=1e-6)
    with torch.no_grad():
        plain = vote.weigh(block.embedding, near.embedding, near.distance, near.label, near.mask)
        wanted = fewest(plain.double().numpy())
        assert ((wanted > 0).sum(1) < 7).any()
        np.testing.assert_allclose(vote.weights(block), wanted, atol=1e-6)
        scores = torch.from_numpy(counted(wanted, tables.labels[index], CLASSES)).float()
        log_probs = vote.log_probs(scores, block.context)
    found = evaluated(tables.folder, tmp_path, k_eval="7", adaptive_k=True)["predictors"]["scores"]["attention"]["raw"]
    assert found["nll"] == pytest.approx(-log_probs[torch.arange(len(index)), torch.from_numpy(tables.target)].mean().item(), rel=1e-5)


# ---------------------------------------------------------------- rows from elsewhere


def on_a_circle(degrees: np.ndarray) -> np.ndarray:
    angle = np.deg2rad(degrees)
    found: np.ndarray = np.stack([np.cos(angle), np.sin(angle)], 1)
    return found


@pytest.fixture(scope="module")
def circle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes at both sides of east. Foreign rows lie in the west, with as many neighbors of the one as of the other."""
    folder = tmp_path_factory.mktemp("circle")
    away = np.linspace(30, 60, 40)
    y = np.arange(80) % 2
    x = on_a_circle(np.where(y == 0, -1, 1) * away[np.arange(80) // 2])
    y_test = np.arange(22) % 2
    x_test = on_a_circle(np.where(y_test == 0, -1, 1) * np.linspace(31, 58, 22))
    np.savez(folder / "east.npz", x_train=x, y_train=y, x_test=x_test, y_test=y_test)
    np.savez(folder / "west.npz", x_train=x, y_train=y, x_test=on_a_circle(np.linspace(177, 183, 19)), y_test=np.arange(19) % 2)
    given = dict(dataset=f"npz:{folder / 'east.npz'}", model="identity", freeze_backbone=True, head="knn", vote="uniform", k_train=6)
    run({**given, "contrastive_weight": 0.0, "val_fraction": 0.25, "output_dir": str(folder / "run")}, Action())
    return folder


@pytest.mark.parametrize("calibrate", ["head", "none"])
def test_rows_that_are_far_away_and_unlike_any_class_look_foreign(calibrate: str, circle: Path, tmp_path: Path) -> None:
    found = evaluated(circle / "run", tmp_path, ood=f"npz:{circle / 'west.npz'}", calibrate=calibrate)["about"]["ood"]
    assert found["rows"] == 19
    assert found["auroc_distance"] > 0.9
    assert found["auroc_confidence"] > 0.9


@pytest.mark.parametrize("calibrate", ["head", "none"])
def test_the_very_same_rows_are_no_more_foreign_than_themselves(calibrate: str, circle: Path, tmp_path: Path) -> None:
    found = evaluated(circle / "run", tmp_path, ood=f"npz:{circle / 'east.npz'}", calibrate=calibrate)["about"]["ood"]
    assert found["rows"] == 22
    assert found["auroc_distance"] == 0.5
    assert found["auroc_confidence"] == 0.5


# ---------------------------------------------------------------- many classes


def test_confusions_are_counted_of_few_classes(circle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They grow with the square of the classes; there are two here."""
    evaluator = opened(circle / "run").evaluator
    assert np.sum(evaluator.evaluate()[0]["confusion"]) == 22
    monkeypatch.setattr("evaluation.evaluator.MOST_CONFUSED", 1)
    assert "confusion" not in evaluator.evaluate()[0]


# ---------------------------------------------------------------- views


VIEWS = 3


@pytest.mark.parametrize("head", ["linear", "attn-knn"])
def test_averaged_views_are_the_mean_of_the_probabilities_of_each(head: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    results = run({**options(head), "tta": VIEWS, "calibrate": "temperature", "output_dir": str(folder)}, Action())
    loaded, evaluator, sets = opened(folder)
    model, predictors = loaded.model.eval(), evaluator.predictors
    rows, labels = stored_bank(folder)
    seen: dict[str, list[Tensor]] = {predictors.own: [], "uniform": []}
    with torch.no_grad():
        for view in range(VIEWS):
            batches = list(sets.test.seen_as(view).epoch())
            features = torch.cat([model.backbone(batch.x) for batch in batches])
            embedding = model.head.embed(features) if model.head.wants_bank else torch.nn.functional.normalize(features, dim=1)
            index = nearest(rows, embedding.double().numpy(), results["predictors"]["k"])[1]
            shares = counted(np.ones(index.shape), labels[index], 3)
            seen[predictors.own].append(torch.cat([model(batch.x) for batch in batches]))
            seen["uniform"].append(torch.from_numpy(np.maximum(shares, LEAST)).log().float())
    target = torch.from_numpy(loaded.data.test.y)
    found = evaluator.variants([evaluator.retrieve(sets.test.seen_as(view)) for view in range(VIEWS)])
    for name, views in seen.items():
        assert not torch.allclose(views[0], views[1], atol=1e-3)
        assert not torch.allclose(views[1], views[2], atol=1e-3)
        predictor: Any = predictors.calibrated[name]
        temperature = predictor.log_temperature.exp().item()
        assert temperature != 1
        for kind, of_view in (("raw", views), ("calibrated", [(view / temperature).log_softmax(1) for view in views])):
            mean = torch.stack(of_view).exp().mean(0)
            np.testing.assert_allclose(found[f"{kind}_tta"][name].exp(), mean, atol=1e-5)
            np.testing.assert_allclose(found[kind][name].exp(), of_view[0].exp(), atol=1e-5)
            scores = results["predictors"]["scores"][name][f"{kind}_tta"]
            assert scores["nll"] == pytest.approx(-mean[torch.arange(len(mean)), target].log().mean().item(), rel=1e-4)
            assert scores["brier"] == pytest.approx((mean - torch.eye(3)[target]).square().sum(1).mean().item(), rel=1e-4)
    of_own = results["predictors"]["scores"][predictors.own]
    assert (results["test"], results["test_calibrated"]) == (of_own["raw_tta"], of_own["calibrated_tta"])
