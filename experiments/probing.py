"""`python main.py probe`: test accuracy of a trained model when its attention is cut to K neighbors."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from config import Config
from experiments.building import batches, build, choose_device, complete, load_data, with_published_normalization
from experiments.folder import check_writable
from experiments.plugin import load_plugin
from experiments.run import Rebuilt, rebuild
from inputs import store
from inputs.batches import Batches
from models.probe import Count, KRow, accuracy_by_k
from utils import BadOption, say


def run_probe(ks: str, checkpoint: str | None, pretrained: str, mode: str, output_dir: str | None, given: Mapping[str, Any]) -> list[KRow]:
    """Prints and plots accuracy against K, for a run of ours or a timm model with trained weights."""
    counts = parse_counts(ks)
    if checkpoint and "model" in given:
        raise BadOption("model", "is the checkpoint's own when --checkpoint is given", given["model"])
    if not checkpoint and not str(given.get("model", "")).startswith("timm/"):
        raise BadOption("checkpoint", "or --model timm/NAME must say what to probe")
    folder = Path(output_dir or (checkpoint if checkpoint else f"runs/{time.strftime('%Y%m%d-%H%M%S')}-probe"))
    check_writable(folder if not folder.is_file() else folder.parent)
    probed = rebuild(checkpoint, given) if checkpoint else published(given, pretrained)
    test = batches(probed.config, probed.data, "test", probed.device)
    assert test is not None
    try:
        rows = accuracy_by_k(probed.model, pairs(test), counts, mode, probed.device)
    except RuntimeError as error:  # the probe saw no attention that it could cut
        raise BadOption("checkpoint" if checkpoint else "model", f"can't be probed ({error})") from None
    text = table(rows, mode)
    print(text)
    folder.mkdir(parents=True, exist_ok=True)
    store.write_json(folder / "probe.json", [dataclasses.asdict(row) for row in rows])
    draw(rows, folder / "probe.png")
    say(f"written to {folder / 'probe.json'} and {folder / 'probe.png'}")
    return rows


def parse_counts(text: str) -> list[Count]:
    counts: list[Count] = []
    for word in (w.strip() for w in text.split(",")):
        if word != "all" and not (word.isdigit() and int(word) > 0):
            raise BadOption("K", "must list whole numbers of at least 1, and 'all'", text)
        counts.append("all" if word == "all" else int(word))
    return counts


def published(given: Mapping[str, Any], pretrained: str) -> Rebuilt:
    """A timm model with its trained classifier. Random weights have nothing to tell, so the classes must be the weights' own."""
    load_plugin(given.get("plugin"))
    device = choose_device(given.get("device", "auto"))
    data = load_data(given)
    config: Config = complete({**given, "pretrained": pretrained}, data)
    model = build(config, data, device)
    if not hasattr(model.backbone, "classifier_weights"):
        raise BadOption("pretrained", f"must be weights with a classifier for the {data.num_classes} classes of {data.name}", pretrained)
    return Rebuilt(config, with_published_normalization(config, data), model, device, {}, None, None)


def pairs(test: Batches) -> Any:
    return ((batch.x, batch.target) for batch in test.epoch())


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
