"""For all tests: no more than two threads, so that numbers and times are alike wherever they run; what a run sets is set back."""

import gc
import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as main.py has it; read when torch loads
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start, too

import pytest
import torch

from evaluation import cost, curves

torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, torch.get_num_threads()))


@pytest.fixture(autouse=True)
def not_deterministic_for_others():
    """A run with --deterministic sets it for the whole process."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True, scope="session")
def not_synced():
    """What fsync is for, a loss of power, no test can make; waiting for the disk is a sixth of the time of a small run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: os.fstat(handle) and None)  # still of a file that is open
        yield


PICTURE = b"\x89PNG: a test that looks at curves.png says MEASURED = True"


@pytest.fixture(autouse=True, scope="module")
def not_measured_and_not_drawn(request):
    """Every run measures throughput for half a second and draws curves.png, a third of the time of a small one; here only for modules
    that ask for it (MEASURED = True)."""
    with pytest.MonkeyPatch.context() as patch:
        if not getattr(request.module, "MEASURED", False):
            patch.setattr(cost, "rows_per_second", lambda *_, **__: (1.0, 1.0, 1.0))
            patch.setattr(curves, "drawn_curves", lambda *_, **__: PICTURE)
        yield


LONGEST = ["test_alone.py", "test_readme.py", "test_compare.py", "test_run.py"]  # begun last, one would end long after all others


def pytest_collection_modifyitems(items):
    """A file goes to one worker (--dist loadfile), which makes what its tests share; in this order (--no-loadscope-reorder)."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def pytest_collection_finish():
    """Modules and tests stay to the end: the garbage collector need not look through their million objects again and again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()  # an end that leaves objects behind is one that extensions complain of
