"""A trained model to ask, without its data set: `from run import load`."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import config as flags
from classifiers.bank import Bank
from classifiers.classifier import Classifier
from classifiers.neighbor_heads import NeighborHead
from classifiers.predictors import Vote
from classifiers.retrieved import Retrieved
from config import Config
from evaluation.baselines import averaged, beside_features
from inputs.rows import Batch, Data, Split
from run.loaded import calibrated_predictor
from run.parts import build_model, choose_device, loader
from run.plugin import load_plugin_of
from run.prepare import attention_over
from run.reading import Reader, Row, Unreadable, in_chunks, reading_in, rows_of
from run.saved import own_checkpoint, require_facts, saved_config
from training import checkpoint
from utils import BadOption, say, shortened, understood, whole_number

AT_ONCE = 256  # rows of a batch, at most: image files of it are in memory twice


@dataclass(frozen=True)
class Neighborhood:
    """The training rows that weigh most in the vote on each query, the heaviest first: (N, k) each."""

    rows: np.ndarray  # numbers in the training split; -1 where there are fewer neighbors, or the query could not be read
    weights: np.ndarray  # of all that vote; those of a query sum to 1 over all neighbors
    labels: np.ndarray  # class numbers, as the bank has them
    distances: np.ndarray  # Euclidean, between embeddings of length 1: from 0 to 2
    names: tuple[str, ...]  # of the classes
    files: Sequence[str] | None = None  # of the training split, where these are image files
    errors: tuple[str | None, ...] = ()

    @property
    def classes(self) -> list[list[str | None]]:
        """Class names of the neighbors."""
        both = zip(self.labels.tolist(), self.rows.tolist(), strict=True)
        return [[self.names[label] if row >= 0 else None for label, row in zip(*of_query, strict=True)] for of_query in both]


@dataclass(frozen=True)
class Predictions:
    """What a model predicts of some rows. A row that could not be read has an error and NaN as probabilities."""

    probabilities: np.ndarray  # (N, C) float32, calibrated if the run was
    names: tuple[str, ...]  # of the C classes
    inputs: tuple[str, ...]  # what the rows are called
    errors: tuple[str | None, ...]
    distances: np.ndarray | None = None  # (N,) to the nearest training row, where the model has a bank
    neighborhood: Neighborhood | None = None

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def classes(self) -> list[str | None]:
        """The likeliest class of each row, by name."""
        best = np.where(np.isnan(self.probabilities), -1, self.probabilities).argmax(1)
        return [None if error else self.names[n] for n, error in zip(best.tolist(), self.errors, strict=True)]

    @property
    def confidence(self) -> np.ndarray:
        """The probability of the likeliest class, (N,)."""
        top: np.ndarray = self.probabilities.max(1, initial=-np.inf)
        return top

    @staticmethod
    def together(parts: Sequence[Predictions]) -> Predictions:
        near = [part.neighborhood for part in parts if part.neighborhood is not None]
        arrays = ("rows", "weights", "labels", "distances")
        joined = None
        if near:
            errors = tuple(itertools.chain.from_iterable(n.errors for n in near))
            values: dict[str, Any] = {name: np.concatenate([getattr(n, name) for n in near]) for name in arrays}
            joined = Neighborhood(**values, names=near[0].names, files=near[0].files, errors=errors)
        distances = [part.distances for part in parts if part.distances is not None]
        return Predictions(
            np.concatenate([part.probabilities for part in parts]),
            parts[0].names,
            tuple(itertools.chain.from_iterable(part.inputs for part in parts)),
            tuple(itertools.chain.from_iterable(part.errors for part in parts)),
            np.concatenate(distances) if distances else None,
            joined,
        )


# ---------------------------------------------------------------- loading


def load(path: str | Path, *, device: str = "auto", plugin: str | None = None) -> Model:
    """The trained model of a run, or of a checkpoint folder, as it was evaluated. `plugin`: the file that the run was made with."""
    source = own_checkpoint(path)
    tensors, facts = checkpoint.load_whole(source, "model", "ema", "bank", "baseline_bank", "predictors")
    require_facts(facts)
    load_plugin_of(facts, plugin)
    with understood("checkpoint", str(path)):
        return _loaded(source, tensors, facts, device, str(path))


def _loaded(source: Path, tensors: dict[str, dict[str, Tensor]], facts: dict[str, Any], device: str, path: str) -> Model:
    config = saved_config(facts, {"device": device}, flags.FREE_IN_TEST, "checkpoint")
    if "training" in facts and "bank" in tensors:  # NOTE: that bank is of earlier weights than these
        raise BadOption("checkpoint", "must be the best of a run: the last one's bank is not of its weights", str(source))
    data, place = data_of(facts), choose_device(device)
    with generators_kept():
        model = build_model(config, data, place, trained=True)
        try:
            model.load_state_dict(tensors.get("ema", tensors["model"]))
        except RuntimeError as error:  # a plugin that was edited since
            rule = f"does not fit the model that its configuration builds ({shortened(error, 120)})"
            raise BadOption("checkpoint", rule, path) from None
        model.calibrated = calibrated_predictor(model, config, tensors.get("predictors"), facts)
        if model.head.wants_bank:
            if "bank" not in tensors:
                raise BadOption(
                    "checkpoint", "lacks the bank that its head votes with (a run with --shard_bank keeps it at its end)", str(source)
                )
            model.head.refresh(Bank.unpack(tensors["bank"], facts["bank"]))
        retriever, vote = beside(model, config, tensors, facts, place)
    if model.calibrated is None and config.evaluation.calibrate != "none":
        say("calibration: none (the run holds no calibrated predictor; probabilities are as trained)")
    return Model(model.eval(), config, data, facts, retriever, vote)


def data_of(facts: Mapping[str, Any]) -> Data:
    """The data set of a checkpoint, without a row."""
    reading = reading_in(facts)
    shape, table = tuple(facts["shape"]), reading["kind"] == "table"
    none = Split(np.empty((0, *shape), np.float32 if table else np.uint8), np.empty(0, np.int64))
    kind = "table" if table else "image"  # image files, too, are pixels by the time that the model sees them
    name, classes, flip = facts["config"]["dataset"], tuple(facts["classes"]), bool(reading["flip"])
    return Data(name, kind, shape, classes, none, None, none, flip, facts["fitted"], facts["data"], tuple(reading["columns"]))


def beside(
    model: Classifier, config: Config, tensors: Mapping[str, Any], facts: Mapping[str, Any], device: torch.device
) -> tuple[NeighborHead | None, Vote | None]:
    """Who finds neighbors, and whose weights they have: the head and its vote, or the attention that was evaluated beside it."""
    own = model.predictor().vote_part
    if isinstance(model.head, NeighborHead):
        return model.head, own
    if "baseline_bank" not in tensors or "predictors" not in tensors:
        return None, None
    bank = Bank.unpack(tensors["baseline_bank"], facts["baseline_bank"])
    retriever = attention_over(bank, config, model, device, trained=True)
    predictors = beside_features(model.head, config.head.head, retriever, facts["calibration"]).to(device)
    predictors.load_state_dict(tensors["predictors"])
    return retriever, predictors.of("attention", calibrated=facts["calibration"] != "none").vote_part


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Building a model seeds every generator; who loads one to ask it has their own use for them."""
    states = random.getstate(), np.random.get_state(), torch.are_deterministic_algorithms_enabled()
    with torch.random.fork_rng():
        yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.use_deterministic_algorithms(states[2])


