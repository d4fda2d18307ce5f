"""One run, and what it leaves: `load(RUN)` gives its trained model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from run.model import Model


def load(path: str | Path, *, device: str = "auto", plugin: str | None = None) -> Model:
    """The trained model of a run, or of a checkpoint folder: `predict`, `neighbors`. It needs no data set.

    `plugin`: the file that the run was made with; none runs unless it is named here.
    """
    from run.model import load as load_model  # late: torch takes its time

    return load_model(path, device=device, plugin=plugin)
