"""`main.py explain --what neighbors`: every number against brute force, the command as a user types it, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from classifiers.predictors import Interpolation, Vote
from classifiers.retrieved import Context
from evaluation.evaluator import Evaluator
from explain.cases import Votes, worth_a_bar
from explain.draw_neighbors import draw_neighbors
from explain.neighbors import images_of, ranges, summary
from explain.subject import pick_image
from main import main
from run.loaded import Loaded, load
from run.prepare import prepare_loaded

SMALL = ["--num_layers", "1", "--num_heads", "3", "--d_hidden", "15", "--d_mlp", "7", "--num_epochs", "2", "--batch_size", "16"]
FAKE = ["--dataset", "fake(train=83, test=29, size=6, classes=5)", "--patch_size", "3", *SMALL, "--lr", "3e-3"]
RUNS = {
    "attn": [*FAKE, "--head", "attn-knn", "--embed_dim", "12", "--k_train", "7"],
    "interpolated": [*FAKE, "--head", "linear+knn", "--vote", "distance", "--k_train", "7"],
    "linear": FAKE,
    "without": [*FAKE, "--no-baselines"],
    "table": ["--dataset", "iris", "--num_epochs", "1", "--head", "knn", "--vote", "uniform", "--k_eval", "3"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, words in RUNS.items():
        assert main([*words, "--output_dir", str(folder / name)]) == 0
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def explained(run: Path, *words: str, name: str = "0") -> dict[str, Any]:
    """The record of a successful command; its picture is a whole PNG."""
    assert main(["explain", "--what", "neighbors", "--checkpoint", str(run), "--output_dir", "out", *words]) == 0
    path = Path("out") / f"explain-neighbors-{name}.png"
    with Image.open(path) as picture:
        picture.load()
        assert picture.width > 1000
    assert path.with_suffix(".txt").exists()
    found: dict[str, Any] = json.loads(path.with_suffix(".json").read_text())
    return found


def known(run: Path) -> tuple[Loaded, Evaluator]:
    loaded = load(str(run), {})
    loaded.model.eval()
    return loaded, prepare_loaded(loaded)


@torch.no_grad()
def features(loaded: Loaded, part: str) -> Tensor:
    """Pixels normalized by hand, through the backbone."""
    mean, std = (torch.tensor(loaded.data.fitted[k]).view(1, -1, 1, 1) for k in ("mean", "std"))
    x: Tensor = loaded.model.backbone((torch.from_numpy(getattr(loaded.data, part).x) / 255 - mean) / std)
    return x


@torch.no_grad()
def brute_force(predictor: Vote, loaded: Loaded, embed: Any, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows, labels, squared distances in float64, weights and vote of the k nearest training rows of each test row."""
    train, test = embed(features(loaded, "train")), embed(features(loaded, "test"))
    distance = (test.double()[:, None] - train.double()[None]).square().sum(2)  # (test, train)
    near, index = distance.sort(1)
    near, index = near[:, :k], index[:, :k]
    label = torch.from_numpy(loaded.data.train.y)[index]
    mask = torch.ones_like(label, dtype=torch.bool)
    weight = predictor.weigh(test, train[index], near.float(), label, mask)
    vote = torch.stack([(weight * (label == c)).sum(1) for c in range(loaded.data.num_classes)], 1)
    return index, label, near, weight, vote


@torch.no_grad()
def class_cosines(loaded: Loaded) -> Tensor:
    """Of each test row with the mean training embedding of each class."""
    train, test = (loaded.model.head.embed(features(loaded, part)) for part in ("train", "test"))
    y = torch.from_numpy(loaded.data.train.y)
    means = torch.stack([train[y == c].mean(0) for c in range(loaded.data.num_classes)])
    return torch.nn.functional.cosine_similarity(test[:, None], means[None], dim=2)


def tempered(predictor: Vote, vote: Tensor) -> Tensor:
    power = vote.clamp_min(1e-20) ** (1 / predictor.log_vote_temperature.exp())
    return power / power.sum(1, keepdim=True)


