"""What a slice replica needs of an engine: of vLLM, or on simulated hosts of one that only keeps vLLM's timing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from serving.engine.late_programs import Late
from serving.http_server import HttpServer
from serving.slices.held_slice import HeldSlice
from serving.slices.preflight import Needs
from serving.state.records import WorkerStart


@dataclass
class Load:
    """An engine's load now, and its totals since its start.

    `reading`: requests, running or waiting, that have no token yet. `kv_usage` is a share of 1, `last_output_s` the monotonic
    time of its last token. Of `prompt_tokens`, `cached_tokens` came from the prefix cache, which has dropped what it was last
    asked for `cache_age_s` ago and earlier; 0 where it has dropped nothing yet. `finished` requests
    have ended.
    """

    running: int = 0
    waiting: int = 0
    reading: int = 0
    kv_usage: float = 0.0
    last_output_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    cache_age_s: float = 0.0


@dataclass(frozen=True)
class EngineSite:
    """Where an engine runs: its slice, the placement group on it, Ray's address, and the replica that owns the engine.

    `tls`: whether its port speaks TLS from the start.
    """

    held: HeldSlice
    group: Any
    gcs_address: str
    replica: str
    tls: bool = False


class EngineServer(Protocol):
    """One engine on one slice and the HTTP server in front of it. Lives in the replica's event loop."""

    max_model_len: int

    @property
    def http(self) -> HttpServer:
        """The HTTP server of an engine that has started."""

    @property
    def load(self) -> Load: ...

    @property
    def requests_open(self) -> int: ...

    async def start(self) -> None:
        """Load the model, open the HTTP server; raises EngineStartError."""

    async def worker_starts(self) -> tuple[WorkerStart, ...]:
        """What the workers of a started engine find, by rank; empty of an engine without devices."""

    async def late_programs(self) -> Late:
        """What was compiled since the first call, which is made before the engine serves."""

    async def worker_died(self) -> str:
        """Wait until a process that the start needs is dead; returns which. Called from another thread's loop."""

    async def probe(self) -> None:
        """Ask for a sign of life; raises what the engine raises."""

    def compiling_s(self) -> float | None:
        """For how long the engine has been seen to compile a program; None where it does not. Blocks."""

    async def died(self) -> str:
        """Wait until the engine or its HTTP server has ended by itself; returns which."""

    def needs(self) -> Needs:
        """What the engine needs of each host before it starts."""

    def processes(self) -> Mapping[str, Mapping[int, str]]:
        """The processes that a started engine needs: by Ray's node id, each process's name by its pid."""

    def kill(self) -> None:
        """End the engine at once; requests in flight then end with an error."""
