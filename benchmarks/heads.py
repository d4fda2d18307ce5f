"""What heads cost beside raw FAISS, scikit-learn's classifier and the linear head: class probabilities of features, and a training step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.bank import CLASSES, K, clustered
from benchmarks.timing import Ask, Group, Side, Watch
from classifiers import HEADS, Bank
from classifiers.faiss_library import load_faiss

PART, LINEAR, FAISS, SKLEARN = "heads", "linear", "FAISS alone: the search", "scikit-learn KNeighborsClassifier"


@dataclass(frozen=True)
class Sizes:
    rows: int
    dim: int = 192
    embed_dim: int = 64
    queries: int = 512
    batch: int = 64
    rounds: int = 25
    seconds: float = 40


FULL, QUICK = Sizes(50_000), Sizes(10_000)


def groups(ask: Ask, sizes: Sizes | None = None) -> Iterator[Group]:
    sizes = sizes or (QUICK if ask.quick else FULL)
    torch.manual_seed(0)
    x, labels = clustered(sizes.rows, sizes.embed_dim)
    bank = Bank(sizes.embed_dim, kind="flat")
    bank.add(x, labels)
    heads: dict[str, Any] = {}
    for name in HEADS:
        known = {"embed_dim": sizes.embed_dim, "k_train": K} if HEADS[name].wants_bank else {}
        heads[name] = HEADS[name](sizes.dim, CLASSES, **known)
        heads[name].refresh(bank)
    effort, where = ask.effort(sizes.rounds, sizes.seconds), f"a bank of {sizes.rows:,} rows of {sizes.embed_dim} dimensions, k = {K}"
    features = torch.randn(sizes.queries, sizes.dim, generator=torch.Generator().manual_seed(1))
    sides = {
        FAISS: faiss_alone(x, sizes),
        SKLEARN: scikit_learn(x, labels, sizes),
        **{n: asked(head, features) for n, head in heads.items()},
    }
    yield Group(PART, f"class probabilities of {sizes.queries} rows, {where}", ("probabilities",), (FAISS,), sides, effort, memory=False)
    steps = {name: training_step(head, sizes) for name, head in heads.items()}
    yield Group(PART, f"loss and gradient of {sizes.batch} rows, {where}", ("forward + backward",), (LINEAR,), steps, effort, memory=False)


def queries_of(x: Tensor, sizes: Sizes) -> Tensor:
    return torch.nn.functional.normalize(x[: sizes.queries] + 0.01, dim=1)


def faiss_alone(x: Tensor, sizes: Sizes) -> Side:
    faiss, queries = load_faiss(), queries_of(x, sizes).numpy()
    index = faiss.IndexFlatL2(x.shape[1])
    index.add(x.numpy())

    def run(watch: Watch) -> None:
        watch.lap()
        index.search(queries, K)
        watch.lap()

    return run


def scikit_learn(x: Tensor, labels: Tensor, sizes: Sizes) -> Side:
    from sklearn.neighbors import KNeighborsClassifier

    queries = queries_of(x, sizes).numpy()
    fitted = KNeighborsClassifier(K, weights="distance", algorithm="brute").fit(x.numpy(), labels.numpy())

    def run(watch: Watch) -> None:
        watch.lap()
        fitted.predict_proba(queries)
        watch.lap()

    return run


def asked(head: Any, features: Tensor) -> Side:
    def run(watch: Watch) -> None:
        head.eval()
        with torch.no_grad():
            watch.lap()
            head(features)
            watch.lap()

    return run


def training_step(head: Any, sizes: Sizes) -> Side:
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(sizes.batch, sizes.dim, generator=generator, requires_grad=True)
    target, index = torch.randint(CLASSES, (sizes.batch,), generator=generator), torch.arange(sizes.batch)

    def run(watch: Watch) -> None:
        head.train()
        head.zero_grad(set_to_none=True)
        features.grad = None
        watch.lap()
        torch.stack(list(head.loss(features, target, index).values())).sum().backward()
        watch.lap()

    return run
