"""What is exported computes what the run computes, for any number of rows, and votes without the toolkit."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import dataset
from config import Action
from inputs.rows import Batch
from main import main
from run import load
from run.export import FILES
from run.model import Model
from run.run import run
from tests.run.test_model import SMALL, saved
from utils import Halt

WITH_ONNX = all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
ONNX = pytest.param("onnx", marks=pytest.mark.skipif(not WITH_ONNX, reason="onnx, onnxscript and onnxruntime are not installed"))


@pytest.fixture(scope="module", params=["softmax-cosine(temperature=0.2)", "distance", "uniform"])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a layer of custom operators, a size of its own, and a linear part beside the vote."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    given = {"head": "linear+knn", "vote": request.param, "layer": "ConvNNAttention(K=3)", "resize": 12, "output_dir": str(folder)}
    run({**SMALL, **given}, Action())
    return folder


def pixels() -> np.ndarray:
    return dataset.load(SMALL["dataset"]).test.x  # (31, 3, 8, 8)


def outputs_of(folder: Path, kind: str, x: np.ndarray) -> list[np.ndarray]:
    if kind == "onnx":
        import onnxruntime

        found: list[np.ndarray] = onnxruntime.InferenceSession(folder / "model.onnx").run(None, {"x": x.astype(np.float32)})
        return found
    with torch.no_grad():
        return [part.numpy() for part in torch.jit.load(str(folder / "model.pt"))(torch.from_numpy(x).float())]


def expected(model: Model, x: np.ndarray) -> list[torch.Tensor]:
    """Features, embedding, and the log-probabilities of the linear part, as the model has them."""
    seen, nobody = model.rows.prepared(torch.from_numpy(x), np.arange(len(x))), torch.zeros(len(x), dtype=torch.long)
    with torch.no_grad():
        features = model.classifier.features(Batch(seen, nobody, nobody))
        part = model.classifier.predictor().linear_part
        assert part is not None
        return [features, model.classifier.head.embed(features), part.predict(model.classifier.head.retrieve(features))]


@pytest.mark.parametrize("kind", ["torchscript", ONNX])
def test_a_graph_computes_what_the_run_computes(kind: str, finished: Path, tmp_path: Path) -> None:
    assert main(["export", "--checkpoint", str(finished), "--format", kind, "--output_dir", str(tmp_path / "out")]) == 0
    assert {file.name for file in (tmp_path / "out").iterdir()} == {FILES[kind], "bank.safetensors", "model.json", "vote.py"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    about, model = json.loads((tmp_path / "out" / "model.json").read_text()), load(finished)
    assert about["outputs"] == ["features", "embedding", "log_probs"]
    assert about["largest_difference"] < 1e-4
    for rows in (pixels(), pixels()[:1]):
        for found, wanted in zip(outputs_of(tmp_path / "out", kind, rows), expected(model, rows), strict=True):
            np.testing.assert_allclose(found, wanted.numpy(), atol=1e-4)
    bank = load_file(tmp_path / "out" / "bank.safetensors")
    assert (bank["label"] == dataset.load(SMALL["dataset"]).train.y[bank["row"]]).all()


def test_the_example_votes_as_the_model_does(finished: Path, tmp_path: Path) -> None:
    """In a process of its own, in 20 lines, with NumPy alone and with FAISS."""
    assert main(["export", "--checkpoint", str(finished), "--format", "torchscript", "--output_dir", str(tmp_path)]) == 0
    assert len((tmp_path / "vote.py").read_text().splitlines()) <= 20
    np.save(tmp_path / "x.npy", pixels())
    vote = "runpy.run_path('vote.py'); "
    code = f"import runpy, sys; sys.argv = ['vote.py', 'x.npy']; sys.modules['faiss'] = None; {vote}del sys.modules['faiss']; {vote}"
    code += "print('faiss' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    model = load(finished)
    features = expected(model, pixels())[0]
    assert model.vote is not None
    retrieved = model.classifier.head.retrieve(features)
    *answers, loaded = done.stdout.splitlines()
    assert (len(answers), loaded) == (2, "True")
    for answer in answers:
        np.testing.assert_allclose(json.loads(answer), model.vote.all_scores(retrieved).numpy(), atol=2e-4)


def test_weights_alone(finished: Path, tmp_path: Path) -> None:
    assert main(["export", "--checkpoint", str(finished), "--format", "safetensors", "--output_dir", str(tmp_path)]) == 0
    weights, model = load_file(tmp_path / "model.safetensors"), load(finished)
    wanted = {name: value.numpy() for name, value in model.classifier.state_dict().items() if name.startswith("backbone.")}
    assert wanted
    for name, value in wanted.items():
        assert np.array_equal(weights[name], value)
    np.save(tmp_path / "x.npy", expected(model, pixels())[1].numpy())
    done = subprocess.run([sys.executable, "vote.py", "x.npy"], cwd=tmp_path, capture_output=True, text=True, check=True)
    retrieved = model.classifier.head.retrieve(expected(model, pixels())[0])
    assert model.vote is not None
    np.testing.assert_allclose(json.loads(done.stdout), model.vote.all_scores(retrieved).numpy(), atol=2e-4)


def test_a_linear_head_answers_from_its_graph(tmp_path: Path) -> None:
    run({**SMALL, "head": "linear", "baselines": False, "output_dir": str(tmp_path / "run")}, Action())
    assert main(["export", "--checkpoint", str(tmp_path / "run"), "--format", "torchscript"]) == 0
    folder = tmp_path / "run" / "export-torchscript"
    assert {file.name for file in folder.iterdir()} == {"model.pt", "model.json"}  # no bank, so nothing that votes
    assert np.exp(outputs_of(folder, "torchscript", pixels())[2]) == pytest.approx(saved(tmp_path / "run"), abs=1e-5)


def test_a_table(tmp_path: Path) -> None:
    run({"dataset": "iris", "num_epochs": 1, "head": "attn-knn", "k_train": 3, "output_dir": str(tmp_path / "run")}, Action())
    assert main(["export", "--checkpoint", str(tmp_path / "run"), "--format", "torchscript"]) == 0
    about = json.loads((tmp_path / "run" / "export-torchscript" / "model.json").read_text())
    assert about["input"]["shape"] == [None, 4]
    assert len(about["reading"]["mean"]) == 4


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "--checkpoint must name the run to export"),
        (["--checkpoint", "RUN", "--format", "onx"], "--format must be one of onnx, torchscript, safetensors (did you mean 'onnx'?)"),
        (["--checkpoint", "none"], "--checkpoint must be a run or a checkpoint that exists, got 'none'"),
    ],
)
def test_what_can_not_be(words: list[str], line: str, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", *(str(finished) if word == "RUN" else word for word in words)]) == 2
    assert f"error: {line}" in capsys.readouterr().err


def test_a_difference_is_an_error_and_writes_nothing(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph whose answer is off by more than rounding."""
    from run import export

    def wrong(graph: export.Graph, path: Path) -> Any:
        answers = export.to_safetensors(graph, path)
        return lambda x: [part + 1e-3 for part in answers(x)]

    monkeypatch.setitem(export.WRITERS, "safetensors", wrong)
    with pytest.raises(Halt, match=r"differ from the run's by 0\.001"):
        export.export(str(finished), "safetensors", str(tmp_path / "out"), None)
    assert list(tmp_path.iterdir()) == []
