"""A trained model without its data set: it says what the run's evaluation said, of whatever holds the rows."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import dataset
from config import Action
from evaluation.predictions import read
from evaluation.results import read as read_results
from inputs import store
from run import load
from run.model import Model
from run.run import run
from tests.run.test_run import ROOT, TINY
from utils import BadOption

SMALL = {**TINY, "noise": 0.0, "num_epochs": 1, "k_train": 5, "embed_dim": 8, "attention_heads": 2, "calibrate": "head"}
HEADS: dict[str, dict[str, Any]] = {
    "linear": {"head": "linear", "tta": 3},
    "attn-knn": {"head": "attn-knn"},
    "linear+knn": {"head": "linear+knn", "vote": "distance", "k_ensemble": "3,7", "resize": 12},
    "bare": {"head": "linear", "baselines": False, "calibrate": "none"},
}


def trained(folder: Path, given: dict[str, Any]) -> Path:
    run({**SMALL, **given, "output_dir": str(folder)}, Action())
    return folder


def saved(folder: Path, variant: str = "calibrated") -> np.ndarray:
    """The probabilities of the run's own predictor, as it kept them."""
    tensors, metadata = read(folder)
    found: np.ndarray = tensors[f"{metadata['own']}.{variant}"].exp().numpy()
    return found


@pytest.fixture(scope="module", params=list(HEADS))
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, trained(tmp_path_factory.mktemp("runs") / "run", HEADS[request.param])


