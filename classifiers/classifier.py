"""The classifier: backbone, head and calibration. What it predicts, it says in one place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from classifiers.heads import Head
from classifiers.predictors import Predictor
from classifiers.retrieved import Retrieved
from inputs.batches import AnyBatches
from inputs.rows import Batch
from layers.dropout import drop_by_rows
from layers.functional import full_precision
from layers.linear import speed_up_linear
from layers.norm import speed_up_norms
from utils import Diverged, wrong_return


class Classifier(nn.Module):
    """Backbone and head, and, once they are trained, the head's predictor after calibration.

    `facts` go into its checkpoints: all it takes to rebuild it. `use_amp`: the backbone computes in half precision; features are
    float32 all the same.
    """

    def __init__(self, backbone: nn.Module, head: Head, num_classes: int, facts: dict[str, Any], *, use_amp: bool = False) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head
        self.num_classes, self.facts, self.use_amp = num_classes, facts, use_amp
        drop_by_rows(self)
        speed_up_linear(self)
        speed_up_norms(self)
        self.calibrated: Predictor | None = None  # None: the classifier answers as it was trained

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, amp_dtype(device)) if self.use_amp else nullcontext()

    def features(self, batch: Batch) -> Tensor:
        """(B, F). Of a frozen backbone they may have been computed before."""
        with self.autocast(batch.x.device):
            return full_precision(batch.x if batch.embedded else self.backbone(batch.x))

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Named terms, whose sum is minimized."""
        features = self.features(batch)
        with self.autocast(batch.x.device):
            terms = self.head.loss(features, batch.target, batch.index)
            if not isinstance(terms, dict) or not terms or not all(isinstance(t, Tensor) and t.ndim == 0 for t in terms.values()):
                raise wrong_return(self.head.loss, 'a dict of named terms, each a tensor without axes: {"name": term}', terms)
            return {name: full_precision(term) for name, term in terms.items()}

    def forward(self, x: Tensor) -> Tensor:
        """Inputs to log-probabilities, as trained."""
        log_probs = self.head(self.backbone(x))
        if not isinstance(log_probs, Tensor) or log_probs.shape != (len(x), self.num_classes):
            raise wrong_return(self.head.forward, f"log-probabilities (B, C), here {(len(x), self.num_classes)}", log_probs)
        return log_probs

    # ------------------------------------------------ many rows, in evaluation

    @torch.no_grad()
    def of_rows(self, rows: AnyBatches, answer: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The features of all rows in their order, (N, F), or what `answer` makes of them, batch by batch."""
        self.eval()
        return without_nan(rows.answers(lambda batch: self.features(batch) if answer is None else answer(self.features(batch))))

    @torch.no_grad()
    def predict(self, x: Tensor, *, calibrated: bool = True) -> Tensor:
        """Inputs to class probabilities (N, C): after calibration, if the classifier was calibrated, or as trained."""
        self.eval()
        features = self.features(Batch(x, x.new_empty(len(x)), x.new_empty(len(x))))
        return self.log_probs(self.head.retrieve(features), calibrated=calibrated).exp()

    @torch.no_grad()
    def log_probs(self, retrieved: Retrieved, *, calibrated: bool = True) -> Tensor:
        """The same of rows whose neighbors are found already, as log-probabilities."""
        return self.predictor(calibrated=calibrated).predict(retrieved)

    def predictor(self, *, calibrated: bool = True) -> Predictor:
        """What answers."""
        own = self.calibrated if calibrated and self.calibrated is not None else self.head.as_predictor(self.num_classes)
        return own.to(next((p.device for p in self.head.parameters()), None))


def without_nan(outputs: Tensor) -> Tensor:
    require_no_nan(int(outputs.isnan().any(1).sum()), len(outputs))
    return outputs


def require_no_nan(lost: int, rows: int) -> None:
    """NOTE: metrics of these would look like numbers."""
    if lost:
        raise Diverged(f"the model gives NaN for {lost} of {rows} rows", 1)


def amp_dtype(device: torch.device) -> torch.dtype:
    return torch.float16 if device.type == "cuda" and not torch.cuda.is_bf16_supported() else torch.bfloat16