def check_neighbors(case: dict[str, Any], i: int, loaded: Loaded, found: tuple[Tensor, ...]) -> None:
    index, label, distance, weight, vote = (part[i] for part in found)
    names, near = loaded.data.classes, case["neighbors"]
    at = {row: place for place, row in enumerate(index.tolist())}
    assert case["row"] == i
    assert {n["row"] for n in near} == set(at)
    order = [at[n["row"]] for n in near]
    assert [n["weight"] for n in near] == sorted((n["weight"] for n in near), reverse=True)
    assert [n["weight"] for n in near] == pytest.approx(weight[order].tolist(), abs=1e-5)
    assert [n["squared_distance"] for n in near] == pytest.approx(distance[order].tolist(), rel=1e-3, abs=1e-6)
    assert [n["label"] for n in near] == [names[c] for c in label[order]]
    assert [n["true"] for n in near] == [int(c) == loaded.data.test.y[i] for c in label[order]]
    assert case["true"] == names[loaded.data.test.y[i]]
    own = next(name for name in case["votes"] if name not in ("uniform", "linear", "prediction"))
    assert case["votes"][own] == pytest.approx(vote.tolist(), abs=1e-5)
    fraction = [float((label == c).double().mean()) for c in range(len(names))]
    assert case["votes"]["uniform"] == pytest.approx(fraction, abs=1e-6)


def check_mistakes(record: dict[str, Any], loaded: Loaded, probs: Tensor, count: int) -> None:
    """The wrong rows, the most confident first; their number, and the accuracy."""
    wrong = [i for i in range(len(probs)) if int(probs[i].argmax()) != loaded.data.test.y[i]]
    wrong.sort(key=lambda i: -float(probs[i].max()))
    assert [case["row"] for case in record["mistakes"]] == wrong[:count]
    assert record["test"]["wrong"]["rows"] == len(wrong)
    assert record["test"]["accuracy"] == pytest.approx(1 - len(wrong) / len(probs))
    for case in [record["query"], *record["mistakes"]]:
        assert case["votes"]["prediction"] == pytest.approx(probs[case["row"]].tolist(), abs=1e-5)
        assert case["probability"] == pytest.approx(float(probs[case["row"]].max()), abs=1e-5)
        assert case["predicted"] == record["classes"][int(probs[case["row"]].argmax())]


# ---------------------------------------------------------------- brute force


