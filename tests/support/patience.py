"""An end to what would take for ever, in CPU time: other work on the machine does not count."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from support.servers import PATIENCE_S


@contextmanager
def ends() -> Iterator[None]:
    """Fails where this process computes for longer than a test's patience, which tells nothing of speed: inputs have to be
    so long that what grows with their square takes hours. In the main thread.
    """

    def over(_: int, __: FrameType | None) -> None:
        raise AssertionError(f"not done after {PATIENCE_S:.0f} s of computing")

    before = signal.signal(signal.SIGVTALRM, over)
    signal.setitimer(signal.ITIMER_VIRTUAL, PATIENCE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
