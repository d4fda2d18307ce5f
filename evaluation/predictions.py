"""Predictions that are kept: what every mean over test rows can be computed from again, and what runs are compared by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from inputs.store import write_atomically
from utils import BadOption

FILE = "predictions.safetensors"
MOST_NUMBERS = 20_000_000  # rows x classes; beyond, the largest are kept, in half precision
LARGEST = 10


def keep(
    folder: Path,
    variants: dict[str, dict[str, Tensor]],
    target: Tensor,
    *,
    own: str,
    test_rows: str,
    others: dict[str, Tensor] | None = None,
    most: int = MOST_NUMBERS,
) -> None:
    """Log-probabilities of every predictor, `NAME.raw` and `NAME.calibrated` (rows, classes), with row numbers and labels; of several k
    also `NAME.raw.k5`, of all of which there may be so many numbers as of one predictor.

    `own` names the head's predictor, `test_rows` is the hash of the test rows. Of more numbers than `most`: `NAME.raw.largest` with
    `NAME.raw.classes`, the label's own `NAME.raw.label`, and `NAME.raw.entropy`. `others`: tensors of rows that are not test rows.
    """
    tensors = {**(others or {}), "row": torch.arange(len(target)), "label": target.cpu()}
    swept = sum(len(of_name) for variant, of_name in variants.items() if "." in variant)
    for variant, of_name in variants.items():
        for name, log_probs in of_name.items():
            tensors |= named(f"{name}.{variant}", log_probs, target, most // swept if "." in variant else most)
    metadata = {"own": own, "test_rows": test_rows, "predictors": json.dumps(list(next(iter(variants.values()))))}
    write_atomically(folder / FILE, tensors_to_bytes(tensors, metadata))


def of_other_rows(
    validated: dict[str, Tensor], target: Tensor | None, right: dict[str, Tensor], left_out: dict[str, Tensor], most: int = MOST_NUMBERS
) -> dict[str, Tensor]:
    """The head's predictions of the validation rows, `validation/raw` and `validation/calibrated` with `validation/label`; and which rows
    each vote has right: `NAME.validation`, and `NAME.left_out` of training rows that are not among their own neighbors."""
    found: dict[str, Tensor] = {}
    if target is not None:
        found["validation/label"] = target.cpu().contiguous()
        for variant, log_probs in validated.items():
            found |= named(f"validation/{variant}", log_probs, target, most)
    found |= {f"{name}.validation": rows.cpu().contiguous() for name, rows in right.items()}
    return found | {f"{name}.left_out": rows.cpu().contiguous() for name, rows in left_out.items()}


def named(name: str, log_probs: Tensor, target: Tensor, most: int) -> dict[str, Tensor]:
    """All log-probabilities or, of more than `most`, what most metrics need."""
    few = log_probs.numel() <= most
    parts = {"": log_probs.float().cpu()} if few else shortest(log_probs.cpu(), target.cpu())
    return {f"{name}{part}": value.contiguous() for part, value in parts.items()}


def shortest(log_probs: Tensor, target: Tensor) -> dict[str, Tensor]:
    """What most metrics need of each row."""
    values, classes = log_probs.topk(min(LARGEST, log_probs.shape[1]), dim=1)
    entropy = torch.special.entr(log_probs.double().exp()).sum(1)
    own = log_probs.gather(1, target[:, None])[:, 0]
    return {".largest": values.half(), ".classes": classes.int(), ".label": own.half(), ".entropy": entropy.half()}


def read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and metadata of a run's predictions."""
    path = folder / FILE
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())  # noqa: SIM118
    except Exception as error:  # absent, or damaged in one of the ways that safetensors knows
        raise BadOption("run", f"must hold {FILE} that can be read ({type(error).__name__})", str(folder)) from None
