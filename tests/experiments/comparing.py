"""`python -m tests.experiments.comparing compare ...` is main.py, but runs of a comparison are quick.

It gives itself out as main.py, because the workers of a Ray cluster find modules beside the script that talks to it.
"""

from __future__ import annotations

import sys

import main  # first: it says how libraries are to be loaded

# isort: split
from experiments import command

OF_PLAN = command.modules_of


def modules_of(plan: command.Plan) -> list[str]:
    """No matplotlib, half a second to load: the runs draw nothing."""
    return [*(name for name in OF_PLAN(plan) if name != "matplotlib.pyplot"), "tests.experiments.quick"]


if __name__ == "__main__":
    command.modules_of = modules_of
    sys.argv[0] = main.__file__
    sys.exit(main.main(sys.argv[1:]))
