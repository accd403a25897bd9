"""What an engine is doing while it starts, read from its own log.

vLLM loads this plugin in every process it starts. On worker 0 of a slice it turns the log lines below into phases in
Ray's GCS. The replica's event loop is blocked meanwhile. Every process registers to write its stacks where it hangs.
"""

import logging
import os
from collections.abc import Callable

from serving.engine import compilation_watch, dead_grammars, grammar_time, stages
from serving.environment import REPLICA
from serving.slices import stacks
from serving.state.gcs import Store

# The beginnings of log lines of vLLM and tpu-inference 0.26.
_PHASES = (
    ("Initializing a V1 LLM engine", "starting workers"),
    ("Init worker", "loading weights"),
    ("Init kv-cache", "making the KV cache"),
    ("Precompile", "compiling"),
    ("Compiling", "compiling"),
)


def follow() -> None:
    """Register for stacks, tell a stage its addresses, bound the time of grammars, report compilations, and phases on worker 0 of a slice."""
    stacks.register()
    stages.install()
    grammar_time.install()
    dead_grammars.install()
    replica, address = os.environ.get(REPLICA), os.environ.get("RAY_ADDRESS")
    if not replica or not address:
        return
    store, worker = Store(address), os.environ.get("TPU_WORKER_ID", "0")
    compilation_watch.follow(lambda since: store.put_compiling(replica, f"{worker}-{os.getpid()}", since))
    if worker != "0":
        return
    handler = _Reporter(lambda phase: store.put_phase(replica, phase))
    for name in ("vllm", "tpu_inference"):
        logging.getLogger(name).addHandler(handler)


class _Reporter(logging.Handler):
    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._report = report
        self._last = ""

    def emit(self, record: logging.LogRecord) -> None:
        phase = phase_of(record.getMessage())
        if phase and phase != self._last:
            self._last = phase
            try:
                self._report(phase)
            except Exception:  # noqa: BLE001  a start must not fail for its progress report
                self.handleError(record)


def phase_of(message: str) -> str | None:
    """The phase that a log line begins, if any."""
    return next((phase for start, phase in _PHASES if message.startswith(start)), None)
