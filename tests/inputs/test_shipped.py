"""Tables that ship with scikit-learn: as its own loaders give them, with its files and without."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn import datasets

from inputs import shipped


@pytest.mark.parametrize("name", list(shipped.FILES))
@pytest.mark.parametrize("there", [True, False], ids=["from its file", "by its loader"])
def test_as_scikit_learn_has_them(name: str, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not there:
        monkeypatch.setitem(shipped.FILES, name, "elsewhere.csv")
    found, wanted = shipped.read_shipped(name), getattr(datasets, f"load_{name}")()
    np.testing.assert_array_equal(found.data, wanted.data)
    np.testing.assert_array_equal(found.target, wanted.target)
    assert found.target.dtype == wanted.target.dtype
    assert found.names == (() if name == "digits" else tuple(map(str, wanted.target_names)))


def test_reading_them_does_not_import_it() -> None:
    code = "import sys; from inputs.shipped import read_shipped; read_shipped('digits'); sys.exit('sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent.parent, check=False).returncode == 0
