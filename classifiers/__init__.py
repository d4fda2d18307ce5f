"""Heads by name, and the metrics they are judged by."""

from classifiers.heads import HEADS, Head, LinearHead
from classifiers.metrics import metrics

__all__ = ["HEADS", "Head", "LinearHead", "metrics"]
