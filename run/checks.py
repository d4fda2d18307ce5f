"""Checks across options, and of options against the rows: what would fail after training is found before it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from classifiers import HEADS
from classifiers.index import kept
from config import Config
from inputs.rows import Data
from run.directory import check_writable
from run.shared import check_shards
from training.bank import order_in_bank
from utils import BadOption, options_of, say, warn, whole_numbers


def check_neighbors(config: Config, data: Data) -> None:
    """What can only fail once there is a bank."""
    options = config.head
    head = HEADS[options.head]
    if not head.wants_bank:
        return
    if absent := absent_classes(data):
        raise BadOption("head", f"{options.head} votes for classes of training rows; there is none of {', '.join(absent[:10])}")
    if options.bank_cap and options.bank_cap < data.num_classes:
        raise BadOption("bank_cap", f"must be at least the number of classes ({data.num_classes})", options.bank_cap)
    if lost := lost_classes(config, data):
        raise BadOption("bank_cap", f"keeps no row of {', '.join(lost[:10])}; --bank_evict class-balanced does", options.bank_cap)
    frozen = config.model.freeze_backbone or config.model.model == "identity"
    plain_vote = "vote" in options_of(head) and "criterion" not in options_of(head)
    if (
        plain_vote
        and options.vote.partition("(")[0].strip() == "uniform"
        and not (options.contrastive_weight or options.proxy_weight or frozen)
    ):
        rule = "uniform teaches the backbone nothing: use --freeze_backbone, or a --contrastive_weight or --proxy_weight above 0"
        raise BadOption("vote", rule, options.vote)
    rows, rate, least = rows_in_bank(config, data), options.neighbor_sample, options.k_train + 2  # a mixed row leaves out two
    if rate < 1 and round(rate * rows) < least:
        raise BadOption("neighbor_sample", f"must leave at least k_train + 2 ({least}) of the bank's {rows} rows", rate)


def check_learns(config: Config, head: torch.nn.Module) -> None:
    """A head that is trained alone, by itself or after its backbone, needs something to learn."""
    if any(parameter.requires_grad for parameter in head.parameters()):
        return
    for name, alone in {"freeze_backbone": config.model.freeze_backbone, "head_epochs": config.training.head_epochs}.items():
        if alone:
            raise BadOption(name, f"needs a head that learns: {config.head.head} has no parameters", alone)


def warn_of_copies(config: Config, data: Data) -> None:
    """Rows that are exactly the same as others, within and between splits."""
    counts, keep = data.summary["duplicates"], config.data.keep_duplicates
    if not counts:
        say("duplicates: not looked for among so many image files")
    told = {
        "train": "training rows are exact copies of others" + ("" if keep else "; copies are not each other's neighbors"),
        "val_in_train": "validation rows are exact copies of training rows" + (", and stay" if keep else ", and were left out"),
        "test_in_train": "test rows are exact copies of training rows: the test is easier than new rows would be",
        "test_in_val": "test rows are exact copies of validation rows, which pick the epoch and set the confidence",
        "test": "test rows are exact copies of other test rows, and count as often as they are there",
    }
    for name, what in told.items():
        if counts.get(name):
            warn(f"duplicates: {counts[name]:,} {what}")


SURPRISE = 3.0  # standard errors
FEW = 50  # validation rows: one of them is two points of accuracy


def warn_of_known_rows(config: Config, data: Data, found: Mapping[str, Any], val: Mapping[str, float] | None) -> None:
    """A pretrained backbone may have been trained on the validation rows: then they are easier than new rows, and calibration, which
    takes them for new rows, makes the classifier too sure."""
    options = config.data
    if not config.model.pretrained or val is None or data.val is None or options.noise or options.label_noise or options.imbalance < 1:
        return
    predictors, n = found.get("predictors", {}), len(data.val)
    rivals = [("test rows", val["accuracy"], found["test"]["accuracy"], len(data.test))]
    # Of one predictor: a linear head may be far better than all votes, on any rows.
    votes = [s for s in predictors.get("scores", {}).values() if "train_leave_one_out" in s]
    if best := max(votes, key=lambda s: s["train_leave_one_out"], default=None):
        rows = predictors["left_out_rows"]
        rivals.append(("training rows without themselves", best["val_accuracy"], best["train_leave_one_out"], rows))
    for what, easy, accuracy, rows in rivals:
        both = (easy * n + accuracy * rows) / (n + rows)
        if easy - accuracy > SURPRISE * math.sqrt(both * (1 - both) * (1 / n + 1 / rows)):
            warn(
                f"pretrained: validation rows are easier ({easy:.1%} right) than {what} ({accuracy:.1%}), so these weights may have been "
                "trained on them, and then calibration is too sure; rows that nothing was trained on mend it (x_val, y_val in an npz)"
            )
            return


def warn_of_few_rows(rows: int) -> None:
    """That calibration was fitted to."""
    if rows < FEW:
        few = f"{rows} validation row{'s'[: rows - 1]}, and below {FEW} the calibrated scores are chance to a large part"
        warn(f"calibrate: fitted to {few} (a higher --val_fraction gives more)")


def check_validation(config: Config, data: Data, *, told: bool = True) -> None:
    """Without validation rows, what needs them is refused, and what follows from having none is `told`."""
    if data.val is not None:
        return
    for name, asked in {"patience": config.training.patience, "scheduler": config.training.scheduler == "plateau"}.items():
        if asked:
            raise BadOption(name, needs_validation(config, data), getattr(config.training, name))
    if not told:
        return
    why = rounded_away(config, data) or f"--val_fraction {config.data.val_fraction}"
    warn(f"validation: no rows ({why}), so the last epoch counts as the best")
    if config.evaluation.calibrate == "none":
        fitted = "interpolation" in options_of(HEADS[config.head.head]) and config.head.interpolation is None
        say(f"calibrate: none (no validation rows{'; the share of the vote stays at one half' if fitted else ''})")


def needs_validation(config: Config, data: Data) -> str:
    return f"needs validation rows ({rounded_away(config, data) or '--val_fraction above 0'})"


def rounded_away(config: Config, data: Data) -> str:
    """Why there are no validation rows where some were asked for."""
    asked = config.data.val_fraction
    return f"--val_fraction {asked} rounds to 0 of {len(data.train)} rows, class by class" if asked else ""


def check_evaluation(config: Config, data: Data, typed: frozenset[str]) -> None:
    """What the evaluation at the end could not do. `typed`: options of this command, not a checkpoint's."""
    options = config.evaluation
    check_shards(config, data, typed)
    if options.tta > 1 and data.kind == "table":
        raise BadOption("tta", "needs images: the rows of a table have no views", options.tta)
    if options.calibrate != "none" and data.val is None:
        raise BadOption("calibrate", needs_validation(config, data), options.calibrate)
    if config.system.feature_cache and config.model.freeze_backbone and "feature_cache" in typed:
        check_writable(Path(config.system.feature_cache), "feature_cache")
    if not (HEADS[config.head.head].wants_bank or options.baselines):
        for name in ("ood", "continual", "k_eval", "k_ensemble", "adaptive_k"):
            if getattr(options, name):
                raise BadOption(name, "needs a bank: a head over neighbors, or --baselines", getattr(options, name))
    rows = rows_in_bank(config, data)
    for name, asked in {"k_train": config.head.k_train, "k_eval": options.k_eval, "k_ensemble": options.k_ensemble}.items():
        if name not in config.ignored and max(whole_numbers(name, asked), default=1) > rows:
            raise BadOption(name, f"must be at most the number of rows in the bank ({rows})", asked)


