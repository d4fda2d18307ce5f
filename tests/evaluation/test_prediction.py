"""One prediction: what a classifier predicts for inputs is what its evaluation counted, in the run and after loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from config import Action
from evaluation.evaluator import Evaluator
from run.loaded import load
from run.prepare import prepare_loaded
from run.run import run
from tests.evaluation.test_evaluator import options


class Finished(NamedTuple):
    folder: Path
    results: dict[str, Any]
    evaluator: Evaluator  # of the run itself, not loaded
    x: Tensor  # of the test split


@pytest.fixture(scope="module", params=["linear", "attn-knn", "linear+knn"])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder, seen = tmp_path_factory.mktemp("runs") / "run", []
    evaluate = Evaluator.evaluate

    def watched(self: Evaluator) -> Any:
        seen.append(self)
        return evaluate(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluator, "evaluate", watched)
        results = run({**options(request.param), "output_dir": str(folder)}, Action())
    (evaluator,) = seen
    return Finished(folder, results, evaluator, torch.cat([batch.x for batch in evaluator.sets.test.epoch()]))


def test_predict_gives_what_the_evaluation_counted(finished: Finished) -> None:
    _, results, evaluator, x = finished
    classifier, own, target = evaluator.classifier, evaluator.predictors.own, evaluator.sets.test.target
    retrieved = evaluator.retrieve(evaluator.sets.test)
    columns = evaluator.variants([retrieved])
    for column, calibrated in (("raw", False), ("calibrated", True)):
        probs = classifier.predict(x, calibrated=calibrated)
        assert probs.shape == (31, 3)
        torch.testing.assert_close(probs, columns[column][own].exp(), atol=1e-6, rtol=1e-5)
        of_predictor = evaluator.predictors.log_probs(own, retrieved, calibrated=calibrated).exp()
        torch.testing.assert_close(probs, of_predictor, atol=1e-6, rtol=1e-5)
        found = results["predictors"]["scores"][own][column]
        assert found["accuracy"] == (probs.argmax(1) == target).double().mean().item()
        assert found["nll"] == pytest.approx(-probs[torch.arange(31), target].log().mean().item(), rel=1e-4)
    assert torch.equal(classifier.predict(x), classifier.predict(x, calibrated=True))
    assert (classifier.predict(x) - classifier.predict(x, calibrated=False)).abs().max() > 1e-4  # calibration did something


def test_raw_predictions_are_the_forward_pass(finished: Finished) -> None:
    classifier, x = finished.evaluator.classifier.eval(), finished.x
    with torch.no_grad():
        torch.testing.assert_close(classifier.predict(x, calibrated=False), classifier(x).exp(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("prepared", [False, True])
def test_a_loaded_run_predicts_the_same(prepared: bool, finished: Finished) -> None:
    loaded = load(str(finished.folder), {})
    if prepared:
        prepare_loaded(loaded)
    for calibrated in (False, True):
        wanted = finished.evaluator.classifier.predict(finished.x, calibrated=calibrated)
        assert torch.equal(loaded.model.predict(finished.x, calibrated=calibrated), wanted)


def test_one_row_is_predicted_as_it_is_among_others(finished: Finished) -> None:
    classifier, x = finished.evaluator.classifier, finished.x
    torch.testing.assert_close(classifier.predict(x[17:18]), classifier.predict(x)[17:18], atol=1e-6, rtol=1e-5)
