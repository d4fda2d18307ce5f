"""How neighbors vote: `python main.py explain --what neighbors`.

A query, its nearest training rows with their weights, and what the votes make of them; then the same for the most confident
mistakes of the test split, and what all its rows say about votes and accuracy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from classifiers.calibration import opinions
from classifiers.knn import NeighborHead
from classifiers.voters import BLOCK, HeadVoter, Mixture, NeighborVoter, Questions, Voter
from experiments import pictures
from experiments.explain import KINDS, Picked, make, name_of, pick_image, pixels_of, read_run, row_of
from experiments.measuring import Judge
from experiments.run import Rebuilt, judge_of
from inputs import store
from train_eval import autocast
from training import checkpoint
from utils import BadOption

SHOWN, MOST_SHOWN = 8, 100  # neighbors of a query
MISTAKES, MOST_MISTAKES = 4, 50
BARS, MOST_CLASSES = 12, 8  # in the chart of a query: the classes times the votes, but for classes that must be there


@dataclass(frozen=True)
class Neighbor:
    row: int  # of the training split
    label: str  # as the bank has it: with --label_noise, what the run was told
    true: bool | None  # the query's class? None: nobody knows that
    weight: float
    squared_distance: float


@dataclass(frozen=True)
class Case:
    """A query, all its neighbors with the heaviest first, and what each vote makes of them."""

    image: str
    row: int | None  # of the test split
    true: str | None
    predicted: str
    probability: float
    neighbors: list[Neighbor]
    votes: dict[str, list[float]]  # by name, a probability for each class; "prediction" is the model's own
    bars: list[int]  # classes worth a bar, the likeliest first


# ---------------------------------------------------------------- who votes


class Voters:
    """The voter whose output counts as the model's, and the vote over neighbors that it makes, or that was compared with it."""

    def __init__(self, judge: Judge) -> None:
        panel = judge.panel
        voters = panel.calibrated if judge.calibrated else panel.raw
        own, uniform = voters[panel.main].eval(), panel.raw["uniform"].eval()
        knn = own.knn if isinstance(own, Mixture) else voters["attention"].eval() if isinstance(own, HeadVoter) else own
        assert isinstance(own, Voter)
        assert isinstance(uniform, NeighborVoter)
        assert isinstance(knn, NeighborVoter)
        self.own, self.uniform, self.knn, self.classes = own, uniform, knn, judge.data.classes
        self.name = knn.name

    @torch.no_grad()
    def predict(self, questions: Questions) -> Tensor:
        """The model's own probabilities, (N, C)."""
        return self.own.settle(opinions(self.own, questions), questions.facts).exp()

    @torch.no_grad()
    def cases(
        self,
        questions: Questions,
        titles: Sequence[str],
        rows: Sequence[int | None],
        truth: Sequence[int | None],
        shown: int = SHOWN,
    ) -> list[Case]:
        """A few queries in full; `shown` neighbors of each will be seen."""
        query, prediction = questions.at(slice(None)), self.predict(questions)
        near, weights = query.neighbors, self.knn.weights(query)
        votes = {self.name: self.knn.count(weights, query)}
        if self.name != "uniform":
            votes["uniform"] = self.uniform.opinion(query)
        if isinstance(self.own, Mixture):
            linear = self.own.linear
            votes["linear"] = linear.settle(linear.opinion(query), query.facts).exp()
        votes["prediction"] = prediction
        # Stable: of equal weights the nearer comes first.
        order = weights.masked_fill(~near.mask, -1).argsort(dim=1, descending=True, stable=True)
        found = []
        for i, true in enumerate(truth):
            parts = (part[i, order[i]].tolist() for part in (near.index, near.label, weights, near.distance))
            there = [four for four in zip(*parts, strict=True) if four[0] >= 0]
            of_classes = {name: vote[i].cpu() for name, vote in votes.items()}
            found.append(
                Case(
                    image=titles[i],
                    row=rows[i],
                    true=None if true is None else self.classes[true],
                    predicted=self.classes[int(prediction[i].argmax())],
                    probability=short(float(prediction[i].max())),
                    neighbors=[
                        Neighbor(n, self.classes[label], None if true is None else label == true, short(weight), short(distance))
                        for n, label, weight, distance in there
                    ],
                    votes={name: [short(p) for p in vote.tolist()] for name, vote in of_classes.items()},
                    bars=worth_a_bar(torch.stack(list(of_classes.values())), true, [label for _, label, _, _ in there[:shown]]),
                )
            )
        return found

    @torch.no_grad()
    def tally(self, questions: Questions, target: Tensor, predicted: Tensor) -> dict[str, Tensor]:
        """Of each row: its neighbors, how many are of its true and of its predicted class, what weight the true class has, and the
        number of neighbors that the weights speak of (exp of their entropy)."""
        found: dict[str, list[Tensor]] = {name: [] for name in ("neighbors", "true", "predicted", "weight", "nearest", "effective")}
        for query, truth, guess in zip(questions.blocks(), target.split(BLOCK), predicted.split(BLOCK), strict=True):
            near = query.neighbors
            true = (near.label == truth[:, None]) & near.mask
            found["neighbors"].append(near.mask.sum(1))
            found["true"].append(true.sum(1))
            found["predicted"].append(((near.label == guess[:, None]) & near.mask).sum(1))
            weights = self.knn.weights(query)
            found["weight"].append((weights * true).sum(1))
            found["effective"].append(torch.special.entr(weights).sum(1).exp())
            found["nearest"].append(true[:, 0])
        return {name: torch.cat(parts).double() for name, parts in found.items()}


