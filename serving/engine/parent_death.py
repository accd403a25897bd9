"""An engine process dies with the replica that started it, however that replica ends.

vLLM loads this plugin in every process it starts. It asks the kernel to send
SIGKILL to the EngineCore, a child of the replica, when the replica is gone. The workers are Ray actors of the EngineCore's job and end with it.
"""

import ctypes
import multiprocessing
import os
import signal
import sys

from serving.environment import OWNER

_PR_SET_PDEATHSIG = 1


def follow() -> None:
    """Tie this process to the replica, if the replica started it."""
    parent = multiprocessing.parent_process()
    if parent is None or str(parent.pid) != os.environ.get(OWNER) or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # the parent died before the call
        os.kill(os.getpid(), signal.SIGKILL)