def test_attention(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Calibrated: weights of the calibrated attention; then its prior and its temperature."""
    loaded, evaluator = known(runs / "attn")
    capsys.readouterr()
    record = explained(runs / "attn", "--image", "13", "--mistakes", "3", "--K", "4", name="13")
    text = capsys.readouterr().out
    predictor: Any = evaluator.predictors.calibrated["attention"].eval()
    found = brute_force(predictor, loaded, loaded.model.head.embed, 7)
    check_neighbors(record["query"], 13, loaded, found)
    for case in record["mistakes"]:
        check_neighbors(case, case["row"], loaded, found)
    with torch.no_grad():
        prior = predictor.prior(tempered(predictor, found[4]), Context(found[2].float(), None, class_cosines(loaded)))
        probs = (prior.log() / predictor.log_temperature.exp()).softmax(1)
    check_mistakes(record, loaded, probs, 3)
    assert (record["k"], record["shown"], record["calibrated"], record["bank"]) == (7, 4, True, len(loaded.data.train))
    assert "calibrated on the validation rows" in text
    assert "3 more" in text
    true = torch.from_numpy(loaded.data.test.y)[:, None]
    assert record["test"]["all"]["neighbors_true"] == pytest.approx(float((found[1] == true).double().mean()))
    assert record["test"]["all"]["weight_true"] == pytest.approx(float((found[3] * (found[1] == true)).sum(1).mean()), abs=1e-6)
    assert record["test"]["all"]["nearest_true"] == pytest.approx(float((found[1] == true)[:, 0].double().mean()))
    assert 1 <= record["test"]["all"]["effective_neighbors"] <= 7


def test_an_interpolation(runs: Path) -> None:
    """The linear head's bars, and lambda between the two."""
    loaded, evaluator = known(runs / "interpolated")
    record = explained(runs / "interpolated", "--image", "5", "--mistakes", "2", name="5")
    interpolation: Any = evaluator.predictors.calibrated["interpolation"].eval()
    assert isinstance(interpolation, Interpolation)
    found = brute_force(interpolation.vote, loaded, loaded.model.head.embed, 7)
    check_neighbors(record["query"], 5, loaded, found)
    assert list(record["query"]["votes"]) == ["distance", "uniform", "linear", "prediction"]
    with torch.no_grad():
        rows = features(loaded, "test")
        logits = loaded.model.head.linear(rows) / interpolation.linear.log_temperature.exp()  # type: ignore[operator]
        linear = (logits + interpolation.linear.class_bias).softmax(1)
        assert interpolation.vote.prior is not None
        prior = interpolation.vote.prior(tempered(interpolation.vote, found[4]), Context(found[2].float(), None, class_cosines(loaded)))
        knn = (prior.log() / interpolation.vote.log_temperature.exp()).softmax(1)
        share = interpolation.share_logit.sigmoid()
        both = share * knn + (1 - share) * linear
        probs = (both.log() / interpolation.log_temperature.exp()).softmax(1)
    assert record["query"]["votes"]["linear"] == pytest.approx(linear[5].tolist(), abs=1e-5)
    check_mistakes(record, loaded, probs, 2)
    assert f"{float(share):.0%} of the neighbors' vote" in record["notes"][1]


def test_a_plain_head_and_the_votes_over_its_features(runs: Path) -> None:
    """The model's own output at its calibrated temperature and class biases, and neighbors among normalized features."""
    loaded, evaluator = known(runs / "linear")
    record = explained(runs / "linear", "--image", "2", name="2")
    predictor: Any = evaluator.predictors.calibrated["attention"].eval()
    linear: Any = evaluator.predictors.of("linear", calibrated=True)
    temperature = linear.log_temperature.exp()
    assert temperature != 1
    found = brute_force(predictor, loaded, lambda rows: torch.nn.functional.normalize(rows, dim=1), 16)
    check_neighbors(record["query"], 2, loaded, found)
    with torch.no_grad():
        probs = (loaded.model.head(features(loaded, "test")) / temperature + linear.class_bias).softmax(1)
    check_mistakes(record, loaded, probs, 4)
    assert record["calibrated"] is True
    assert "have no part in it" in record["notes"][1]


@pytest.mark.parametrize(("run", "own"), [("attn", "attention"), ("interpolated", "interpolation"), ("linear", "linear")])
def test_the_prediction_is_the_calibrated_one_that_the_run_kept(run: str, own: str, runs: Path) -> None:
    record = explained(runs / run, "--image", "5", "--mistakes", "2", name="5")
    kept = load_file(runs / run / "predictions.safetensors")
    calibrated, raw = kept[f"{own}.calibrated"].exp(), kept[f"{own}.raw"].exp()
    for case in (record["query"], *record["mistakes"]):
        assert case["votes"]["prediction"] == pytest.approx(calibrated[case["row"]].tolist(), abs=1e-5)
        assert case["probability"] == pytest.approx(float(calibrated[case["row"]].max()), abs=1e-5)
    assert float((calibrated - raw).abs().max()) > 1e-4  # so that the check above can tell them apart


def test_a_picture_is_as_narrow_as_a_column_and_has_names_as_they_are(runs: Path) -> None:
    """Names that matplotlib would read as mathematics, and long ones; in whatever number of lines, letters keep their size."""
    loaded, _ = known(runs / "attn")
    votes = Votes(loaded)
    names = ("$a_{", "a class of a very long name", "c", "d$", "<e>")
    (case,) = votes.cases(votes.retrieve_test().subset(torch.tensor([3])), ["three"], [3], [1], 7)
    case = dataclasses.replace(case, true=names[1], predicted=names[0])
    header = {"title": "$t_{", "notes": ["a note " * 40], "weights": votes.name, "k": 7, "test": {"wrong": {"rows": 1}}}
    images = [np.zeros((6, 6, 3))] * 8
    draw_neighbors(Path("one.png"), header, [case], [images], names)
    draw_neighbors(Path("two.png"), header, [case, case], [images, images], names)
    with Image.open("one.png") as one, Image.open("two.png") as two:
        assert one.width == two.width < 8 * 170
        assert two.height > 1.4 * one.height


# ---------------------------------------------------------------- by hand


def test_summary_by_hand() -> None:
    """Four rows with 4 neighbors; two are right."""
    tally = {
        "neighbors": torch.tensor([4.0, 4, 4, 2]),
        "true": torch.tensor([4.0, 3, 0, 1]),
        "predicted": torch.tensor([4.0, 3, 4, 1]),
        "weight": torch.tensor([1.0, 0.8, 0, 0.4]),
        "nearest": torch.tensor([1.0, 0, 0, 1]),
        "effective": torch.tensor([4.0, 3, 2, 1]),
    }
    found = summary(tally, torch.tensor([True, True, False, False]), torch.tensor([0.9, 0.7, 0.6, 0.5]))
    assert found["accuracy"] == 0.5
    assert found["all"] == {"rows": 4, "neighbors_true": 0.5625, "weight_true": 0.55, "nearest_true": 0.5, "effective_neighbors": 2.5}
    assert found["wrong"] == {"rows": 2, "neighbors_true": 0.25, "weight_true": 0.2, "nearest_true": 0.5, "effective_neighbors": 1.5}
    steps = {tuple(step["neighbors"]): step for step in found["by_agreement"]}
    assert list(steps) == [(n, n) for n in range(5)]
    assert steps[4, 4]["true"] == {"rows": 1, "accuracy": 1.0}
    assert steps[4, 4]["predicted"] == {"rows": 2, "accuracy": 0.5, "confidence": 0.75}
    assert steps[2, 2]["predicted"] == {"rows": 0, "accuracy": None, "confidence": None}


@pytest.mark.parametrize("k", [1, 6, 7, 8, 9, 16, 101])
def test_ranges_cover_every_number_once(k: int) -> None:
    covered = [n for low, high in ranges(k) for n in range(low, high + 1)]
    assert covered == list(range(k + 1))
    assert ranges(k)[-1] == (k, k)


def test_classes_worth_a_bar() -> None:
    """The true one last of all, the predicted one, and the one that another vote wants; 12 bars in all."""
    votes = torch.zeros(3, 9)
    votes[0, 7], votes[2, 4], votes[2, 1], votes[2, 2] = 1, 0.5, 0.3, 0.2
    assert worth_a_bar(votes, 8) == [4, 1, 7, 8]
    assert worth_a_bar(votes, None) == [4, 1, 2, 7]
    assert worth_a_bar(votes[:, :3], 0) == [1, 2, 0]


def test_the_classes_of_neighbors_have_a_bar() -> None:
    """All of the heaviest neighbors' classes, up to 8; then what is likely."""
    votes = torch.zeros(3, 12)
    votes[2, 4], votes[2, 1], votes[2, 2] = 0.5, 0.3, 0.2
    assert worth_a_bar(votes, None, [9, 9, 8]) == [4, 1, 8, 9]
    assert worth_a_bar(votes, 3, [9, 8, 7, 6]) == [4, 3, 6, 7, 8, 9]
    assert worth_a_bar(votes, 3, [11, 10, 9, 8, 7, 6, 5, 0]) == [4, 3, 6, 7, 8, 9, 10, 11]


def test_missing_neighbors_are_left_out(runs: Path) -> None:
    """A bank may know fewer rows than were asked for: such places weigh nothing and are not listed."""
    loaded, _ = known(runs / "attn")
    votes = Votes(loaded)
    retrieved = votes.retrieve_test()
    retrieved.index[:, 4:] = -1
    (case,) = votes.cases(retrieved.subset(torch.tensor([3])), ["three"], [3], [1], 8)
    assert len(case.neighbors) == 4
    assert sum(n.weight for n in case.neighbors) == pytest.approx(1)
    assert votes.tally(retrieved, votes.target, votes.target)["neighbors"].tolist() == [4] * len(retrieved)


# ---------------------------------------------------------------- the command


def test_an_image_of_ones_own(runs: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody knows its class; a training image is its own nearest neighbor."""
    loaded, _ = known(runs / "attn")
    Image.fromarray(loaded.data.train.x[11].transpose(1, 2, 0)).save(here / "my own.png")
    record = explained(runs / "attn", "--image", "my own.png", "--mistakes", "0", name="my_own")
    query = record["query"]
    assert (query["image"], query["row"], query["true"], record["mistakes"]) == ("my own.png", None, None, [])
    nearest = min(query["neighbors"], key=lambda n: n["squared_distance"])
    assert nearest["row"] == 11
    assert nearest["squared_distance"] < 1e-6
    assert {n["true"] for n in query["neighbors"]} == {None}
    assert "my own.png: predicted" in capsys.readouterr().out


def test_pictures_are_of_the_training_rows(runs: Path) -> None:
    loaded, _ = known(runs / "attn")
    votes = Votes(loaded)
    (case,) = votes.cases(votes.retrieve_test().subset(torch.tensor([3])), ["three"], [3], [1], 8)
    query, *near = images_of(loaded, case, pick_image(loaded, "0"), 5)
    assert len(near) == 5
    for pixels, x in zip([query, *near], [loaded.data.test.x[3], *(loaded.data.train.x[n.row] for n in case.neighbors)], strict=False):
        assert np.abs(pixels - x.transpose(1, 2, 0) / 255).max() < 1e-6


def test_a_table_is_text_only(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["explain", "--what", "neighbors", "--checkpoint", str(runs / "table"), "--output_dir", "out"]) == 0
    said = capsys.readouterr().out
    assert "no picture: the rows of a table are no images" in said
    assert "uniform weighs the 3 nearest" in said
    assert sorted(path.name for path in Path("out").iterdir()) == ["explain-neighbors-0.json", "explain-neighbors-0.txt"]
    record = json.loads(Path("out/explain-neighbors-0.json").read_text())
    assert list(record["query"]["votes"]) == ["uniform", "prediction"]
    assert [n["weight"] for n in record["query"]["neighbors"]] == pytest.approx([1 / 3] * 3)


def test_refusals(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run, words, line in (
        ("attn", "--queries 0,0", "--queries goes with --what tokens, got '0,0'"),
        ("attn", "--head 1", "--head goes with --what tokens, got '1'"),
        ("attn", "--what tokens --mistakes 2", "--mistakes goes with --what neighbors, got '2'"),
        ("attn", "--K 0", "--K must be a whole number from 1 to 100, got '0'"),
        ("attn", "--mistakes some", "--mistakes must be a whole number from 0 to 50, got 'some'"),
        ("attn", "--image 29", "--image must be a row of the test split (0 to 28) or an image file, got '29'"),
        (
            "without",
            "",
            "--checkpoint must hold a bank: of a head that looks at neighbors, or of a finished run with baselines (--baselines)",
        ),
        ("table", "--image own.png", "--image must be a row of the test split (0 to 29): this run reads the rows of a table"),
    ):
        capsys.readouterr()
        assert main(["explain", "--what", "neighbors", "--checkpoint", str(runs / run), "--output_dir", "out", *words.split()]) == 2
        captured = capsys.readouterr()
        said = [text for text in captured.err.splitlines() if not text.startswith("device:")]
        assert len(said) == 1, captured.err
        assert said[0].startswith(f"error: {line}")
        assert captured.out == ""
        assert not Path("out").exists()


def test_rows_that_have_changed_are_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bank names training rows by number: with another data set behind the name, the pictures would be of others."""
    rng = np.random.default_rng(0)

    def write() -> None:
        images: dict[str, Any] = {f"x_{part}": rng.integers(0, 256, (rows, 6, 6), np.uint8) for part, rows in (("train", 40), ("test", 5))}
        np.savez("set.npz", y_train=np.arange(40) % 2, y_test=np.arange(5) % 2, **images)

    write()
    words = ["--dataset", "npz:set.npz", "--patch_size", "3", *SMALL, "--head", "knn", "--k_train", "3"]
    assert main([*words, "--output_dir", "run"]) == 0
    write()
    capsys.readouterr()
    assert main(["explain", "--what", "neighbors", "--checkpoint", "run"]) == 2
    assert "--checkpoint needs the rows that the run was trained on, and the data set has changed since" in capsys.readouterr().err
