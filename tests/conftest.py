"""For all tests: no more than two threads, so that numbers and times are alike wherever they run."""

import torch

torch.set_num_threads(min(2, torch.get_num_threads()))
