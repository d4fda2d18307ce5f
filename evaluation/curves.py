"""The epochs of a run, for people: train_eval_results.txt and curves.png."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

from training.progress import METRICS, read_lines


def epochs_of(folder: Path, final: str, best_epoch: int) -> tuple[str, bytes]:
    """train_eval_results.txt, a line an epoch and the final table; and curves.png."""
    epochs = read_lines(folder / METRICS)
    lines = []
    for e in epochs:
        val = f"  val_accuracy {e['val']['accuracy']:.4f}  val_nll {e['val']['nll']:.4f}" if e["val"] else ""
        lines.append(f"epoch {e['epoch']}  loss {sum(e['train'].values()):.4f}{val}  lr {e['lr']:.3g}  seconds {e['seconds']:.1f}")
    return "\n".join([*lines, "", final]) + "\n", drawn_curves(epochs, best_epoch)


def drawn_curves(epochs: list[dict[str, Any]], best_epoch: int) -> bytes:
    from matplotlib.figure import Figure  # without pyplot: no display, no global state
    from matplotlib.ticker import FuncFormatter

    spread = [e["embeddings"] for e in epochs if "embeddings" in e]
    figure = Figure(figsize=(19 if spread else 13, 3.2), layout="constrained")
    loss, accuracy, *third = figure.subplots(1, 3 if spread else 2)
    steps = [e["epoch"] for e in epochs]
    for name in epochs[0]["train"] if epochs else ():  # a line a term: a sum would be compared with the validation NLL
        loss.plot(steps, [e["train"].get(name, math.nan) for e in epochs], label=f"training, {name}")
    if epochs and epochs[0]["val"]:
        loss.plot(steps, [e["val"]["nll"] for e in epochs], color="black", label="validation NLL")
        accuracy.plot(steps, [100 * e["val"]["accuracy"] for e in epochs], color="tab:green", label="validation accuracy")
        for best in (e for e in epochs if e["epoch"] == best_epoch):  # none where the lines before were lost
            for axes, value in ((loss, best["val"]["nll"]), (accuracy, 100 * best["val"]["accuracy"])):
                axes.plot(best_epoch, value, "o", color="tab:red", label=f"best epoch, {best_epoch}")
    loss.set(xlabel="epoch", ylabel="loss", yscale="log")
    for which in (loss.yaxis.set_major_formatter, loss.yaxis.set_minor_formatter):
        which(FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "125" else ""))
    accuracy.set(xlabel="epoch", ylabel="%")
    for axes in third:
        _draw_spread(axes, steps[-len(spread) :], spread)
    for axes in (loss, accuracy, *third):
        axes.grid(alpha=0.3)
        if axes.lines:
            # beside the curves, and beside the numbers of a right axis, never on them
            axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.12 if axes in third else 1, 1))
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110, format="png")
    return picture.getvalue()


def _draw_spread(axes: Any, steps: list[int], spread: list[dict[str, float]]) -> None:
    """Whether the embeddings in the bank stay apart: two measures, each on an axis of its own."""
    cosines = [s["cosine_between_classes"] for s in spread]
    axes.plot(steps, cosines, label="mean cosine of embeddings\nof different classes")
    axes.plot([], [], color="tab:orange", label="effective rank (right)")
    axes.set(xlabel="epoch", ylabel="cosine", ylim=(min(-0.1, *cosines, 0), 1.02))
    ranks = axes.twinx()
    effective = [s["effective_rank"] for s in spread]
    ranks.plot(steps, effective, color="tab:orange")
    ranks.set(ylim=(0, 1.05 * max(effective)))
