"""Ctrl-C, and the signals that mean the same."""

import math
import signal
import time
from types import FrameType

# timeout(1) and terminals that close send two or three; ending a simulation takes seconds.
_SAME_WISH_S = 10.0


def end_on_signals() -> None:
    """Have SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt; what ends then is not interrupted by those that follow."""
    interrupt = _Interrupt()
    # SIGINT too: a shell starts background jobs with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)


class _Interrupt:
    def __init__(self) -> None:
        self._last_s = -math.inf

    def __call__(self, _signal: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._last_s >= _SAME_WISH_S:
            self._last_s = now
            raise KeyboardInterrupt
