"""Ctrl-C, and the signals that mean the same."""

import math
import os
import signal
import time
from types import FrameType

# timeout(1) and terminals that close send two or three; ending a simulation takes seconds.
_SAME_WISH_S = 10.0
_INTERRUPTED = 130  # a shell's status of a command that SIGINT ended
# SIGINT too: a shell starts background jobs with SIGINT ignored.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end_at_once_on_signals() -> None:
    """Have a signal end the process with status 130: for imports, which print a KeyboardInterrupt or swallow it."""
    for number in _SIGNALS:
        signal.signal(number, lambda *_: os._exit(_INTERRUPTED))


def end_on_signals() -> None:
    """Have SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt; what ends then is not interrupted by those that follow."""
    interrupt = _Interrupt()
    for number in _SIGNALS:
        signal.signal(number, interrupt)


class _Interrupt:
    def __init__(self) -> None:
        self._last_s = -math.inf

    def __call__(self, _signal: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._last_s >= _SAME_WISH_S:
            self._last_s = now
            raise KeyboardInterrupt