def test_pixels(finished: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """uint8 arrays as the data set had them, images of Pillow's, tensors, batches of any size; from another folder."""
    name, folder = finished
    monkeypatch.chdir(tmp_path)
    x = dataset.load(SMALL["dataset"]).test.x.transpose(0, 2, 3, 1)  # (31, 8, 8, 3)
    model = load(folder, device="cpu")
    expected = saved(folder, {"linear": "calibrated_tta", "bare": "raw"}.get(name, "calibrated"))
    found = model.predict(x)
    assert found.probabilities.shape == (31, 3)
    np.testing.assert_allclose(found.probabilities, expected, atol=1e-6)
    assert found.classes == [str(n) for n in expected.argmax(1)]
    np.testing.assert_allclose(found.confidence, expected.max(1), atol=1e-6)
    np.testing.assert_allclose(model.predict(torch.from_numpy(x), batch_size=7).probabilities, expected, atol=1e-6)
    np.testing.assert_allclose(model.predict([Image.fromarray(row) for row in x]).probabilities, expected, atol=1e-6)
    np.testing.assert_allclose(model.predict(x[0]).probabilities, expected[:1], atol=1e-6)
    assert len(model.predict([])) == 0


def test_neighbors_are_those_that_vote(finished: tuple[str, Path]) -> None:
    name, folder = finished
    model, x = load(folder, device="cpu"), dataset.load(SMALL["dataset"]).test.x.transpose(0, 2, 3, 1)
    if name == "bare":
        with pytest.raises(BadOption, match="holds no bank"):
            model.neighbors(x)
        return
    found = model.neighbors(x, k=4)
    assert model.retriever is not None
    assert found.rows.shape == (31, 4)
    labels = dataset.load(SMALL["dataset"]).train.y
    assert (found.labels == labels[found.rows]).all()  # rows are numbers in the training split
    assert found.classes[2] == [str(labels[row]) for row in found.rows[2]]
    assert (np.diff(found.weights, axis=1) <= 0).all()
    assert (found.weights.sum(1) < 1 + 1e-6).all()
    everything = model.neighbors(x, k=100)
    assert everything.rows.shape == (31, model.retriever.k)
    np.testing.assert_allclose(everything.weights.sum(1), 1, atol=1e-5)
    near = model.predict(x, k=2)
    assert near.neighborhood is not None
    assert near.distances is not None
    assert (near.neighborhood.rows == found.rows[:, :2]).all()
    np.testing.assert_allclose(near.distances, everything.distances.min(1), atol=1e-6)


def test_a_vote_is_made_of_the_weights_that_are_shown(tmp_path: Path) -> None:
    """As trained with a vote without a prior, probabilities are sums of weights, but for the prior that heads learn: uniform, by hand."""
    folder = trained(tmp_path / "run", {"head": "knn", "vote": "uniform", "calibrate": "none", "embed_dim": None})
    model, x = load(folder, device="cpu"), dataset.load(SMALL["dataset"]).test.x.transpose(0, 2, 3, 1)
    near = model.neighbors(x)
    assert near.weights == pytest.approx(np.full((31, 5), 0.2))
    votes = np.stack([(near.labels == c).sum(1) / 5 for c in range(3)], 1)
    assert model.vote is not None
    assert model.vote.prior is not None
    share = (model.predict(x).probabilities - votes)[votes == 0]
    assert (share > 0).all()  # the prior's part, and nothing else, is where no neighbor is
    assert share.max() < 0.2


# ---------------------------------------------------------------- image files


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder of images of many sizes, and a run over it with three views."""
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for part, count in (("train", 12), ("test", 5)):
        for c, color in {"bl,ue": (30, 30, 200), 'r"ed': (200, 30, 30)}.items():
            (root / "in" / part / c).mkdir(parents=True)
            for n in range(count):
                pixels = np.clip(np.array(color) + rng.normal(0, 60, (*rng.integers(11, 31, 2), 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(root / "in" / part / c / f"{n}.png")
    given = {"dataset": f"folder:{root / 'in'}", "resize": 8, "head": "linear+knn", "tta": 3, "workers": 0}
    return root / "in", trained(root / "run", given)


def test_files(photos: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    root, folder = photos
    model, expected = load(folder), saved(folder, "calibrated_tta")
    test = sorted((root / "test").rglob("*.png"))
    found = model.predict(root / "test")
    assert list(found.inputs) == [str(path) for path in test]
    np.testing.assert_allclose(found.probabilities, expected, atol=1e-6)
    np.testing.assert_allclose(model.predict(test, batch_size=3).probabilities, expected, atol=1e-6)
    np.testing.assert_allclose(model.predict([Image.open(path) for path in test]).probabilities, expected, atol=1e-6)
    np.testing.assert_allclose(model.predict([np.asarray(Image.open(path)) for path in test]).probabilities, expected, atol=1e-6)
    near = model.neighbors(test[0], k=1)
    assert near.files is not None
    assert near.files[near.rows[0, 0]].startswith(str(near.classes[0][0]))


def test_a_row_that_is_odd_is_an_error_in_its_place(photos: tuple[Path, Path], tmp_path: Path) -> None:
    root, folder = photos
    (tmp_path / "text.png").write_text("no image")
    good = next((root / "test").rglob("*.png"))
    whole = good.read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    rows = [good, tmp_path / "absent.png", tmp_path / "text.png", tmp_path / "cut.png", np.zeros((4, 4, 3)), np.zeros(4, np.uint8), good]
    found = load(folder).predict(rows, k=2, batch_size=4)
    damaged = "can't be read as an image"
    wanted = [None, "there is no such file", damaged, damaged, "must be uint8 pixels", "must be pixels", None]
    for error, text in zip(found.errors, wanted, strict=True):
        assert error is None if text is None else text in str(error)
    assert np.isnan(found.probabilities[1:6]).all()
    assert found.classes[1:6] == [None] * 5
    assert found.neighborhood is not None
    assert (found.neighborhood.rows[1:6] == -1).all()
    assert found.classes[0] == found.classes[6] is not None


# ---------------------------------------------------------------- tables


@pytest.fixture(scope="module")
def churn(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, str]], Path]:
    """Records of a CSV file with numbers, categories and holes, and a run over it."""
    root, rng = tmp_path_factory.mktemp("churn"), np.random.default_rng(0)
    records = []
    for n in range(80):
        label = n % 2
        color = ["red", "green", "", "blue"][int(rng.integers(4))]
        age, left = f"{rng.normal(30 + 9 * label, 5):.2f}", "yes" if label else "no"
        records.append({"age": age, "color": color, "left": left, "sum": f"{rng.normal():.3f}"})
    records[7]["age"] = "NA"
    text = "\n".join([",".join(records[0]), *(",".join(record.values()) for record in records)])
    (root / "churn.csv").write_text(text + "\n")
    given = {"dataset": f"csv:{root / 'churn.csv'}:left", "model": "mlp", "head": "attn-knn", "patch_size": None, "augment": None}
    names = ("patch_size", "augment", "num_heads", "cutmix_alpha", "attention_dropout")
    plain = {name: value for name, value in {**SMALL, **given}.items() if name not in names}
    run({**plain, "output_dir": str(root / "run")}, Action())
    return records, root / "run"


def test_records(churn: tuple[list[dict[str, str]], Path]) -> None:
    records, folder = churn
    y = np.array([record["left"] for record in records])
    test = dataset.stratified(y, dataset.TEST_FRACTION, 0)
    model, rows = load(folder), [records[n] for n in test]
    np.testing.assert_allclose(model.predict(rows).probabilities, saved(folder), atol=1e-6)
    typed: list[dict[str, Any]] = [{**row, "age": float(row["age"]), "sum": float(row["sum"])} for row in rows]
    np.testing.assert_allclose(model.predict(typed).probabilities, saved(folder), atol=1e-6)
    odd = model.predict([{"age": "x", "color": "red", "sum": 1}, {"age": 1, "sum": 2}, np.zeros(3), rows[0]])
    assert [str(error)[:24] for error in odd.errors] == ["must have a number as 'a", "has no 'color'", "must be a record with th", "None"]
    pandas = pytest.importorskip("pandas")
    np.testing.assert_allclose(model.predict(pandas.DataFrame(typed)).probabilities, saved(folder), atol=1e-6)


def test_rows_of_numbers(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {f"x_{part}": rng.normal(size=(rows, 6)).astype(np.float32) for part, rows in (("train", 60), ("test", 20))}
    np.savez(tmp_path / "f.npz", **arrays, y_train=np.arange(60) % 2, y_test=np.arange(20) % 2)
    given = {"dataset": f"npz:{tmp_path / 'f.npz'}", "model": "identity", "head": "attn-knn", "embed_dim": 8, "num_epochs": 1, "k_train": 5}
    run({**given, "output_dir": str(tmp_path / "run")}, Action())
    model = load(tmp_path / "run")
    np.testing.assert_allclose(model.predict(arrays["x_test"]).probabilities, saved(tmp_path / "run"), atol=1e-6)
    assert len(model.predict(arrays["x_test"][0])) == 1
    odd = model.predict([arrays["x_test"][0], np.zeros(5), np.full(6, np.nan), np.zeros(6, bool)])
    assert [error is None for error in odd.errors] == [True, False, False, False]


# ---------------------------------------------------------------- loading


def test_loading_leaves_generators_as_they_are(finished: tuple[str, Path]) -> None:
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    before = random.random(), np.random.rand(), torch.rand(1)
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    torch.use_deterministic_algorithms(False)
    load(finished[1])
    assert (random.random(), np.random.rand(), torch.rand(1)) == before
    assert not torch.are_deterministic_algorithms_enabled()  # the run was


def test_importing_run_is_light() -> None:
    code = "import sys; from run import load; print('torch' in sys.modules); import run.loaded; from run import load; print(callable(load))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


@pytest.mark.parametrize("name", ["linear", "interpolation"])
def test_runs_of_an_older_version(name: str) -> None:
    """Their checkpoints say neither of which kind rows are nor whether they may be mirrored; their probabilities come out all the same."""
    folder = Path(__file__).parent / "old" / name
    results = read_results(folder / "results.json")
    data = dataset.load(results["about"]["config"]["dataset"])
    model = load(folder)
    found = model.predict(data.test.x.transpose(0, 2, 3, 1)).probabilities
    wanted = results["predictors"]["scores"][name]["calibrated"]
    assert -np.log(found[np.arange(len(found)), data.test.y]).mean() == pytest.approx(wanted["nll"], abs=1e-6)


def test_what_an_older_checkpoint_lacks_is_said(
    churn: tuple[list[dict[str, str]], Path], photos: tuple[Path, Path], finished: tuple[str, Path], tmp_path: Path
) -> None:
    def without_reading(folder: Path, to: Path) -> Model:
        tensors, facts = store.load(folder / "checkpoints" / "best")
        store.save(to, tensors, {name: fact for name, fact in facts.items() if name != "reading"})
        return load(to)

    assert without_reading(photos[1], tmp_path / "photos").kind == "files"
    with pytest.raises(BadOption, match="lacks whether mirror images keep their class"):
        without_reading(photos[1], tmp_path / "photos").predict(photos[0] / "test")
    with pytest.raises(BadOption, match="lacks the names of the columns"):
        without_reading(churn[1], tmp_path / "churn").predict(churn[0][:1])
    assert without_reading(finished[1], tmp_path / "run").kind == "image"
    if "knn" in finished[0]:
        with pytest.raises(BadOption, match="must be the best of a run"):
            load(finished[1] / "checkpoints" / "last")
