"""Heads that look at neighbors: an embedder, a bank of the training rows' embeddings, and a predictor over those nearest to a query."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from classifiers.approximate import RECALL
from classifiers.bank import EVICTIONS, Bank, Neighbors
from classifiers.class_means import ClassMeans
from classifiers.embedder import Embedder
from classifiers.heads import HEADS, Head, LinearHead
from classifiers.losses import collapse, contrastive_margin, nll, supervised_contrastive
from classifiers.neighbor_attention import NeighborAttention
from classifiers.predictors import HeadPredictor, Interpolation, Predictor, Vote
from classifiers.prior import Prior
from classifiers.proxies import Proxies
from classifiers.retrieved import BLOCK, Block, Retrieved
from classifiers.values import TabrValues
from classifiers.weights import WEIGHTS, Weigh, check_temperature, softmax_cosine
from layers.functional import full_precision
from ranks import here
from utils import BadOption, check_options, one_of, parse_call, whole_numbers


class NeighborHead(Head):
    """What all heads over a bank have in common. A subclass makes `self.predictor`.

    NOTE: `index` keeps a training row, and both rows of a mixed one, out of their own neighbors, by id.
    """

    wants_bank = True

    def __init__(
        self,
        num_features: int,
        num_classes: int,
        *,
        embed_dim: int | None = None,
        standardize: bool = True,
        k_train: int = 16,
        k_eval: str | int | Sequence[int] | None = None,
        k_ensemble: str | Sequence[int] | None = None,
        adaptive_k: bool = False,
        prior: str = "learned",
        index: str = "auto",
        recall: float = RECALL,
        bank_cap: int | None = None,
        bank_evict: str = EVICTIONS[0],
        shard_bank: bool = False,
        neighbor_sample: float = 1.0,
        contrastive_weight: float = 0.5,
        contrastive_form: str = "temperature",
        contrastive_temperature: float = 0.1,
        contrastive_margin: float = 0.5,
        hard_negatives: float = 0.0,
        proxy_weight: float = 0.0,
        label_smoothing: float = 0.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        dim = (256 if self.learned else 0) if embed_dim is None else embed_dim
        self.embedder = Embedder(num_features, dim, standardize=standardize, dropout=dropout)
        self.k_train = k_train
        self.ks = whole_numbers("k_eval", k_eval) or (k_train,)  # one decides; several are a sweep beside k_train
        self.ensemble = whole_numbers("k_ensemble", k_ensemble)
        self.adaptive_k, self.prior_kind = adaptive_k, one_of("prior", prior, ("learned", "constant"))
        self.bank_options = {"kind": index, "recall": recall, "cap": bank_cap, "evict": bank_evict}
        self.shard_bank = shard_bank
        self.neighbor_sample, self.label_smoothing = neighbor_sample, label_smoothing
        self.contrastive_weight, self.contrastive_form = contrastive_weight, contrastive_form
        self.contrastive = {"hard_negatives": hard_negatives}
        self.contrastive |= {"margin": contrastive_margin} if contrastive_form == "margin" else {"temperature": contrastive_temperature}
        self.proxy_weight = proxy_weight
        self.proxies = Proxies(num_classes, num_features) if proxy_weight else None
        self.bank: Bank | None = None
        self.means: ClassMeans | None = None

    predictor: Predictor

    def new_prior(self) -> Prior:
        return Prior(self.num_classes, constant=self.prior_kind == "constant")

    def make_vote(self, name: str, weigh: Any, values: TabrValues | None = None) -> Vote:
        options: dict[str, Any] = {"ensemble": self.ensemble, "adaptive": self.adaptive_k}
        return Vote(name, weigh, self.num_classes, prior=self.new_prior(), values=values, **options)

    @property
    def vote(self) -> Vote:
        """The part of the predictor that looks at the neighbors."""
        vote = self.predictor.vote_part
        assert vote is not None
        return vote

    @property
    def k(self) -> int:
        """Neighbors that an evaluation looks at."""
        return max(self.ensemble) if self.ensemble else self.ks[0] if len(self.ks) == 1 else self.k_train

    # ------------------------------------------------ neighbors

    def embed(self, features: Tensor) -> Tensor:
        # NOTE: in float32 also under autocast: what rounding moves would be farther from its own row in the bank than others are.
        with torch.autocast(features.device.type, enabled=False):
            embedding: Tensor = self.embedder(full_precision(features))
        return embedding

    def refresh(self, bank: Bank) -> None:
        if bank.dim != self.embedder.dim:
            raise BadOption("bank", f"must hold embeddings of this head's dimension ({self.embedder.dim})", bank.dim)
        bank.require_classes(self.num_classes)
        self.use(bank)

    def use(self, bank: Bank) -> None:
        """A bank that grows may have lost a class: it gets no votes."""
        for name, k in {"k_train": self.k_train, "k_eval": max(self.ks), "k_ensemble": max(self.ensemble, default=1)}.items():
            if k > len(bank):
                raise BadOption(name, f"must be at most the number of rows in the bank ({len(bank)})", k)
        self.bank, self.means = bank, ClassMeans(bank, self.num_classes)

    def search(self, embedding: Tensor, k: int, exclude: Tensor | None = None, bank: Bank | None = None) -> Neighbors:
        bank = bank or self.bank
        if bank is None:
            raise BadOption("bank", "must be handed to the head before it votes: refresh(bank)")
        found = bank.search(embedding.detach(), k, exclude)
        if bank.kind == "ip":  # of unit vectors: |q - x|^2 = 2 - 2 q.x
            return dataclasses.replace(found, distance=(2 + 2 * found.distance).clamp_min(0))
        return found

    def retrieve(self, features: Tensor, k: int | None = None) -> Retrieved:
        """Many rows with their neighbors, searched in blocks."""
        embedding = torch.cat([self.embed(rows).detach() for rows in features.split(BLOCK)])
        return self._retrieved(features, embedding, k or self.k)

    def leave_one_out(self, ids: Tensor) -> Retrieved:
        """Rows of the bank with their neighbors, which they are not among. The bank does not know their features."""
        assert self.bank is not None
        embedding = self.bank.take(ids)[0]
        return self._retrieved(embedding[:, :0], embedding, self.k, ids)

    def _retrieved(self, features: Tensor, embedding: Tensor, k: int, exclude: Tensor | None = None) -> Retrieved:
        bank, means = self.bank, self.means
        assert bank is not None
        assert means is not None
        turns = bank.turns(len(embedding), BLOCK)
        near = [self.search(embedding[rows], k, None if exclude is None else exclude[rows]) for rows in turns]
        distance, index = (bank.of_all([getattr(n, part) for n in near]) for part in ("distance", "index"))
        return Retrieved(features, embedding, distance, index, means.cosine(embedding, exclude), bank.holding(index))

    def block(self, features: Tensor, embedding: Tensor, near: Neighbors, exclude: Tensor | None = None) -> Block:
        assert self.means is not None
        return Block(features, embedding, near, self.means.cosine(embedding, exclude))

    def as_predictor(self, num_classes: int) -> Predictor:
        return self.predictor

    # ------------------------------------------------ the contract

    def forward(self, features: Tensor) -> Tensor:
        embedding = self.embed(features)
        finite = embedding.isfinite().all(1, keepdim=True)
        embedding = embedding.where(finite, 0)  # of several processes, all look up: none may stay away
        log_probs: Tensor = self.predictor(self.block(features, embedding, self.search(embedding, self.k)))
        return log_probs.where(finite, math.nan)

    def loss(self, features: Tensor, target: Tensor, index: Tensor) -> dict[str, Tensor]:
        embedding = self.embed(features)
        if here().largest(int(not embedding.isfinite().all())):
            return {"knn_nll": embedding.sum()}  # not a number: the loop says that training diverged, and where
        bank = self.bank
        if bank is not None and self.neighbor_sample < 1:
            bank = bank.sample(max(self.k_train, round(self.neighbor_sample * len(bank))))
        near = self.search(embedding, self.k_train, index, bank)
        # What was searched has no gradient; the distance as a function of the embedding has.
        distance = (embedding[:, None] - near.embedding).square().sum(2).masked_fill(~near.mask, math.inf)
        near = dataclasses.replace(near, distance=distance)
        return self.terms(self.block(features, embedding, near, index), target, index)

    def terms(self, block: Block, target: Tensor, index: Tensor) -> dict[str, Tensor]:
        weights = self.vote.weights(block)
        log_probs = self.vote.log_probs(self.vote.count(weights, block), block.context)
        terms = {"knn_nll": nll(log_probs, target, self.label_smoothing)}
        if self.contrastive_weight:
            form = contrastive_margin if self.contrastive_form == "margin" else supervised_contrastive
            z, targets, numbers = here().joined(block.embedding, target, index)
            terms["contrastive"] = self.contrastive_weight * form(z, targets, numbers, **self.contrastive)
        if self.proxies is not None:
            terms["proxies"] = self.proxy_weight * self.proxies(block.features, target, self.label_smoothing)
        return terms | self.more_terms(weights, block, target, index)

    def more_terms(self, weights: Tensor, block: Block, target: Tensor, index: Tensor) -> dict[str, Tensor]:
        return {}

    def part_of(self, name: str) -> str:
        if name.startswith("embedder."):
            return "projection"
        return "head" if {"linear", "prior", "proxies"} & set(name.split(".")) else "attention"


def weights_of(text: str) -> tuple[str, Weigh]:
    """The name of weights and their function, from the name or a call: "softmax-cosine(temperature=0.1)"."""
    call = parse_call(text, "vote")
    weigh = WEIGHTS[call.name]
    check_options(call.name, weigh, call.options)
    if weigh is softmax_cosine and call.options:
        check_temperature(call.options["temperature"])
    return call.name, functools.partial(weigh, **call.options) if call.options else weigh


@HEADS.register("knn")
class KnnHead(NeighborHead):
    """The k nearest training rows vote: uniform, by distance, or by softmax of the cosine (DINO)."""

    def __init__(self, num_features: int, num_classes: int, *, vote: str = "softmax-cosine", **options: Any) -> None:
        super().__init__(num_features, num_classes, **options)
        self.predictor = self.make_vote(*weights_of(vote))


@HEADS.register("attn-knn")
class AttnKnnHead(NeighborHead):
    """Learned multi-head attention over the k nearest training rows weighs their votes."""

    learned = True

    def __init__(
        self,
        num_features: int,
        num_classes: int,
        *,
        attention_heads: int = 4,
        distance_bias: bool = True,
        neighbor_self_attention: bool = False,
        prototypes: bool = False,
        label_bias: bool = False,
        values: str = "labels",
        entropy_reg: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(num_features, num_classes, **options)
        dim = self.embedder.dim
        attention = NeighborAttention(
            dim,
            num_heads=attention_heads,
            num_classes=num_classes,
            self_attention=neighbor_self_attention,
            prototypes=prototypes,
            label_bias=label_bias,
            distance_bias=distance_bias,
        )
        tabr = TabrValues(dim, num_classes) if one_of("values", values, ("labels", "tabr")) == "tabr" else None
        self.predictor, self.entropy_reg = self.make_vote("attention", attention, tabr), entropy_reg

    def more_terms(self, weights: Tensor, block: Block, target: Tensor, index: Tensor) -> dict[str, Tensor]:
        terms = super().more_terms(weights, block, target, index)
        if self.entropy_reg:
            terms["entropy"] = self.entropy_reg * collapse(weights, block.neighbors.mask)
        return terms


class WithLinear(NeighborHead):
    """p = lambda p_vote + (1 - lambda) p_linear. Both learn, each from its own loss; lambda is fixed, or fitted in calibration."""

    def __init__(
        self, num_features: int, num_classes: int, *, interpolation: float | None = None, criterion: str = "CrossEntropy", **options: Any
    ) -> None:
        super().__init__(num_features, num_classes, **options)
        linear = LinearHead(num_features, num_classes, criterion=criterion, label_smoothing=self.label_smoothing)
        self.predictor = Interpolation(HeadPredictor(linear, num_classes), self.vote, share=interpolation)

    @property
    def linear(self) -> LinearHead:
        linear: Any = self.predictor.linear_part
        head: LinearHead = linear.head
        return head

    def more_terms(self, weights: Tensor, block: Block, target: Tensor, index: Tensor) -> dict[str, Tensor]:
        linear = {f"linear_{name}": term for name, term in self.linear.loss(block.features, target, index).items()}
        return super().more_terms(weights, block, target, index) | linear


@HEADS.register("linear+knn")
class LinearKnnHead(WithLinear, KnnHead):
    """A linear head and a plain kNN vote, interpolated."""


@HEADS.register("linear+attn-knn")
class LinearAttnKnnHead(WithLinear, AttnKnnHead):
    """A linear head and the learned vote over neighbors, interpolated."""
