"""`python -m tests.experiments.comparing compare ...` is main.py, but runs of a comparison are quick."""

from __future__ import annotations

import sys

from main import main  # first: it says how libraries are to be loaded

# isort: split
from experiments import command

OF_PLAN = command.modules_of


def modules_of(plan: command.Plan) -> list[str]:
    return [*OF_PLAN(plan), "tests.experiments.quick"]


if __name__ == "__main__":
    command.modules_of = modules_of
    sys.exit(main(sys.argv[1:]))
