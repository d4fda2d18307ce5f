"""What a person reads of a run: its configuration in a few lines, its final table, its curves."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from torch import nn

from config import Config
from dataset import Data
from models.cost import parameters


def describe(config: Config, data: Data, model: nn.Module) -> str:
    """The whole configuration, a line a topic; what is unset or belongs to the layers' own defaults is left out."""
    topics: dict[str, list[str]] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is not None:
            topics.setdefault(field.metadata["topic"], []).append(f"{field.name}={value}")
    lines = [f"{topic + ':':<16}{' '.join(values)}" for topic, values in topics.items()]
    facts = data.facts
    counts = f"{facts['train']:,} training, {facts['val']:,} validation, {facts['test']:,} test"
    rows = f"{counts}; shape {data.shape}, {data.num_classes} classes"
    if facts["label_noise_rate"]:
        rows += f", {facts['label_noise_rate']:.1%} of the training labels changed"
    return "\n".join([*lines, f"{'Rows:':<16}{rows}", f"{'Parameters:':<16}{parameters(model):,}"])


def table(results: dict[str, Any], written: Path) -> str:
    """The final table: scores of validation and test side by side, before calibration and after, then cost."""
    columns = {"val": results["val"] or {}, "test": results.get("test_uncalibrated") or results["test"]}
    if results.get("test_uncalibrated"):
        columns |= {"calibrated": results["test"]}
    percent = {"accuracy": "accuracy", "top5": "top-5", "f1_macro": "F1-macro"}
    plain = {"nll": "NLL", "ece": "ECE", "brier": "Brier"}
    sure = {f"accuracy_at_{share}": f"surest {share} %" for share in (95, 90, 80)}

    def cells(key: str, form: str) -> str:
        return "".join(f"{format(scores[key], form) if key in scores else '-':>12}" for scores in columns.values())

    lines = [f"{'epoch ' + str(results['epoch']):<16}" + "".join(f"{name:>12}" for name in columns)]
    lines += [f"{name:<16}{cells(key, '.2%')}" for key, name in percent.items()]
    lines += [f"{name:<16}{cells(key, '.4f')}" for key, name in plain.items()]
    lines += [f"{name:<16}{cells(key, '.2%')}" for key, name in sure.items()]
    cost = {
        "parameters": f"{results['params'] / 1e6:.3f} M",
        "GFLOPs": f"{results['gflops']:.4g}",
        "images/s": f"{results['images_per_second']:,.0f}",
        "peak memory": f"{results['peak_memory_mb']:,.0f} MB",
        "training time": f"{results['seconds']:.1f} s",
    }
    lines += [f"{name:<16}{value:>24}" for name, value in cost.items()]
    if "votes" in results:
        lines += ["", *votes_table(results["votes"])]
    if "ood" in results:
        ood = results["ood"]
        by = f"by distance to the neighbors {ood['auroc_distance']:.3f}, by confidence {ood['auroc_confidence']:.3f}"
        lines += ["", f"foreign rows ({ood['dataset']}, {ood['rows']:,}), AUROC {by}"]
    if "continual" in results:
        grown = results["continual"]
        both = " to ".join(f"{grown[when]['accuracy']:.2%} (NLL {grown[when]['nll']:.4f})" for when in ("before", "after"))
        lines += ["", f"bank that grows to {grown['bank']:,} rows, {grown['block']} at a time, each classified first: {both}"]
    return "\n".join([*lines, f"written to {written}"])


VARIANTS = {"raw": "as trained", "calibrated": "calibrated", "raw_tta": "TTA", "calibrated_tta": "calibrated, TTA"}


def votes_table(votes: dict[str, Any]) -> list[str]:
    """Linear head and votes side by side, on the same test rows and the same neighbors."""
    voters = votes["voters"]
    variants = [v for v in VARIANTS if v in next(iter(voters.values()))]
    k = f"k = {','.join(map(str, votes['ensemble']))}" if votes["ensemble"] else f"k = {votes['k']}"
    shown = {"accuracy": "{:>9.2%}", "nll": "{:>9.4f}", "ece": "{:>8.4f}"}
    lines = [f"{'test, ' + k:<16}" + "".join(f"{VARIANTS[v]:^28}" for v in variants) + f"{'training rows,':>16}"]
    lines += [f"{'':<16}" + f"{'accuracy':>9}{'NLL':>9}{'ECE':>8}  " * len(variants) + f"{'self left out':>16}"]
    for name, of_voter in voters.items():
        cells = ["".join(form.format(of_voter[v][key]) for key, form in shown.items()) + "  " for v in variants]
        left_out = f"{of_voter['train_leave_one_out']:.2%}" if "train_leave_one_out" in of_voter else "-"
        lines.append(f"{name:<16}{''.join(cells)}{left_out:>16}")
    if by_k := votes.get("by_k"):
        lines += ["", f"{'as trained, k =':<16}" + "".join(f"{k:>18}" for k in next(iter(by_k.values())))]
        lines += [
            f"{name:<16}" + "".join(f"{scores['accuracy']:>10.2%}{scores['nll']:>8.3f}" for scores in of_k.values())
            for name, of_k in by_k.items()
        ]
    return lines


def write_epochs(folder: Path, final: str) -> None:
    """train_eval_results.txt, a line an epoch and the final table; curves.png."""
    epochs = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = []
    for e in epochs:
        val = f"  val_accuracy {e['val']['accuracy']:.4f}  val_nll {e['val']['nll']:.4f}" if e["val"] else ""
        lines.append(f"epoch {e['epoch']}  loss {sum(e['train'].values()):.4f}{val}  lr {e['lr']:.3g}  seconds {e['seconds']:.1f}")
    (folder / "train_eval_results.txt").write_text("\n".join([*lines, "", final]) + "\n")
    draw_curves(epochs, folder / "curves.png")


def draw_curves(epochs: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    steps = [e["epoch"] for e in epochs]
    loss.plot(steps, [sum(e["train"].values()) for e in epochs], label="training loss")
    if epochs and epochs[0]["val"]:
        loss.plot(steps, [e["val"]["nll"] for e in epochs], label="validation NLL")
        accuracy.plot(steps, [100 * e["val"]["accuracy"] for e in epochs], color="tab:green", label="validation accuracy")
    loss.set(xlabel="epoch", yscale="log")
    accuracy.set(xlabel="epoch", ylabel="%")
    for axes in (loss, accuracy):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
