"""What a person reads of a run: its configuration in a few lines, and its final table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from config import TOPIC_OF, Config
from evaluation.cost import load_of, parameters


def description(config: Config, summary: Mapping[str, Any], shape: tuple[int, ...], model: nn.Module) -> str:
    """The configuration, a line a topic: every option that was set and has an effect. `summary` of the data, `shape` of a row."""
    topics: dict[str, list[str]] = {}
    for name, value in config.flat().items():
        if value is not None and name not in config.ignored:
            topics.setdefault(TOPIC_OF[name], []).append(f"{name}={value}")
    lines = [f"{topic + ':':<16}{' '.join(values)}" for topic, values in topics.items()]
    counts = f"{summary['train']:,} training, {summary['val']:,} validation, {summary['test']:,} test"
    rows = f"{counts}; shape {shape}, {len(summary['class_counts'])} classes"
    if summary["label_noise_rate"]:
        rows += f", {summary['label_noise_rate']:.1%} of the training labels changed"
    return "\n".join([*lines, f"{'rows:':<16}{rows}", f"{'parameters:':<16}{parameters(model):,}"])


def chosen_by(results: Mapping[str, Any], *, full: bool = False) -> str:
    """The rule by which the best epoch is the best; `full`: as `train_eval.better_epoch` has it."""
    accuracy = "the lowest validation NLL within one standard error of the highest accuracy" if full else "validation accuracy, then NLL"
    rules = {"accuracy": accuracy, "nll": "the lowest validation NLL" if full else "validation NLL"}
    return rules.get(results["about"]["config"]["select"], "being the last") if results["val"] else "being the last"


def table(results: dict[str, Any], written: Path) -> str:
    """The final table: scores of validation and test side by side, before calibration and after, then cost."""
    about = results["about"]
    variants = about["test_variants"]
    columns = {"val": results["val"] or {}}
    columns |= {"val calibrated": results["val_calibrated"]} if "val_calibrated" in results else {}
    columns |= {"test" if v == "raw" else f"test {VARIANTS[v]}": scores for v, scores in variants.items()}
    percent = {"accuracy": "accuracy", "top5": "top-5", "f1_macro": "F1-macro"}
    plain = {"nll": "NLL", "ece": "ECE", "brier": "Brier"}
    sure = {f"accuracy_at_{share}": f"surest {share} %" for share in (95, 90, 80)}

    def cells(key: str, form: str) -> str:
        return "".join(f"{format(scores[key], form) if key in scores else '-':>{widths[name]}}" for name, scores in columns.items())

    widths = {name: max(12, len(name) + 2) for name in columns}
    lines = [f"{'epoch ' + str(about['epoch']):<16}" + "".join(f"{name:>{width}}" for name, width in widths.items())]
    lines += [f"{name:<16}{cells(key, '.2%')}" for key, name in percent.items()]
    lines += [f"{name:<16}{cells(key, '.4f')}" for key, name in plain.items()]
    lines += [f"{name:<16}{cells(key, '.2%')}" for key, name in sure.items()]
    cost = {
        "epoch chosen by": chosen_by(results),
        "head alone": head_alone(about),
        "parameters": f"{about['params'] / 1e6:.3f} M",
        "GFLOPs": f"{about['gflops']:.4g}",
        "images/s": "{:,.0f} ({:,.0f} to {:,.0f})".format(about["images_per_second"], *about["images_per_second_quartiles"]),
        "machine then": load_of(about["load"]),
        "peak memory": f"{about['peak_memory_mb']:,.0f} MB" if about["peak_memory_mb"] else "",
        "training time": f"{about['seconds']:.1f} s",
    }
    lines += [f"{name:<16}{value:>32}" for name, value in cost.items() if value]
    if "predictors" in results:
        lines += ["", *predictors_table(results["predictors"]), *remarks(results)]
    if "ood" in about:
        ood = about["ood"]
        by = f"by distance to the neighbors {ood['auroc_distance']:.3f}, by confidence of {ood['predictor']} {ood['auroc_confidence']:.3f}"
        lines += ["", f"foreign rows ({ood['dataset']}, {ood['rows']:,}), AUROC {by}"]
    if "continual" in about:
        grown = about["continual"]
        both = " to ".join(f"{grown[when]['accuracy']:.2%} (NLL {grown[when]['nll']:.4f})" for when in ("before", "after"))
        sizes = f"{grown['bank_before']:,} to {grown['bank']:,} rows"
        lines += ["", f"bank that test rows join, {grown['block']} at a time, once classified ({sizes}), {grown['predictor']}: {both}"]
    if results.get("warnings"):
        lines += ["", "to be known before these numbers are trusted:", *(f"  {warning}" for warning in results["warnings"])]
    return "\n".join([*lines, f"written to {written}"])


def head_alone(about: Mapping[str, Any]) -> str:
    """Whether the scores are those after epochs of the head alone, which follow the best epoch."""
    if (found := about.get("head_alone")) is None:
        return ""
    return f"{found['epochs']} more epochs" if found["kept"] else f"{found['epochs']} more epochs, no better"


VARIANTS = {"raw": "as trained", "calibrated": "calibrated", "raw_tta": "TTA", "calibrated_tta": "calibrated, TTA"}


def predictors_table(found: dict[str, Any]) -> list[str]:
    """The head's own predictor and its baselines side by side, on the same test rows and the same neighbors."""
    predictors = found["scores"]
    variants = [v for v in VARIANTS if v in next(iter(predictors.values()))]
    k = f"k = {','.join(map(str, found['ensemble']))}" if found["ensemble"] else f"k = {found['k']}"
    shown = {"accuracy": "{:>9.2%}", "nll": "{:>9.4f}", "ece": "{:>8.4f}"}
    first = max(16, *(len(name) + 2 for name in predictors))
    lines = [f"{'test, ' + k:<{first}}" + "".join(f"{VARIANTS[v]:^28}" for v in variants) + f"{'training rows,':>16}"]
    lines += [f"{'':<{first}}" + f"{'accuracy':>9}{'NLL':>9}{'ECE':>8}  " * len(variants) + f"{'self left out':>16}"]
    for name, of_predictor in predictors.items():
        cells = ["".join(form.format(of_predictor[v][key]) for key, form in shown.items()) + "  " for v in variants]
        left_out = format(of_predictor["train_leave_one_out"], ".2%") if "train_leave_one_out" in of_predictor else "-"
        lines.append(f"{name:<{first}}{''.join(cells)}{left_out:>16}")
    for variant, by_k in found.get("by_k", {}).items():
        lines += ["", f"{VARIANTS[variant] + ', k =':<{first}}" + "".join(f"{k:>18}" for k in next(iter(by_k.values())))]
        lines += [
            f"{name:<{first}}" + "".join(f"{scores['accuracy']:>10.2%}{scores['nll']:>8.3f}" for scores in of_k.values())
            for name, of_k in by_k.items()
        ]
    return lines


def remarks(results: dict[str, Any]) -> list[str]:
    """What must be known to read the table of predictors."""
    found, lines = results["predictors"], []
    if names := found["without_prior"]:
        lines.append(f"as trained, without a prior: {', '.join(names)} (with k neighbors of one class they give the other classes 0)")
    if found["trained_afterwards"]:
        names = ", ".join(found["trained_afterwards"])
        lines.append(f"{names}: trained after the model was done, on rows of the bank, each left out of its own neighbors")
    if "vote_share" in found:
        lines.append(f"interpolation: {found['vote_share']:.2f} of the vote, {1 - found['vote_share']:.2f} of the linear head")
    if "neighbors" in found:
        counts = ", ".join(f"{name} {count:.1f}" for name, count in found["neighbors"].items() if count)
        lines.append(f"neighbors that count (--adaptive_k), on average: {counts}")
    if results["about"]["data"]["label_noise_rate"]:
        lines.append("accuracy on training rows is measured against the labels that the run was told, the changed ones too")
    return ["", *lines] if lines else []
