"""Metrics from kept predictions: those of classifiers/metrics.py, also of rows that count several times; and their bootstrap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evaluation.evaluator import scores
from evaluation.predictions import keep
from experiments.bootstrap import estimated, row_samples
from experiments.metrics import METRICS, Answers
from experiments.read import answers, kept
from experiments.statistics import crossed
from tests.experiments.made import finished, labels, log_probs
from utils import BadOption

ROWS = 131


def predictions(seed: int = 0, classes: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """With many equal confidences, and a class that never occurs."""
    generator = torch.Generator().manual_seed(seed)
    votes = torch.randint(0, 4, (ROWS, classes), generator=generator).double() + 0.01
    return (votes / votes.sum(1, keepdim=True)).log(), torch.randint(0, classes - 1, (ROWS,), generator=generator)


def as_kept(folder: Path, log_probs: torch.Tensor, target: torch.Tensor, **more: Any) -> Answers:
    folder.mkdir(exist_ok=True)
    keep(folder, {"raw": {"linear": log_probs}}, target, own="linear", test_rows="rows", **more)
    return answers(folder, "linear.raw")


@pytest.mark.parametrize("name", METRICS)
def test_the_same_numbers_as_in_results_json(name: str, tmp_path: Path) -> None:
    log_probs, target = predictions()
    expected = scores(log_probs.float(), target)[name]
    assert METRICS[name].of(as_kept(tmp_path, log_probs, target)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", [n for n, m in METRICS.items() if m.samples])
def test_a_weight_is_a_row_that_is_there_as_often(name: str, tmp_path: Path) -> None:
    log_probs, target = predictions(1)
    weights = np.random.default_rng(2).multinomial(ROWS, np.full(ROWS, 1 / ROWS), size=5).astype(float)
    of_samples = METRICS[name].samples
    assert of_samples is not None
    found = of_samples(as_kept(tmp_path, log_probs, target))(weights)
    for i, weight in enumerate(weights):
        again = torch.arange(ROWS).repeat_interleave(torch.tensor(weight).long())
        assert found[i] == pytest.approx(scores(log_probs.float()[again], target[again])[name], abs=1e-6)


@pytest.mark.parametrize("name", METRICS)
def test_of_very_many_classes_the_largest_do(name: str, tmp_path: Path) -> None:
    """In half precision: to three digits. NOTE: votes that tie at the edges of bins may move, so these are of no votes."""
    generator = torch.Generator().manual_seed(3)
    log_probs = (3 * torch.randn(ROWS, 40, generator=generator)).log_softmax(1)
    target = torch.randint(0, 40, (ROWS,), generator=generator)
    found = METRICS[name].of(as_kept(tmp_path, log_probs, target, most=10))
    assert found == pytest.approx(METRICS[name].of(as_kept(tmp_path / "all", log_probs, target)), rel=5e-3, abs=2e-3)


# ---------------------------------------------------------------- what is kept, and what is not


def test_the_heads_own_predictor_unless_another_is_asked_for(tmp_path: Path) -> None:
    label = labels(9)
    found = kept(finished(tmp_path / "run", {"linear": log_probs([True] * 9, label), "uniform": log_probs([False] * 9, label)}, label))
    assert found.source("", calibrated=True) == "linear.calibrated"
    assert found.source("uniform", calibrated=False) == "uniform.raw"
    assert found.source("uniform.calibrated", calibrated=False) == "uniform.calibrated"
    with pytest.raises(BadOption, match=r"within must name predictors .* \(did you mean 'uniform.raw'\?\), got 'uniforn.raw'"):
        found.source("uniforn.raw", calibrated=False)


def test_runs_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=r"predictions.safetensors that can be read.*FileNotFoundError"):
        kept(tmp_path)
    (tmp_path / "predictions.safetensors").write_bytes(b"\x08" + bytes(40))
    with pytest.raises(BadOption, match=r"predictions\.safetensors"):
        kept(tmp_path)


# ---------------------------------------------------------------- the bootstrap


def test_of_a_mean_the_bootstrap_finds_the_closed_form() -> None:
    s, n = 4, 90
    draw = np.random.default_rng(0).normal
    d = 0.2 + 0.1 * draw(size=(s, 1)) + 0.5 * draw(size=(1, n)) + draw(size=(s, n))
    means = [lambda weights, one=one: weights @ one / n for one in d]
    found, exact = estimated(d.mean(1), row_samples(means, n, samples=4000), n), crossed(d)
    assert found.mean == pytest.approx(exact.mean)
    assert found.spread.seed == pytest.approx(exact.spread.seed)
    assert found.spread.row == pytest.approx(exact.spread.row, rel=0.06)
    assert found.spread.residual == pytest.approx(exact.spread.residual, rel=0.12)
    assert found.df == pytest.approx(exact.df, rel=0.1)


def test_an_interval_ends_where_the_metric_does() -> None:
    """Two seeds that differ by 10 points: t with 1 degree of freedom is 12.7, so the interval were 0.9 +- 0.64."""
    rows = np.repeat([[0.85], [0.95]], 100, axis=1)
    low, high = crossed(rows).interval()
    assert (low, high) == pytest.approx((0.9 - 12.7062 * 0.05, 0.9 + 12.7062 * 0.05), abs=1e-4)
    assert METRICS["accuracy"].interval(crossed(rows)) == (low, 1.0)
    assert METRICS["nll"].interval(crossed(rows)) == (low, high)
    assert METRICS["nll"].interval(crossed(rows - 0.8))[0] == 0.0


def test_samples_are_the_same_in_chunks_and_every_time() -> None:
    def mean(weights: np.ndarray) -> np.ndarray:
        return weights @ np.arange(11.0)

    whole = row_samples([mean], 11, samples=20)
    assert np.array_equal(whole, row_samples([mean], 11, samples=20, numbers=33))
    assert whole.std() > 0


def test_intervals_of_calibration_errors_hold_the_truth() -> None:
    """Two arms whose confidence differs, three seeds: drawing seeds and taking percentiles holds it in .83 of cases, this in .95."""
    rng, s, n, trials = np.random.default_rng(5), 3, 200, 250
    of_samples = METRICS["ece"].samples
    assert of_samples is not None

    def functions() -> list:
        easy, made = 1.2 + 1.5 * rng.normal(size=n), []
        for sharpness in (1.0, 1.4):
            for _ in range(s):
                z = easy + 0.3 * rng.normal() + 0.5 * rng.normal(size=n)
                confidence = 1 / (1 + np.exp(-2 * sharpness * np.abs(z)))
                zero = np.zeros(n)
                made.append(of_samples(Answers(np.ones(n, int), (z > 0).astype(int), confidence, zero, zero, zero, 2)))
        return made

    def difference(values: np.ndarray) -> np.ndarray:
        return values[..., :s] - values[..., s:]

    once = np.ones((1, n))
    truth = np.mean([difference(np.array([f(once)[0] for f in functions()])) for _ in range(2000)])
    held, drawn = 0, 0
    for _ in range(trials):
        made = functions()
        value, sample = difference(np.array([f(once)[0] for f in made])), difference(row_samples(made, n, samples=150))
        low, high = estimated(value, sample, n).interval()
        held += low <= truth <= high
        of_drawn = np.take_along_axis(sample, rng.integers(s, size=sample.shape), 1).mean(1)
        low, high = np.quantile(of_drawn, (0.025, 0.975))
        drawn += low <= truth <= high
    assert held / trials >= 0.92
    assert drawn < held
