"""How processes of an engine on simulated hosts wait for one another's messages."""

from typing import Any

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

_SPIN_S = 0.001
_POLL_MS = 500  # a message wakes a reader; this is for one whose subscription came a moment too late

_wait = SpinCondition.wait


def _sleeping(condition: Any, timeout_ms: int | None = None) -> None:
    """vLLM spins for a second after each message: probed every two seconds, an idle worker takes half a core.

    A TPU host has hundreds of cores; here two engines and the service share a laptop's.
    """
    condition.busy_loop_s = _SPIN_S
    _wait(condition, _POLL_MS if timeout_ms is None else min(timeout_ms, _POLL_MS))


def install() -> None:
    SpinCondition.wait = _sleeping
