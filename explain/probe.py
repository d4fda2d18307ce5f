"""`python main.py probe`: test accuracy of a trained model when its attention is cut to K neighbors."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from explain.subject import make_folder, name_of, read_published, rows_of
from inputs import store
from models.probe import Count, KRow, accuracy_by_k
from run.directory import check_writable
from run.loaded import load
from run.saved import own_checkpoint, run_of
from utils import BadOption, parse_whole_number, say

Z = 1.959964  # of the normal distribution, 95 % within


def run_probe(ks: str, checkpoint: str | None, pretrained: str, mode: str, output_dir: str | None, given: Mapping[str, Any]) -> list[KRow]:
    """Prints and plots accuracy against K, for a run of ours or a timm model with trained weights."""
    counts = parse_counts(ks)
    if checkpoint and "model" in given:
        raise BadOption("model", "is the checkpoint's own when --checkpoint is given", given["model"])
    if not checkpoint and not str(given.get("model", "")).startswith("timm/"):
        raise BadOption("checkpoint", "or --model timm/NAME must say what to probe")
    folder = Path(output_dir or (run_of(own_checkpoint(checkpoint)) if checkpoint else f"runs/{time.strftime('%Y%m%d-%H%M%S')}-probe"))
    check_writable(folder)
    probed = load(checkpoint, given) if checkpoint else read_published(given, pretrained)
    batches = ((batch.x, batch.target) for batch in rows_of(probed, "test").epoch())
    try:
        rows = accuracy_by_k(probed.model, batches, counts, mode, probed.device)
    except RuntimeError as error:  # the probe saw no attention that it could cut
        raise BadOption("checkpoint" if checkpoint else "model", f"can't be probed ({error})") from None
    print(table(rows, mode))
    make_folder(folder, "probe.json", "probe.png")
    store.write_json(folder / "probe.json", [dataclasses.asdict(row) | {"interval": list(interval_of(row))} for row in rows])
    title = f"{probed.config.model.model} on {name_of(probed.data)}, {rows[0].rows:,} test rows"
    draw(rows, folder / "probe.png", title=title, mode=mode)
    say(f"written to {folder / 'probe.json'} and {folder / 'probe.png'}")
    return rows


def parse_counts(text: str) -> list[Count]:
    words = [word.strip() for word in text.split(",")]
    try:
        return ["all" if word == "all" else parse_whole_number("K", word, 1) for word in words]
    except BadOption:
        raise BadOption("K", "must list whole numbers of at least 1, and 'all'", text) from None


def interval_of(row: KRow) -> tuple[float, float]:
    """Wilson's 95 % interval of the accuracy: what other test rows of the same kind could have given."""
    n, z2 = row.rows, Z * Z
    middle = (row.accuracy + z2 / (2 * n)) / (1 + z2 / n)
    half = Z / (1 + z2 / n) * math.sqrt(row.accuracy * (1 - row.accuracy) / n + z2 / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def table(rows: list[KRow], mode: str) -> str:
    lines = [f"{'K':>6}{'accuracy':>12}{'95 % interval':>20}{'as dense':>12}   ({mode}, {rows[0].rows:,} test rows)"]
    for row in rows:
        low, high = interval_of(row)
        lines += [f"{row.K:>6}{row.accuracy:>12.2%}{f'{low:.2%} to {high:.2%}':>20}{row.agreement:>12.2%}"]
    return "\n".join(lines)


def draw(rows: list[KRow], path: Path, *, title: str = "", mode: str = "topk") -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 3.9), layout="constrained")
    axes = figure.subplots()
    numbers = sorted((row for row in rows if row.K != "all"), key=lambda row: row.K)
    if numbers:
        ends = [[abs(end - row.accuracy) * 100 for row in numbers for end in interval_of(row)[side : side + 1]] for side in (0, 1)]
        label = "the K largest" if mode == "topk" else "the K largest, with the weights they have among all"
        axes.errorbar([row.K for row in numbers], [100 * row.accuracy for row in numbers], yerr=ends, marker="o", capsize=3, label=label)
    for row in rows:
        if row.K == "all":
            low, high = interval_of(row)
            axes.axhline(100 * row.accuracy, color="0.35", linestyle="--", label="all tokens, as trained")
            axes.axhspan(100 * low, 100 * high, color="0.35", alpha=0.12, linewidth=0)
    axes.set(xlabel="tokens that a token reads (K)", ylabel="test accuracy, %", xscale="log")
    if numbers:
        axes.set_xticks([row.K for row in numbers], [str(row.K) for row in numbers])
    else:
        axes.set_xticks([])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.set_title(f"Accuracy when attention is cut to K tokens\n{title}", fontsize=10, loc="left", parse_math=False)
    legend = "95 % intervals over test rows (Wilson); the same rows for every K"
    axes.legend(frameon=False, fontsize=8.5, title=legend, title_fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    figure.savefig(path, dpi=150)
