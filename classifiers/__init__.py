"""Heads by name, what they are made of (bank, neighbor attention, votes), and the metrics they are judged by."""

from classifiers.bank import Bank, Neighbors
from classifiers.heads import HEADS, Head, LinearHead
from classifiers.metrics import detailed, metrics
from classifiers.neighbor_attention import NeighborAttention
from classifiers.votes import VOTES, Prior

__all__ = ["HEADS", "VOTES", "Bank", "Head", "LinearHead", "NeighborAttention", "Neighbors", "Prior", "detailed", "metrics"]
