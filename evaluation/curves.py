"""The epochs of a run, for people: train_eval_results.txt and curves.png."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inputs.rows import short_name
from training.epochs import METRICS, read_lines


def epochs_of(folder: Path, final: str, best_epoch: int, *, title: str = "", rule: str = "") -> tuple[str, bytes]:
    """train_eval_results.txt, a line an epoch and the final table; and curves.png. `rule`: how the best epoch was chosen."""
    epochs = read_lines(folder / METRICS)
    lines = []
    for e in epochs:
        val = f"  val_accuracy {e['val']['accuracy']:.4f}  val_nll {e['val']['nll']:.4f}" if e["val"] else ""
        lines.append(f"epoch {e['epoch']}  loss {sum(e['train'].values()):.4f}{val}  lr {e['lr']:.3g}  seconds {e['seconds']:.1f}")
    return "\n".join([*lines, "", final]) + "\n", drawn_curves(epochs, best_epoch, title=title, rule=rule)


def title_of(config: Mapping[str, Any]) -> str:
    """A run in a line; `config`: its options that have an effect."""
    model = " with ".join(str(config[name]) for name in ("model", "layer") if name in config)
    return f"{short_name(config['dataset'])}: {model}, head {config['head']}, seed {config['seed']}"


def drawn_curves(epochs: list[dict[str, Any]], best_epoch: int, *, title: str = "", rule: str = "") -> bytes:
    from matplotlib.figure import Figure  # without pyplot: no display, no global state
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    spread = [e["embeddings"] for e in epochs if "embeddings" in e]
    figure = Figure(figsize=(13.5 if spread else 9, 3.9), layout="constrained")
    loss, accuracy, *third = figure.subplots(1, 3 if spread else 2, gridspec_kw={"wspace": 0.12})
    steps = [e["epoch"] for e in epochs]
    for name in epochs[0]["train"] if epochs else ():  # a line a term: a sum would be compared with the validation NLL
        loss.plot(steps, [e["train"].get(name, math.nan) for e in epochs], label=f"training, {name}")
    validated = bool(epochs and epochs[0]["val"])
    if validated:
        loss.plot(steps, [e["val"]["nll"] for e in epochs], color="black", label="validation NLL")
        accuracy.plot(steps, [100 * e["val"]["accuracy"] for e in epochs], color="tab:green", label="validation accuracy")
        for best in (e for e in epochs if e["epoch"] == best_epoch):  # none where the lines before were lost
            for axes, value in ((loss, best["val"]["nll"]), (accuracy, 100 * best["val"]["accuracy"])):
                axes.plot(best_epoch, value, "o", color="tab:red", label=f"epoch {best_epoch}, chosen")
    else:
        accuracy.text(0.5, 0.5, "no validation rows", ha="center", transform=accuracy.transAxes, color="0.4")
    loss.set(title="loss", ylabel="loss (log scale)", yscale="log")
    for which in (loss.yaxis.set_major_formatter, loss.yaxis.set_minor_formatter):
        which(FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "125" else ""))
    accuracy.set(title="accuracy", ylabel="validation accuracy, %")
    for axes in third:
        _draw_spread(axes, steps[-len(spread) :], spread)
    for axes in (loss, accuracy, *third):
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
        if steps:
            room = max(0.3, 0.02 * steps[-1])
            axes.set_xlim(steps[0] - room, steps[-1] + room)
        axes.grid(alpha=0.3)
        if axes.lines:  # below the numbers of the axis, never on a curve
            axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, fontsize=8, columnspacing=1.0)
    chosen = f"epoch {best_epoch} of {steps[-1]} was chosen{f': {rule}' if rule else ''}" if steps else ""
    figure.suptitle("\n".join(line for line in (title, chosen) if line), fontsize=11, parse_math=False)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=130, format="png")
    return picture.getvalue()


def _draw_spread(axes: Any, steps: list[int], spread: list[dict[str, float]]) -> None:
    """Whether the embeddings in the bank stay apart: two measures, each on an axis of its own."""
    cosines = [s["cosine_between_classes"] for s in spread]
    axes.plot(steps, cosines, label="cosine between classes")
    axes.plot([], [], color="tab:orange", label="effective rank (right)")
    axes.set(title="spread of the embeddings", ylabel="mean cosine", ylim=(min(-0.1, *cosines, 0), 1.02))
    ranks = axes.twinx()
    effective = [s["effective_rank"] for s in spread]
    ranks.plot(steps, effective, color="tab:orange")
    ranks.set(ylabel="effective rank", ylim=(0, 1.05 * max(effective)))
