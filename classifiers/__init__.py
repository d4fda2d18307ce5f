"""Heads by name, what they are made of (embedder, bank, votes, neighbor attention), calibration, and the metrics they are judged by."""

from classifiers.bank import Bank, Neighbors
from classifiers.heads import HEADS, Head, LinearHead
from classifiers.knn import AttnKnnHead, KnnHead, NeighborHead
from classifiers.metrics import detailed, metrics
from classifiers.neighbor_attention import NeighborAttention
from classifiers.votes import VOTES, Prior

__all__ = [
    "HEADS",
    "VOTES",
    "AttnKnnHead",
    "Bank",
    "Head",
    "KnnHead",
    "LinearHead",
    "NeighborAttention",
    "NeighborHead",
    "Neighbors",
    "Prior",
    "detailed",
    "metrics",
]
