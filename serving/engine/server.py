"""What a slice replica needs of an engine: of vLLM, or on simulated hosts of one that only keeps vLLM's timing.

And the HTTP server in front of either engine.
"""

import asyncio
import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import uvicorn

from serving import secret
from serving.engine.late_programs import Late
from serving.slices.held_slice import HeldSlice
from serving.slices.preflight import Needs
from serving.state.records import WorkerStart
from serving.strangers import GuardedHttp, Strangers

logger = logging.getLogger("ray.serve")

# Longer than a router keeps an idle connection, so that the router closes it.
_KEEP_ALIVE_S = 120


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
    """Where an engine runs: its slice, the placement group on it, Ray's address, and the replica that owns the engine."""

    held: HeldSlice
    group: Any
    gcs_address: str
    replica: str


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

    async def found(self) -> tuple[WorkerStart, ...]:
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


class HttpServer:
    """An engine's ASGI app on a free port of its host, served by a task of the running event loop.

    It asks for the cluster's secret, where there is one.
    """

    def __init__(self, app: Any, ip: str) -> None:
        ours = secret.of_this_process()
        if not ours and not ip.startswith("127."):
            logger.warning(
                "%s is not set: this slice's port on %s answers everybody who reaches it; `serving secret` makes one",
                secret.VARIABLE,
                ip,
            )
        self._listener = socket.create_server((ip, 0), backlog=2048)
        self.port: int = self._listener.getsockname()[1]
        self.uvicorn = uvicorn.Server(
            uvicorn.Config(
                secret.guarded(app, ours),
                # uvicorn's own config closes every handler, Serve's too; a restarted controller asks replicas for their log file.
                log_config=None,
                log_level="warning",
                interface="asgi3",
                access_log=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                http=partial(GuardedHttp, Strangers(), ours),  # type: ignore[arg-type]  # a class or what makes one
            )
        )
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._serving = asyncio.create_task(self.uvicorn.serve(sockets=[self._listener]))

    async def ended(self) -> str:
        """Wait until the server has ended."""
        assert self._serving is not None  # noqa: S101  `start` came first
        await asyncio.wait([self._serving])
        return "the engine's HTTP server has ended"

    @property
    def requests_open(self) -> int:
        return len(self.uvicorn.server_state.tasks)