def short(value: float) -> float:
    """The digits that a float32 has."""
    return float(f"{value:.7g}")


def worth_a_bar(votes: Tensor, true: int | None, near: Sequence[int] = ()) -> list[int]:
    """Of (votes, C), the prediction last: the predicted and the true class, those of the neighbors that are seen, the heaviest first,
    and what else any vote thinks likely."""
    prediction, likely = votes[-1], votes.amax(0).argsort(descending=True, stable=True).tolist()
    must = dict.fromkeys([int(prediction.argmax()), *([] if true is None else [true]), *near])
    count = max(BARS // len(votes), min(len(must), MOST_CLASSES))
    chosen = list(must | dict.fromkeys(likely))[:count]
    return sorted(chosen, key=lambda c: (-float(prediction[c]), c))


def judge_with_bank(rebuilt: Rebuilt, named: str) -> Judge:
    """The run's panel, over the bank that it was evaluated with."""
    if rebuilt.compared is None and not isinstance(rebuilt.model.head, NeighborHead):
        rule = "must hold a bank: of a head that looks at neighbors, or of a finished run whose votes were compared (--compare_votes)"
        raise BadOption("checkpoint", rule, named)
    if rebuilt.data.summary["sha256"] != rebuilt.facts["data"]["sha256"]:  # the bank knows its rows by their numbers
        raise BadOption("checkpoint", "needs the rows that the run was trained on, and the data set has changed since", named)
    source = checkpoint.find(named)
    return judge_of(rebuilt, source.parent.parent if source.parent.name == "checkpoints" else source)


@torch.no_grad()
def asked(judge: Judge, picked: Picked) -> Questions:
    """An image of one's own as a query."""
    assert judge.asker is not None
    with autocast(picked.x.device, judge.config.use_amp):
        features = judge.model.backbone(picked.x).float()
    return judge.asker.ask(features)


# ---------------------------------------------------------------- --what neighbors


@KINDS.register("neighbors")
def neighbors(options: dict[str, Any]) -> None:
    """How neighbors vote: those of one query, and those of the most confident mistakes of the test split."""
    shown = number(options, "K", SHOWN, 1, MOST_SHOWN)
    most = number(options, "mistakes", MISTAKES, 0, MOST_MISTAKES)
    rebuilt, folder = read_run(options, tables=True)
    picked = pick_image(rebuilt, options["image"])
    judge = judge_with_bank(rebuilt, options["checkpoint"])
    voters, test, target = Voters(judge), judge.ask(judge.sets.test), judge.sets.test.target
    probability, predicted = voters.predict(test).max(1)
    mistakes = (predicted != target).nonzero()[:, 0]
    mistakes = mistakes[probability[mistakes].argsort(descending=True, stable=True)]

    shown = min(shown, test.index.shape[1])

    def of_test(rows: list[int]) -> list[Case]:
        at = torch.tensor(rows, dtype=torch.long, device=target.device)
        return voters.cases(test.subset(at), [f"row {row} of the test split" for row in rows], rows, target[at].tolist(), shown)

    first = voters.cases(asked(judge, picked), [picked.title], [None], [None], shown) if picked.row is None else of_test([picked.row])
    cases = first + (of_test(mistakes[:most].tolist()) if most and len(mistakes) else [])
    tally = voters.tally(test, target, predicted)
    facts = facts_of(judge, voters, picked) | {"shown": shown, "test": summary(tally, predicted == target, probability)}
    make(folder)
    path = folder / f"explain-neighbors-{picked.name}.png"
    written = f"{path}, and beside it as .txt and .json"
    if rebuilt.data.kind == "table":
        written = f"{path.with_suffix('.txt')}, and beside it as .json; no picture: the rows of a table are no images"
    else:
        images = [images_of(rebuilt, case, picked, shown) for case in cases]
        pictures.draw_gallery(path, facts, cases, images, rebuilt.data.classes)
    text = report(facts, cases, rebuilt.data.classes)
    path.with_suffix(".txt").write_text(text + "\n")
    records = [dataclasses.asdict(case) for case in cases]
    record = {**facts, "classes": list(rebuilt.data.classes), "query": records[0], "mistakes": records[1:]}
    store.write_json(path.with_suffix(".json"), record)
    print(f"{text}\n\nwritten to {written}")


def number(options: dict[str, Any], name: str, default: int, least: int, most: int) -> int:
    text = str(options.get(name, default))
    if not text.isdecimal() or not least <= int(text) <= most:
        raise BadOption(name, f"must be a whole number from {least} to {most} with --what neighbors", text)
    return int(text)


def images_of(rebuilt: Rebuilt, case: Case, picked: Picked, shown: int) -> list[np.ndarray]:
    """Pixels of the query and of its heaviest neighbors, as the model sees them."""
    query = picked.x if case.row is None else row_of(rebuilt, case.row)
    near = [row_of(rebuilt, neighbor.row, "train") for neighbor in case.neighbors[:shown]]
    return [pixels_of(rebuilt.data, x) for x in (query, *near)]


# ---------------------------------------------------------------- numbers


def facts_of(judge: Judge, voters: Voters, picked: Picked) -> dict[str, Any]:
    """Whose votes these are, and what a reader has to know of them."""
    assert judge.asker is not None
    assert judge.asker.bank is not None
    config, k, rows = judge.config, judge.asker.k, len(judge.asker.bank)
    own, knn = voters.own, voters.knn
    notes = [f"{config.head}: {voters.name} weighs the {k} nearest of {rows:,} training rows ({judge.asker.bank.dim} dimensions)"]
    how = "calibrated on the validation rows" if judge.calibrated else "as trained"
    if isinstance(own, HeadVoter):
        notes += [f"the prediction is the {config.head} head's alone, {how}; the votes over its features have no part in it"]
    elif isinstance(own, Mixture):
        notes += [f"the prediction is {float(own.share):.0%} of the neighbors' vote and {1 - float(own.share):.0%} of linear's, {how}"]
    else:
        prior = "a prior mixed in and " if knn.prior is not None else ""
        notes += [f"the prediction is the {voters.name} vote with {prior}a temperature, {how}"]
    if knn.ensemble:
        notes += [f"votes are the mean of those of the nearest {', '.join(map(str, knn.ensemble))}; weights are those among {k}"]
    if knn.adaptive:
        notes += ["adaptive k: of each query's neighbors, only as many have weight as its attention speaks of"]
    if knn.values is not None:
        notes += ["values are learned: what a neighbor says follows from its label and from where it lies"]
    if config.tta > 1:
        notes += [f"images are seen in one view; the run's scores are of {config.tta}"]
    if noise := judge.data.summary["label_noise_rate"]:
        notes += [f"neighbors have the labels that the run was told; {noise:.0%} of them were changed (--label_noise)"]
    return {
        "title": f"How neighbors vote: {config.head} on {name_of(judge.data)}",
        "image": picked.title,
        "head": config.head,
        "weights": voters.name,
        "prediction": judge.panel.main,
        "calibrated": judge.calibrated,
        "k": k,
        "bank": rows,
        "notes": notes,
    }


def summary(tally: dict[str, Tensor], right: Tensor, probability: Tensor) -> dict[str, Any]:
    """What the whole test split says: means, and how accuracy follows from agreement."""
    share = tally["true"] / tally["neighbors"].clamp_min(1)
    groups = {"all": torch.ones_like(right), "right": right, "wrong": ~right}
    means = {
        name: {
            "rows": int(rows.sum()),
            "neighbors_true": mean(share[rows]),
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


def report(facts: dict[str, Any], cases: Sequence[Case], classes: Sequence[str]) -> str:
    """What a person reads."""
    test, shown = facts["test"], facts["shown"]
    lines = [facts["title"], "", *(f"{note}." for note in facts["notes"]), ""]
    lines += [f"{'':<39}{' of the true class ':-^29}{'effective':>12}"]
    lines += [f"{'test split':<28}{'rows':>8}{'neighbors':>12}{'weight':>10}{'nearest':>10}{'neighbors':>12}"]
    for name, what in (("all", "all"), ("right", "predicted right"), ("wrong", "predicted wrong")):
        of = test[name]
        parts = (of["neighbors_true"], of["weight_true"], of["nearest_true"])
        effective = "-" if of["effective_neighbors"] is None else f"{of['effective_neighbors']:.2f}"
        lines += [f"{what:<28}{of['rows']:>8,}{percent(parts[0]):>12}{percent(parts[1]):>10}{percent(parts[2]):>10}{effective:>12}"]
    lines += ["", f"{'':<28}{'of the true class':>20}{'of the predicted class':>34}"]
    lines += [f"{'neighbors, of ' + str(facts['k']):<28}{'rows':>8}{'accuracy':>12}{'rows':>12}{'accuracy':>11}{'confidence':>12}"]
    for step in test["by_agreement"]:
        low, high = step["neighbors"]
        true, guess = step["true"], step["predicted"]
        cells = f"{guess['rows']:>12,}{percent(guess['accuracy']):>11}{percent(guess['confidence']):>12}"
        lines += [f"{f'{low}' if low == high else f'{low} to {high}':<28}{true['rows']:>8,}{percent(true['accuracy']):>12}{cells}"]
    lines += ["", "effective neighbors: as many as the weights speak of, exp of their entropy."]
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
