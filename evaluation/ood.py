"""Out of distribution: do the rows of another data set look foreign?"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from classifiers.metrics import auroc
from classifiers.retrieved import Retrieved


def detection(own: Retrieved, foreign: Retrieved, own_log_probs: Tensor, foreign_log_probs: Tensor) -> dict[str, Any]:
    """AUROC of foreign rows against test rows: by the distance to their neighbors, and by the classifier's confidence."""
    return {
        "rows": len(foreign),
        "auroc_distance": auroc(own.mean_distance, foreign.mean_distance),
        "auroc_confidence": auroc(-own_log_probs.amax(1), -foreign_log_probs.amax(1)),
    }
