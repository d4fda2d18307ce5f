"""The compiled code of native/, or, where that folder is not there, what stands in for it and computes nothing."""

from __future__ import annotations

from typing import Any

from utils import say


class Absent:
    """Never available, so that nothing else of it is called."""

    MOST_RANKS = MOST_KEPT = 0

    def available(self) -> bool:
        return False

    def takes(self, *_: Any) -> bool:
        return False

    def processor(self) -> str:
        return ""


native: Any
try:
    import native
except ModuleNotFoundError:
    say("kernels: torch (native/ is not there)")
    native = Absent()
