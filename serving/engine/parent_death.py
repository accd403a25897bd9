"""An engine process dies with the process that started it, however that one ends.

vLLM loads this plugin in every process it starts. It asks the kernel to send SIGKILL to the EngineCore, a child of the
replica, when the replica is gone. With data parallelism the EngineCore forks schedulers once its chips are open: each
holds the chips too, and nothing ends it when the EngineCore is killed. The kernel's order is not inherited, so every
fork gives it anew. The workers are Ray actors of the EngineCore's job and end with it.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading

from serving.environment import OWNER

_PR_SET_PDEATHSIG = 1


def follow() -> None:
    """Tie this process to the replica, and its own forks to it, if the replica started it."""
    parent = multiprocessing.parent_process()
    if parent is None or str(parent.pid) != os.environ.get(OWNER) or sys.platform != "linux":
        return
    die_with(int(parent.pid or 0))
    _Forks().follow()


class _Forks:
    """Forks of this process's main thread: the kernel's signal comes when the thread that forked ends."""

    def __init__(self) -> None:
        self._parent = os.getpid()
        self._by_main_thread = False

    def follow(self) -> None:
        os.register_at_fork(before=self._note, after_in_child=self._tie)

    def _note(self) -> None:
        self._parent = os.getpid()
        self._by_main_thread = threading.current_thread() is threading.main_thread()

    def _tie(self) -> None:
        if self._by_main_thread:
            die_with(self._parent)


def die_with(parent: int) -> None:
    """End this process once the thread that started it has ended; `parent` is that thread's process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call
        os.kill(os.getpid(), signal.SIGKILL)
