"""For tests of comparisons: their runs are quick."""

from __future__ import annotations

import pytest

from experiments import command
from tests.experiments.comparing import modules_of


@pytest.fixture(autouse=True, scope="package")
def quick_runs():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "modules_of", modules_of)
        yield
