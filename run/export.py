"""`python main.py export`: backbone and embedder as one graph that runs without the toolkit, the bank beside it, and a vote in 20 lines.

What is normalized and resized here is so inside the graph: pixels go in as they come out of a file. Every output is compared with the
model's before a file is in its place.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from classifiers.embedder import unit
from classifiers.neighbor_heads import NeighborHead
from classifiers.predictors import HeadPredictor
from inputs import store
from inputs.augmentation import bilinear_matrix
from layers.plain import plain_kernels
from run.directory import check_writable
from run.model import Model, load
from run.saved import own_checkpoint, run_of
from utils import BadOption, Halt, one_of, say, shortened

FILES = {"onnx": "model.onnx", "torchscript": "model.pt", "safetensors": "model.safetensors"}
MOST_APART = 1e-4  # of an output, relative to its largest number where that is above 1
FORMAT = "neighbor attention export, version 1"


class Graph(nn.Module):
    """Pixels 0..255 as float32 (N, C, H, W), or the encoded rows of a table (N, F), to features, the embedding that is searched for, and
    the log-probabilities of what looks at features alone."""

    scale: Tensor
    shift: Tensor
    down: Tensor | None  # resizes, where the model sees another size
    across: Tensor

    def __init__(self, model: Model) -> None:
        super().__init__()
        classifier, rows = copy.deepcopy(model.classifier), model.rows
        self.backbone = classifier.backbone
        self.embedder = classifier.head.embedder if isinstance(classifier.head, NeighborHead) else None
        linear = classifier.predictor().linear_part
        self.linear: HeadPredictor | None = copy.deepcopy(linear)
        self.images, self.size = model.kind != "table", (model.reader.side,) * 2 if model.kind == "files" else tuple(model.shape[1:])
        if self.images:
            self.register_buffer("scale", rows.scale.clone(), persistent=False)
            self.register_buffer("shift", rows.shift.clone(), persistent=False)
            new = rows.size or self.size
            for name, side, to in zip(("down", "across"), self.size, new, strict=True):
                self.register_buffer(name, bilinear_matrix(side, to).clone() if tuple(new) != self.size else None, persistent=False)
        self.width = model.shape[0]

    @property
    def outputs(self) -> list[str]:
        return ["features", "embedding", *(["log_probs"] if self.linear is not None else [])]

    def example(self, count: int) -> Tensor:
        """Rows to try it with, as random as they may be."""
        random = torch.Generator().manual_seed(count)
        if not self.images:
            return torch.randn(count, self.width, generator=random)
        return torch.randint(0, 256, (count, self.width, *self.size), generator=random).float()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.images:
            x = x * self.scale + self.shift
            if self.down is not None:
                x = self.down @ (x @ self.across.T)
        features = self.backbone(x).float()
        embedding = unit(features) if self.embedder is None else self.embedder(features)
        if self.linear is None:
            return features, embedding
        scores = self.linear.head(features)
        return features, embedding, (scores * (-self.linear.log_temperature).exp() + self.linear.class_bias).log_softmax(1)


# ---------------------------------------------------------------- formats


def to_onnx(graph: Graph, path: Path) -> Callable[[Tensor], list[np.ndarray]] | None:
    if missing := [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]:
        raise BadOption("format", f"needs optional packages: pip install {' '.join(missing)} (and onnxruntime, which checks)", "onnx")
    batch = torch.export.Dim("batch")
    torch.onnx.export(
        graph,
        (graph.example(2),),
        str(path),
        dynamo=True,
        dynamic_shapes={"x": {0: batch}},
        input_names=["x"],
        output_names=graph.outputs,
        external_data=False,
        verbose=False,
    )
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda x: session.run(graph.outputs, {"x": x.numpy()})


def to_torchscript(graph: Graph, path: Path) -> Callable[[Tensor], list[np.ndarray]]:
    torch.jit.trace(graph, graph.example(2), check_trace=False).save(str(path))
    saved = torch.jit.load(str(path))
    return lambda x: [output.numpy() for output in saved(x)]


def to_safetensors(graph: Graph, path: Path) -> Callable[[Tensor], list[np.ndarray]]:
    """The weights alone, by the names that the toolkit has for them."""
    save_file({name: tensor.contiguous().clone() for name, tensor in graph.state_dict().items()}, path)
    fresh = copy.deepcopy(graph)
    for parameter in fresh.parameters():
        parameter.data.zero_()
    fresh.load_state_dict(load_file(path))
    return lambda x: [output.numpy() for output in fresh(x)]


WRITERS: dict[str, Callable[[Graph, Path], Callable[[Tensor], list[np.ndarray]] | None]] = {
    "onnx": to_onnx,
    "torchscript": to_torchscript,
    "safetensors": to_safetensors,
}


def largest_difference(graph: Graph, other: Callable[[Tensor], list[np.ndarray]]) -> float:
    """Between outputs for one row and for five: a graph may have kept the number of rows that it was made with."""
    apart = 0.0
    for count in (1, 5):
        x = graph.example(count)
        for wanted, found in zip(graph(x), other(x), strict=True):
            size = max(1.0, wanted.abs().max().item())
            apart = max(apart, float(np.abs(wanted.numpy() - found).max()) / size if found.shape == wanted.shape else np.inf)
    return apart


# ---------------------------------------------------------------- the bank, and what to know of it


def about(model: Model, graph: Graph, name: str) -> dict[str, Any]:
    """What is in the files, for who reads them without the toolkit."""
    reading: dict[str, Any] = {"kind": model.kind, "classes": list(model.classes)}
    if model.kind == "table":
        encoder, columns = model.reader.encoder, model.reader.columns
        assert encoder is not None
        reading |= {"numbers": list(columns[: model.reader.count]), "categories": list(columns[model.reader.count :]), **encoder.to_json()}
    elif model.kind == "files":
        reading |= {"crop": "the central square, 0.875 of the shorter side", "resize": f"bilinear, antialiased, to {graph.size[0]} pixels"}
    what = "pixels, 0 to 255: they are normalized inside" if graph.images else "encoded columns: (number - mean) / std, then one-hot levels"
    shape = [None, graph.width, *graph.size] if graph.images else [None, graph.width]
    found = {
        "format": FORMAT,
        "model": name,
        "input": {"name": "x", "dtype": "float32", "shape": shape, "what": what},
        "outputs": graph.outputs,
        "reading": reading,
        "classes": list(model.classes),
        "calibrated": model.classifier.calibrated is not None,
    }
    if model.retriever is not None and model.vote is not None:
        weigh: Any = model.vote.weigh
        options = weigh.keywords if isinstance(weigh, functools.partial) else {}
        share = model.classifier.predictor().vote_share
        share = share if share is not None else 1.0 if model.classifier.head.wants_bank else 0.0
        found["vote"] = {"bank": "bank.safetensors", "k": model.retriever.k, "weights": model.vote.name, **options, "share": share}
    return found


WEIGHTS = {
    "uniform": "np.ones_like(cosine)",
    "distance": "1 / np.sqrt(np.maximum(2 - 2 * cosine, 1e-12))",
    "softmax-cosine": "np.exp((cosine - 1) / about['vote'].get('temperature', 0.07))",
}
VOTE = '''"""python vote.py x.npy: class probabilities, by a vote of the nearest training rows; the toolkit is not needed."""
import json, pathlib, sys
import numpy as np
{library}
from safetensors.numpy import load_file

here = pathlib.Path(__file__).parent
about, bank = json.loads((here / "model.json").read_text()), load_file(here / "bank.safetensors")
x, k = np.load(sys.argv[1]).astype(np.float32), about["vote"]["k"]  # {what}
embedding = {embed}
try:
    import faiss
    cosine, near = faiss.knn(embedding, bank["embedding"], k, faiss.METRIC_INNER_PRODUCT)
except ImportError:
    every = embedding @ bank["embedding"].T
    near = np.argsort(-every, axis=1, kind="stable")[:, :k]
    cosine = np.take_along_axis(every, near, axis=1)
weights, votes = {weights}, np.zeros((len(x), len(about["classes"])))
np.add.at(votes, (np.arange(len(x))[:, None], bank["label"][near]), weights)
print(json.dumps((votes / votes.sum(axis=1, keepdims=True)).tolist()))
'''
EMBED = {
    "onnx": ("import onnxruntime", 'onnxruntime.InferenceSession(here / "model.onnx").run(["embedding"], {"x": x})[0]'),
    "torchscript": ("import torch", 'torch.jit.load(here / "model.pt")(torch.from_numpy(x))[1].detach().numpy()'),
    "safetensors": ("# x.npy holds embeddings: model.safetensors has the weights, and no graph", "x"),
}


def vote_script(kind: str, found: dict[str, Any]) -> str:
    library, embed = EMBED[kind]
    weights = WEIGHTS.get(found["vote"]["weights"], WEIGHTS["softmax-cosine"])
    what = "embeddings" if kind == "safetensors" else found["input"]["what"].partition(":")[0]
    return VOTE.format(library=library, embed=embed, weights=weights, what=what)


# ---------------------------------------------------------------- the command


@torch.no_grad()
def export(path: str | None, kind: str, output_dir: str | None, plugin: str | None) -> Path:
    """Writes the files of one format into a folder, all of them or none."""
    if not path:
        raise BadOption("checkpoint", "must name the run to export")
    one_of("format", kind, FILES)
    folder = Path(output_dir) if output_dir else run_of(own_checkpoint(path)) / f"export-{kind}"
    check_writable(folder)
    model = load(path, device="cpu", plugin=plugin)
    graph = Graph(model).eval()
    found = about(model, graph, FILES[kind])
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".export") as made:
        place = Path(made)
        answers = _written(graph, kind, place / FILES[kind])
        if answers is None:
            say("export: not checked (onnxruntime is not installed)")
        else:
            found["largest_difference"] = apart = largest_difference(graph, answers)
            if not apart <= MOST_APART:
                raise Halt(f"error: the {kind} model's outputs differ from the run's by {apart:.2g} (at most {MOST_APART:g} is fine)", 1)
            say(f"export: outputs for 1 and for 5 rows differ from the run's by {apart:.1e} at most")
        if "vote" in found:
            assert model.retriever is not None
            bank = model.retriever.bank
            assert bank is not None
            tensors = {"embedding": bank.embeddings, "label": bank.labels, "row": bank.ids}
            save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, place / "bank.safetensors")
            (place / "vote.py").write_text(vote_script(kind, found))
        store.write_json(place / "model.json", found)
        folder.mkdir(exist_ok=True)
        names = sorted(file.name for file in place.iterdir())
        for name in names:
            os.chmod(place / name, 0o644)
            os.replace(place / name, folder / name)
    say(f"export: {', '.join(names)} written to {folder}")
    return folder


def _written(graph: Graph, kind: str, path: Path) -> Callable[[Tensor], list[np.ndarray]] | None:
    with plain_kernels(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tracers, about what is constant in a graph
        try:
            return WRITERS[kind](graph, path)
        except (BadOption, OSError):
            raise
        except Exception as error:  # exporters raise what they like
            text = next((line for line in str(error).splitlines() if line.strip()), "")
            raise BadOption("format", f"can't hold this model ({type(error).__name__}: {shortened(text, 120)})", kind) from None
