"""`python main.py probe`: test accuracy of a trained model when its attention is cut to K neighbors."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from explain.subject import make_folder, read_published, rows_of
from inputs import store
from models.probe import Count, KRow, accuracy_by_k
from run.directory import check_writable
from run.loaded import load
from run.saved import run_of
from training.checkpoint import find
from utils import BadOption, parse_whole_number, say


def run_probe(ks: str, checkpoint: str | None, pretrained: str, mode: str, output_dir: str | None, given: Mapping[str, Any]) -> list[KRow]:
    """Prints and plots accuracy against K, for a run of ours or a timm model with trained weights."""
    counts = parse_counts(ks)
    if checkpoint and "model" in given:
        raise BadOption("model", "is the checkpoint's own when --checkpoint is given", given["model"])
    if not checkpoint and not str(given.get("model", "")).startswith("timm/"):
        raise BadOption("checkpoint", "or --model timm/NAME must say what to probe")
    folder = Path(output_dir or (run_of(find(checkpoint)) if checkpoint else f"runs/{time.strftime('%Y%m%d-%H%M%S')}-probe"))
    check_writable(folder)
    probed = load(checkpoint, given) if checkpoint else read_published(given, pretrained)
    batches = ((batch.x, batch.target) for batch in rows_of(probed, "test").epoch())
    try:
        rows = accuracy_by_k(probed.model, batches, counts, mode, probed.device)
    except RuntimeError as error:  # the probe saw no attention that it could cut
        raise BadOption("checkpoint" if checkpoint else "model", f"can't be probed ({error})") from None
    text = table(rows, mode)
    print(text)
    make_folder(folder)
    store.write_json(folder / "probe.json", [dataclasses.asdict(row) for row in rows])
    draw(rows, folder / "probe.png")
    say(f"written to {folder / 'probe.json'} and {folder / 'probe.png'}")
    return rows


def parse_counts(text: str) -> list[Count]:
    words = [word.strip() for word in text.split(",")]
    try:
        return ["all" if word == "all" else parse_whole_number("K", word, 1) for word in words]
    except BadOption:
        raise BadOption("K", "must list whole numbers of at least 1, and 'all'", text) from None


def table(rows: list[KRow], mode: str) -> str:
    lines = [f"{'K':>6}{'accuracy':>12}{'as dense':>12}   ({mode}, {rows[0].rows:,} test rows)"]
    return "\n".join([*lines, *(f"{row.K:>6}{row.accuracy:>12.2%}{row.agreement:>12.2%}" for row in rows)])


def draw(rows: list[KRow], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 3.4), layout="constrained")
    axes = figure.subplots()
    numbers = sorted((row for row in rows if row.K != "all"), key=lambda row: row.K)
    axes.plot([row.K for row in numbers], [100 * row.accuracy for row in numbers], marker="o", label="top-K")
    for row in rows:
        if row.K == "all":
            axes.axhline(100 * row.accuracy, color="gray", linestyle="--", label="all tokens, as trained")
    axes.set(xlabel="neighbors a token reads (K)", ylabel="test accuracy, %", xscale="log")
    axes.set_xticks([row.K for row in numbers], [str(row.K) for row in numbers])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
