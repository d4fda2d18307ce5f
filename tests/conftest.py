"""For all tests: no more than two threads, so that numbers and times are alike wherever they run."""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as main.py has it; read when torch loads

import torch

torch.set_num_threads(min(2, torch.get_num_threads()))