def absent_classes(data: Data) -> list[str]:
    return [data.classes[c] for c, count in enumerate(data.summary["class_counts"]) if not count]


def rows_in_bank(config: Config, data: Data) -> int:
    return min(len(data.train), config.head.bank_cap or len(data.train))


def lost_classes(config: Config, data: Data) -> list[str]:
    """Classes of which a bank with a cap keeps no row."""
    if not config.head.bank_cap:
        return []
    labels = torch.from_numpy(data.train.y)[order_in_bank(len(data.train), config.system.seed)]
    stays = kept(labels, torch.arange(len(labels)), config.head.bank_cap, config.head.bank_evict)
    counts = labels[stays].bincount(minlength=data.num_classes).tolist()
    return [name for name, count in zip(data.classes, counts, strict=True) if not count]


@torch.no_grad()
def warn_of_mixed_rows(config: Config, backbone: torch.nn.Module, shape: tuple[int, ...], device: torch.device) -> None:
    """A row's features must not depend on the rows beside it, or scores do, too. NOTE: of one row alone, rounding may change a neighbor."""
    backbone.eval()
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)).to(device)
    with torch.random.fork_rng():
        together = backbone(x).float()
        alone = [backbone(row[None])[0].float() for row in x]
    if not any(torch.allclose(one, other, rtol=1e-3, atol=1e-4) for one, other in zip(together, alone, strict=True)):
        warn(f"model: what {config.model.model} makes of a row depends on the rows beside it in a batch, and so does every score")
