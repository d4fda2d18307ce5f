"""A plugin: a head that ends its process, or never comes back, in the middle of an epoch."""

import os
import signal
import time
from typing import Any

from torch import Tensor

from classifiers import HEADS, LinearHead
from ranks import here


def fail() -> None:
    raise ValueError("made to fail")


def hang() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # or the launcher would wait for half a minute, as it does for what really hangs
    time.sleep(100)


WAYS: dict[str, Any] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hangs": hang,
    "fails": fail,
    "nobody": lambda: None,
    "stopped": lambda: os.kill(os.getppid(), signal.SIGTERM),  # the launcher
}


@HEADS.register("lost")
class Lost(LinearHead):
    steps = 0

    def loss(self, features: Tensor, target: Tensor, index: Tensor) -> dict[str, Tensor]:
        self.steps += 1
        if self.steps == 9 and here().rank == here().world - 1:
            WAYS[os.environ.get("LOST", "stopped")]()
        return super().loss(features, target, index)
