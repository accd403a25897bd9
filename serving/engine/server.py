"""What a slice replica asks of its engine, whichever it is: vLLM, or on simulated hosts one that only keeps its timing."""

from dataclasses import dataclass
from typing import Protocol


@dataclass
class Load:
    """What an engine has to do; `kv_usage` is a share of 1, `last_output_s` the monotonic time of its last token."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    last_output_s: float = 0.0


class EngineServer(Protocol):
    """One engine on one slice and the HTTP server in front of it. Lives in the replica's event loop."""

    port: int
    max_model_len: int

    @property
    def load(self) -> Load: ...

    @property
    def requests_open(self) -> int: ...

    async def start(self) -> None:
        """Load the model, open the HTTP server; raises EngineStartError."""

    async def probe(self) -> None:
        """Ask for a sign of life; raises what the engine raises."""

    async def died(self) -> str:
        """Wait until the engine is dead; returns how it was noticed."""

    async def drain(self) -> None:
        """Take no new connection, wait until requests are answered or drain_s is over, then end the engine."""

    def kill(self) -> None:
        """End the engine at once; requests in flight then end with an error."""