# ---------------------------------------------------------------- asking


class Model:
    """A trained classifier with what it takes to read inputs: weights, bank, confidence, preprocessing."""

    def __init__(
        self,
        classifier: Classifier,
        config: Config,
        data: Data,
        facts: Mapping[str, Any],
        retriever: NeighborHead | None,
        vote: Vote | None,
    ) -> None:
        self.classifier, self.config, self.facts = classifier, config, facts
        self.retriever, self.vote = retriever, None if vote is None else vote.eval()
        self.classes, self.shape = data.classes, data.shape
        self.device = choose_device_of(classifier)
        rows = loader(config.but(noise=0.0, workers=0), data, "test", self.device)
        assert rows is not None
        self.rows = rows  # not one row, but what happens to rows
        self.reader = Reader(facts, side=(rows.size or data.shape[1:] or (0,))[0], seed=config.data.split_seed)

    @property
    def kind(self) -> str:
        """What it reads: "image" (arrays of one shape), "files" (images of any size) or "table"."""
        kind: str = self.reader.kind
        return kind

    def predict(self, inputs: Any, *, batch_size: int | None = None, k: int = 0) -> Predictions:
        """Class probabilities of all rows of `inputs`: paths, a folder, Pillow's images, uint8 arrays as the data set had them, float rows,
        records or a data frame. With k, the neighbors that weigh most, too."""
        parts = list(self.stream(inputs, batch_size=batch_size, k=k))
        return Predictions.together(parts or [self._answer([], [], 1, k)])

    def neighbors(self, inputs: Any, k: int = 5) -> Neighborhood:
        """The training rows that decided, the k heaviest in the vote (or all that vote, if they are fewer). Of a head without a bank,
        those that its baselines vote with."""
        whole_number("k", k, 1)
        if self.retriever is None:
            raise BadOption("checkpoint", "holds no bank: it has no neighbors to show (a head with neighbors, or --baselines, keeps one)")
        found = self.predict(inputs, k=k).neighborhood
        assert found is not None
        return found

    def stream(self, inputs: Any, *, batch_size: int | None = None, k: int = 0) -> Iterator[Predictions]:
        """`predict`, a batch at a time: `inputs` may be an iterator without an end."""
        size = min(self.config.training.batch_size, AT_ONCE) if batch_size is None else whole_number("batch_size", batch_size, 1)
        views = self.config.evaluation.tta
        if views > 1 and self.reader.flip is None:
            raise BadOption("checkpoint", "lacks whether mirror images keep their class, which --tta needs: it is from an older version")
        crops = self.reader.crops(views)
        chunks, start = in_chunks(rows_of(inputs, self.shape), size), 0
        with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:

            def begin(chunk: list[Row], first: int) -> list[Any]:
                """Image files are read while the model computes on those before them."""
                if any(isinstance(row.content, Path) for row in chunk):
                    return [pool.submit(self._read, row, first + n, crops) for n, row in enumerate(chunk)]
                return [self._read(row, first + n, crops) for n, row in enumerate(chunk)]

            coming: tuple[list[Row], list[Any], int] | None = None
            for chunk in itertools.chain(chunks, [None]):
                following = None if chunk is None else (chunk, begin(chunk, start), start)
                if coming is not None:
                    contents = [c.result() if hasattr(c, "result") else c for c in coming[1]]
                    yield self._answer(coming[0], contents, views, k, coming[2])
                coming, start = following, start + len(chunk or ())

    def _read(self, row: Row, number: int, crops: Sequence[Any]) -> Any:
        try:
            return self.reader.read(row.content, number, crops)
        except Unreadable as error:
            return error

    # ------------------------------------------------ a batch

    @torch.no_grad()
    def _answer(self, rows: list[Row], contents: list[Any], views: int, k: int, first: int = 0) -> Predictions:
        errors = [str(content) if isinstance(content, Unreadable) else None for content in contents]
        good = [n for n, error in enumerate(errors) if error is None]
        probabilities = np.full((len(rows), len(self.classes)), np.nan, np.float32)
        distances = None if self.retriever is None else np.full(len(rows), np.nan, np.float32)
        near = self._no_neighbors(len(rows), k) if k and self.retriever is not None else None
        if good:
            seen = self._features([contents[n] for n in good], np.array([first + n for n in good]), views)
            finite = torch.stack([features.isfinite().all(1) for features in seen]).all(0).cpu()
            for n in (n for n, fine in zip(good, finite.tolist(), strict=True) if not fine):
                errors[n] = "the model gives NaN"
            good, keep = [n for n, fine in zip(good, finite.tolist(), strict=True) if fine], finite.to(seen[0].device)
            seen = [features[keep] for features in seen]
        if good:
            retrieved = [self.classifier.head.retrieve(features) for features in seen]
            log_probs = [self.classifier.log_probs(each) for each in retrieved]
            probabilities[good] = (averaged(log_probs) if len(log_probs) > 1 else log_probs[0]).exp().float().cpu().numpy()
            if self.retriever is not None and distances is not None:
                own = retrieved[0] if self.retriever is self.classifier.head else self.retriever.retrieve(seen[0])
                distances[good] = own.distance[:, 0].clamp_min(0).sqrt().cpu().numpy()
                if near is not None:
                    self._fill(near, good, own)
        names = tuple(row.name for row in rows)
        if near is not None:
            near = Neighborhood(**{**vars(near), "errors": tuple(errors)})
        return Predictions(probabilities, self.classes, names, tuple(errors), distances, near)

    def _features(self, contents: list[Any], numbers: np.ndarray, views: int) -> list[Tensor]:
        """Of each view, (N, F)."""
        x = torch.from_numpy(np.ascontiguousarray(self.reader.together(contents)))
        found, cut = [], 1
        for view in range(views):
            if self.kind == "table":
                seen = self.rows.prepared(x, numbers)
            elif self.kind == "files" and view and not (view == 1 and self.reader.flip):
                seen, cut = self.rows.prepared(x[:, cut], numbers), cut + 1
            else:
                seen = self.rows.seen_as(view).prepared(x[:, 0], numbers)
            nobody = torch.zeros(len(seen), dtype=torch.long, device=seen.device)
            found.append(self.classifier.features(Batch(seen, nobody, nobody)))
        return found

    def _no_neighbors(self, count: int, k: int) -> Neighborhood:
        assert self.retriever is not None
        shape = (count, min(k, self.retriever.k))
        rows, labels = np.full(shape, -1, np.int64), np.full(shape, -1, np.int64)
        weights, distances = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
        return Neighborhood(rows, weights, labels, distances, self.classes, self.reader.files)

    def _fill(self, near: Neighborhood, at: list[int], retrieved: Retrieved) -> None:
        assert self.vote is not None
        start, width = 0, near.rows.shape[1]
        for block in retrieved.blocks():
            found = block.neighbors
            weights = self.vote.weights(block).float()
            # Stable: of equal weights the nearer comes first.
            order = weights.masked_fill(~found.mask, -1).argsort(dim=1, descending=True, stable=True)[:, :width]
            there = at[start : start + len(order)]
            start += len(order)
            parts = (found.index, weights, found.label, found.distance.clamp_min(0).sqrt())
            absent = ~found.mask.gather(1, order).cpu().numpy()
            for name, part in zip(("rows", "weights", "labels", "distances"), parts, strict=True):
                values = part.gather(1, order).cpu().numpy()
                getattr(near, name)[there] = np.where(absent, -1 if name in ("rows", "labels") else np.nan, values)


def choose_device_of(classifier: Classifier) -> torch.device:
    """Where its weights are; the CPU for a model that has none."""
    return next((tensor.device for tensor in itertools.chain(classifier.parameters(), classifier.buffers())), torch.device("cpu"))
