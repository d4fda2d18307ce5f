"""`python main.py explain --what neighbors`: how neighbors vote, as a picture, a text and a record.

A query, its nearest training rows with their weights, and what the votes make of them; then the same for the most confident
mistakes of the test split, and what all its rows say about votes and accuracy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from explain.cases import Case, Votes, read_votes, short
from explain.draw_neighbors import draw_neighbors
from explain.subject import Picked, make_folder, name_of, pick_image, pixels_of, read_run, row_of
from inputs import store
from run.loaded import Loaded
from utils import parse_whole_number

SHOWN, MOST_SHOWN = 8, 100  # neighbors of a query
MISTAKES, MOST_MISTAKES = 4, 50


def neighbors(options: dict[str, Any]) -> None:
    """Those of one query, and those of the most confident mistakes of the test split."""
    shown = parse_whole_number("K", options.get("K", f"{SHOWN}"), 1, MOST_SHOWN)
    most = parse_whole_number("mistakes", options.get("mistakes", f"{MISTAKES}"), 0, MOST_MISTAKES)
    loaded, folder = read_run(options, tables=True)
    picked = pick_image(loaded, options["image"])
    votes = read_votes(loaded, options["checkpoint"])
    test, target = votes.retrieve_test(), votes.target
    probability, predicted = votes.predict(test).max(1)
    mistakes = (predicted != target).nonzero()[:, 0]
    mistakes = mistakes[probability[mistakes].argsort(descending=True, stable=True)]
    shown = min(shown, test.index.shape[1])

    def of_test(rows: list[int]) -> list[Case]:
        at = torch.tensor(rows, dtype=torch.long, device=target.device)
        return votes.cases(test.subset(at), [f"row {row} of the test split" for row in rows], rows, target[at].tolist(), shown)

    if picked.row is None:
        cases = votes.cases(votes.retrieve_image(picked), [picked.title], [None], [None], shown)
    else:
        cases = of_test([picked.row])
    cases += of_test(mistakes[:most].tolist()) if most and len(mistakes) else []
    tally = votes.tally(test, target, predicted)
    header = header_of(loaded, votes, picked) | {"shown": shown, "test": summary(tally, predicted == target, probability)}

    make_folder(folder)
    path = folder / f"explain-neighbors-{picked.name}.png"
    written = f"{path}, and beside it as .txt and .json"
    if loaded.data.kind == "table":
        written = f"{path.with_suffix('.txt')}, and beside it as .json; no picture: the rows of a table are no images"
    else:
        draw_neighbors(path, header, cases, [images_of(loaded, case, picked, shown) for case in cases], loaded.data.classes)
    text = report(header, cases, loaded.data.classes)
    path.with_suffix(".txt").write_text(text + "\n")
    records = [dataclasses.asdict(case) for case in cases]
    record = {**header, "classes": list(loaded.data.classes), "query": records[0], "mistakes": records[1:]}
    store.write_json(path.with_suffix(".json"), record)
    print(f"{text}\n\nwritten to {written}")


def images_of(loaded: Loaded, case: Case, picked: Picked, shown: int) -> list[np.ndarray]:
    """Pixels of the query and of its heaviest neighbors, as the model sees them."""
    query = picked.x if case.row is None else row_of(loaded, case.row)
    near = [row_of(loaded, neighbor.row, "train") for neighbor in case.neighbors[:shown]]
    return [pixels_of(loaded.data, x) for x in (query, *near)]


def header_of(loaded: Loaded, votes: Votes, picked: Picked) -> dict[str, Any]:
    """What stands above the picture and the text, and first in the record: whose votes these are."""
    return {
        "title": f"How neighbors vote: {loaded.config.head.head} on {name_of(loaded.data)}",
        "image": picked.title,
        "head": loaded.config.head.head,
        "weights": votes.name,
        "prediction": votes.own_name,
        "calibrated": votes.calibrated,
        "k": votes.k,
        "bank": len(votes.bank),
        "notes": votes.notes(),
    }


# ---------------------------------------------------------------- numbers


def summary(tally: dict[str, Tensor], right: Tensor, probability: Tensor) -> dict[str, Any]:
    """What the whole test split says: means, and how accuracy follows from agreement."""
    agreeing = tally["true"] / tally["neighbors"].clamp_min(1)  # of all neighbors
    groups = {"all": torch.ones_like(right), "right": right, "wrong": ~right}
    means = {
        name: {
            "rows": int(rows.sum()),
            "neighbors_true": mean(agreeing[rows]),
            "weight_true": mean(tally["weight"][rows]),
            "nearest_true": mean(tally["nearest"][rows]),
            "effective_neighbors": mean(tally["effective"][rows]),
        }
        for name, rows in groups.items()
    }
    steps = []
    for low, high in ranges(int(tally["neighbors"].max())):
        true, guess = ((low <= tally[name]) & (tally[name] <= high) for name in ("true", "predicted"))
        of_true = {"rows": int(true.sum()), "accuracy": mean(right[true])}
        of_guess = {"rows": int(guess.sum()), "accuracy": mean(right[guess]), "confidence": mean(probability[guess])}
        steps.append({"neighbors": [low, high], "true": of_true, "predicted": of_guess})
    return {"accuracy": mean(right), **means, "by_agreement": steps}


def mean(values: Tensor) -> float | None:
    return short(float(values.double().mean())) if len(values) else None


def ranges(k: int) -> list[tuple[int, int]]:
    """Numbers of neighbors, 0 to k: each alone where they are few, else none, quarters, and all."""
    if k <= 6:
        return [(n, n) for n in range(k + 1)]
    ends = [0, k // 4, k // 2, 3 * k // 4, k - 1, k]
    return [(0, 0), *((low + 1, high) for low, high in pairwise(ends))]


# ---------------------------------------------------------------- text


def report(header: dict[str, Any], cases: Sequence[Case], classes: Sequence[str]) -> str:
    """What a person reads."""
    test, shown = header["test"], header["shown"]
    lines = [header["title"], "", *(f"{note}." for note in header["notes"]), ""]
    lines += [f"{'':<39}{' of the true class ':-^29}{'effective':>12}"]
    lines += [f"{'test split':<28}{'rows':>8}{'neighbors':>12}{'weight':>10}{'nearest':>10}{'neighbors':>12}"]
    for name, what in (("all", "all"), ("right", "predicted right"), ("wrong", "predicted wrong")):
        of = test[name]
        parts = (of["neighbors_true"], of["weight_true"], of["nearest_true"])
        effective = "-" if of["effective_neighbors"] is None else f"{of['effective_neighbors']:.2f}"
        lines += [f"{what:<28}{of['rows']:>8,}{percent(parts[0]):>12}{percent(parts[1]):>10}{percent(parts[2]):>10}{effective:>12}"]
    lines += ["", f"{'':<28}{'of the true class':>20}{'of the predicted class':>34}"]
    lines += [f"{'neighbors, of ' + str(header['k']):<28}{'rows':>8}{'accuracy':>12}{'rows':>12}{'accuracy':>11}{'confidence':>12}"]
    for step in test["by_agreement"]:
        low, high = step["neighbors"]
        true, guess = step["true"], step["predicted"]
        cells = f"{guess['rows']:>12,}{percent(guess['accuracy']):>11}{percent(guess['confidence']):>12}"
        lines += [f"{f'{low}' if low == high else f'{low} to {high}':<28}{true['rows']:>8,}{percent(true['accuracy']):>12}{cells}"]
    lines += ["", "effective neighbors: exp(entropy of the weights)."]
    for i, case in enumerate(cases):
        if i == 1:
            lines += ["", f"---- the most confident of {test['wrong']['rows']:,} mistakes ({len(cases) - 1} shown)"]
        lines += ["", *of_case(case, shown, classes)]
    if len(cases) == 1 and not test["wrong"]["rows"]:
        lines += ["", "no mistakes in the test split"]
    return "\n".join(lines)


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def of_case(case: Case, shown: int, classes: Sequence[str]) -> list[str]:
    """One query: its heaviest neighbors, and its votes."""
    known = f"class {case.true}, " if case.true is not None else ""
    lines = [f"{case.image}: {known}predicted {case.predicted} ({case.probability:.1%})"]
    width = max(8, *(len(n.label) for n in case.neighbors[:shown]), *(len(classes[c]) for c in case.bars)) + 2
    lines += [f"  {'weight':>7}   {'label':<{width}}{'true class':<12}{'sq. distance':>12}{'training row':>14}"]
    for n in case.neighbors[:shown]:
        true = {True: "yes", False: "no", None: "-"}[n.true]
        lines += [f"  {n.weight:>7.2%}   {n.label:<{width}}{true:<12}{n.squared_distance:>12.4g}{n.row:>14}"]
    if rest := case.neighbors[shown:]:
        lines += [f"  {sum(n.weight for n in rest):>7.2%}   {f'{len(rest)} more':<{width}}"]
    lines += [f"  {'':>7}   {'':<{width}}" + "".join(f"{name:>15}" for name in case.votes)]
    for c in case.bars:
        lines += [f"  {'vote':>7}   {classes[c]:<{width}}" + "".join(f"{vote[c]:>15.1%}" for vote in case.votes.values())]
    return lines
