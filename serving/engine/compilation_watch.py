"""An engine that compiles a program tells so: it gives no token meanwhile, and is not hung.

tpu-inference compiles before it serves, but not all: encoders of pictures, or a step of a size that was left out, are compiled
when the first request needs them. `follow` watches JAX's own events in a process of the engine and tells the control store. A
replica reads that by its own clock: `Sights` says for how long it has seen each program being compiled, for hosts' clocks need
not agree.
"""

import threading
import time
from collections.abc import Callable, Mapping

from serving.timings import TIMINGS

COMPILED = "/jax/core/compile/backend_compile_duration"
# Stages of a program's way, of which JAX 0.10 tells the beginning as a scalar and the end as a duration (jax/_src/dispatch.py).
_STAGES = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    COMPILED,
)


class Compiles:
    """The programs that a process traces, lowers or compiles now, by thread."""

    def __init__(self) -> None:
        self._stages: dict[int, list[float]] = {}  # when those that go on began, the outermost first

    def begins(self, event: str, thread: int, now: float) -> None:
        """Take one of JAX's events; others than those of the stages mean nothing."""
        if event in _STAGES:
            self._stages.setdefault(thread, []).append(now)

    def ends(self, event: str, thread: int) -> None:
        if event in _STAGES and self._stages.get(thread):
            self._stages[thread].pop()

    def since(self) -> float | None:
        """When the oldest stage of those that go on has begun."""
        return min((began for stages in self._stages.copy().values() for began in stages[:1]), default=None)


class Sights:
    """Since when one reader has seen each process compile the same program."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, float]] = {}

    def longest_s(self, begun_s: Mapping[str, float], now_s: float) -> float | None:
        """For how long, by the reader's clock; None where nobody compiles. What a process tells only names its program."""
        known = self._seen
        self._seen = {
            process: known[process] if known.get(process, (None,))[0] == since else (since, now_s)
            for process, since in begun_s.items()
        }
        return max((now_s - first_s for _, first_s in self._seen.values()), default=None)


def heard_s(
    now_s: float, output_s: float, compiling_s: float | None, limit_s: float = TIMINGS.compile_s
) -> float:
    """Until when an engine has shown itself alive: by its last token at `output_s`, or by a program that it has been
    compiling for `compiling_s`, for at most `limit_s`.

    A token after that began says nothing: a step before it may still have been under way.
    """
    if compiling_s is None:
        return output_s
    return max(output_s, min(now_s, now_s - compiling_s + limit_s))


def follow(tell: Callable[[float | None], None]) -> None:
    """Tell since when this process compiles (seconds since 1970), and when it does so no more (None)."""
    import jax.monitoring  # noqa: PLC0415  only a process of an engine has JAX loaded anyway

    compiles = Compiles()
    jax.monitoring.register_scalar_listener(
        lambda event, _value, **_: compiles.begins(event, threading.get_ident(), time.monotonic())
    )
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _duration, **_: compiles.ends(event, threading.get_ident())
    )
    threading.Thread(target=_telling, args=(compiles, tell), name="compiling", daemon=True).start()


def _telling(compiles: Compiles, tell: Callable[[float | None], None]) -> None:
    """Compilations shorter than a look are not told of: a start has hundreds."""
    published_s: float | None = None
    while True:
        time.sleep(TIMINGS.compile_look_s)
        since = compiles.since()
        if since is not None and time.monotonic() - since < TIMINGS.compile_look_s:
            continue
        if since != published_s:
            try:
                tell(since)
            except Exception:  # noqa: BLE001, S112  the head restarts; told again at the next look
                continue
            published_s = since
