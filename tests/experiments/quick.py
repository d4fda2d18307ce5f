"""Loaded into the process that forks the runs of a comparison: none measures speed or draws curves, half of a small run."""

from evaluation import cost, curves

cost.rows_per_second = lambda *_, **__: (1.0, 1.0, 1.0)
curves.drawn_curves = lambda *_, **__: b"\x89PNG"
