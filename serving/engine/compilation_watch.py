"""An engine that compiles a program tells so: it gives no token meanwhile, and is not hung.

tpu-inference compiles before it serves, but not all: encoders of pictures, or a step of a size that was left out, are compiled
when the first request needs them. `Compiles` and `heard_s` decide, on times that they are given; `follow` watches JAX's own
events in a process of the engine and tells the control store.
"""

import threading
import time
from collections.abc import Callable

from serving.timings import TIMINGS

# JAX 0.10 tells when a program has been lowered, which its compilation follows, and when it has been compiled
# (jax/_src/interpreters/pxla.py).
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
COMPILED = "/jax/core/compile/backend_compile_duration"


class Compiles:
    """The programs that a process compiles now, one a thread at most."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def on(self, event: str, thread: int, now: float) -> None:
        """Take one of JAX's events; others than the two above mean nothing."""
        if event == _LOWERED:
            self._since[thread] = now
        elif event == COMPILED:
            self._since.pop(thread, None)

    def since(self) -> float | None:
        """When the oldest compilation of those that go on has begun."""
        return min(self._since.copy().values(), default=None)


def heard_s(
    now_s: float, output_s: float, compiling_s: float | None, limit_s: float = TIMINGS.compile_s
) -> float:
    """Until when an engine has shown itself alive: by its last token at `output_s`, or by a program that it has been
    compiling for `compiling_s`, for at most `limit_s`.

    A compilation that began before the last token is one whose end was not told: JAX had the program already.
    """
    if compiling_s is None or now_s - compiling_s < output_s:
        return output_s
    return min(now_s, now_s - compiling_s + limit_s)


def follow(tell: Callable[[float | None], None]) -> None:
    """Tell since when this process compiles (seconds since 1970), and when it does so no more (None)."""
    import jax.monitoring  # noqa: PLC0415  only a process of an engine has JAX loaded anyway

    compiles = Compiles()
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _duration, **_: compiles.on(event, threading.get_ident(), time.time())
    )
    threading.Thread(target=_telling, args=(compiles, tell), name="compiling", daemon=True).start()


def _telling(compiles: Compiles, tell: Callable[[float | None], None]) -> None:
    """Compilations shorter than a look are not told of: a start has hundreds."""
    told: float | None = None
    while True:
        time.sleep(TIMINGS.compile_look_s)
        since = compiles.since()
        if since is not None and time.time() - since < TIMINGS.compile_look_s:
            continue
        if since != told:
            try:
                tell(since)
            except Exception:  # noqa: BLE001, S112  the head restarts; told again at the next look
                continue
            told = since
