"""What a person reads of a run: its configuration in a few lines, its final table, its curves."""

from __future__ import annotations

import dataclasses
import json
import math
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
    counts = f"{data.summary['train']:,} training, {data.summary['val']:,} validation, {data.summary['test']:,} test"
    rows = f"{counts}; shape {data.shape}, {data.num_classes} classes"
    if data.summary["label_noise_rate"]:
        rows += f", {data.summary['label_noise_rate']:.1%} of the training labels changed"
    return "\n".join([*lines, f"{'Rows:':<16}{rows}", f"{'Parameters:':<16}{parameters(model):,}"])


def table(results: dict[str, Any], written: Path) -> str:
    """The final table: scores of validation and test side by side, before calibration and after, then cost."""
    variants = results["test_variants"]
    columns = {"val": results["val"] or {}, **{"test" if v == "raw" else VARIANTS[v]: scores for v, scores in variants.items()}}
    percent = {"accuracy": "accuracy", "top5": "top-5", "f1_macro": "F1-macro"}
    plain = {"nll": "NLL", "ece": "ECE", "brier": "Brier"}
    sure = {f"accuracy_at_{share}": f"surest {share} %" for share in (95, 90, 80)}

    def cells(key: str, form: str) -> str:
        return "".join(f"{format(scores[key], form) if key in scores else '-':>{widths[name]}}" for name, scores in columns.items())

    widths = {name: max(12, len(name) + 2) for name in columns}
    lines = [f"{'epoch ' + str(results['epoch']):<16}" + "".join(f"{name:>{width}}" for name, width in widths.items())]
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
        lines += ["", *votes_table(results["votes"]), *remarks(results)]
    if "ood" in results:
        ood = results["ood"]
        by = f"by distance to the neighbors {ood['auroc_distance']:.3f}, by confidence of {ood['voter']} {ood['auroc_confidence']:.3f}"
        lines += ["", f"foreign rows ({ood['dataset']}, {ood['rows']:,}), AUROC {by}"]
    if "continual" in results:
        grown = results["continual"]
        both = " to ".join(f"{grown[when]['accuracy']:.2%} (NLL {grown[when]['nll']:.4f})" for when in ("before", "after"))
        sizes = f"{grown['bank_before']:,} to {grown['bank']:,} rows"
        lines += ["", f"bank that test rows join, {grown['block']} at a time, once classified ({sizes}), {grown['voter']}: {both}"]
    return "\n".join([*lines, f"written to {written}"])


VARIANTS = {"raw": "as trained", "calibrated": "calibrated", "raw_tta": "TTA", "calibrated_tta": "calibrated, TTA"}


def votes_table(votes: dict[str, Any]) -> list[str]:
    """Linear head and votes side by side, on the same test rows and the same neighbors."""
    voters = votes["voters"]
    variants = [v for v in VARIANTS if v in next(iter(voters.values()))]
    k = f"k = {','.join(map(str, votes['ensemble']))}" if votes["ensemble"] else f"k = {votes['k']}"
    shown = {"accuracy": "{:>9.2%}", "nll": "{:>9.4f}", "ece": "{:>8.4f}"}
    first = max(16, *(len(name) + 2 for name in voters))
    lines = [f"{'test, ' + k:<{first}}" + "".join(f"{VARIANTS[v]:^28}" for v in variants) + f"{'training rows,':>16}"]
    lines += [f"{'':<{first}}" + f"{'accuracy':>9}{'NLL':>9}{'ECE':>8}  " * len(variants) + f"{'self left out':>16}"]
    for name, of_voter in voters.items():
        cells = ["".join(form.format(of_voter[v][key]) for key, form in shown.items()) + "  " for v in variants]
        left_out = f"{of_voter['train_leave_one_out']:.2%}" if "train_leave_one_out" in of_voter else "-"
        lines.append(f"{name:<{first}}{''.join(cells)}{left_out:>16}")
    if by_k := votes.get("by_k"):
        lines += ["", f"{'as trained, k =':<{first}}" + "".join(f"{k:>18}" for k in next(iter(by_k.values())))]
        lines += [
            f"{name:<{first}}" + "".join(f"{scores['accuracy']:>10.2%}{scores['nll']:>8.3f}" for scores in of_k.values())
            for name, of_k in by_k.items()
        ]
    return lines


def remarks(results: dict[str, Any]) -> list[str]:
    """What must be known to read the votes."""
    votes, lines = results["votes"], []
    if names := votes["without_prior"]:
        lines.append(f"as trained, without a prior: {', '.join(names)} (k neighbors of one class leave nothing to the others)")
    if votes["trained_afterwards"]:
        lines.append(f"{', '.join(votes['trained_afterwards'])}: trained on rows of the bank, without themselves, once the model was done")
    if "lambda" in votes:
        lines.append(f"mixture: {votes['lambda']:.2f} of the vote, {1 - votes['lambda']:.2f} of the linear head")
    if "neighbors" in votes:
        heard = ", ".join(f"{name} {count:.1f}" for name, count in votes["neighbors"].items() if count)
        lines.append(f"neighbors that are heard, on average: {heard}")
    if results["data"]["label_noise_rate"]:
        lines.append("training rows are counted against the labels they were trained with, the wrong ones too")
    return ["", *lines] if lines else []


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
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(13, 3.2), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    steps = [e["epoch"] for e in epochs]
    for name in epochs[0]["train"] if epochs else ():  # a line a term: a sum would be compared with the validation NLL
        loss.plot(steps, [e["train"].get(name, math.nan) for e in epochs], label=f"training, {name}")
    if epochs and epochs[0]["val"]:
        loss.plot(steps, [e["val"]["nll"] for e in epochs], color="black", label="validation NLL")
        accuracy.plot(steps, [100 * e["val"]["accuracy"] for e in epochs], color="tab:green", label="validation accuracy")
        best = max(epochs, key=lambda e: (e["val"]["accuracy"], -e["val"]["nll"]))
        for axes, value in ((loss, best["val"]["nll"]), (accuracy, 100 * best["val"]["accuracy"])):
            axes.plot(best["epoch"], value, "o", color="tab:red", label=f"best epoch, {best['epoch']}")
    loss.set(xlabel="epoch", ylabel="loss", yscale="log")
    for which in (loss.yaxis.set_major_formatter, loss.yaxis.set_minor_formatter):
        which(FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "125" else ""))
    accuracy.set(xlabel="epoch", ylabel="%")
    for axes in (loss, accuracy):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))  # beside the curves, never on them
    figure.savefig(path, dpi=110)
