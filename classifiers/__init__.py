"""Heads by name, what they are made of (embedder, bank, weights, neighbor attention, predictors), calibration and metrics."""

from classifiers.bank import Bank, Neighbors
from classifiers.classifier import Classifier
from classifiers.heads import HEADS, Head, LinearHead
from classifiers.neighbor_attention import NeighborAttention
from classifiers.neighbor_heads import AttnKnnHead, KnnHead, NeighborHead
from classifiers.prior import Prior
from classifiers.weights import WEIGHTS

VOTES = WEIGHTS  # the name that older plugins import

__all__ = [
    "HEADS",
    "VOTES",
    "WEIGHTS",
    "AttnKnnHead",
    "Bank",
    "Classifier",
    "Head",
    "KnnHead",
    "LinearHead",
    "NeighborAttention",
    "NeighborHead",
    "Neighbors",
    "Prior",
]
