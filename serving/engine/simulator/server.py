"""A simulated engine as the engine of a slice replica: same members, same port on worker 0, same way to die."""

import asyncio
import os
import socket

import uvicorn

from serving.engine.phases import REPLICA
from serving.engine.server import Load
from serving.engine.simulator.calibration import factors_for
from serving.engine.simulator.engine import Engine
from serving.engine.simulator.http import Api
from serving.engine.simulator.physics import Physics
from serving.engine.simulator.startup import Startup
from serving.planning import Plan
from serving.slices import board
from serving.slices.group import HeldSlice
from serving.slices.simulation import STARTUP


class SimulatorServer:
    """One simulated engine on one slice and the HTTP server in front of it."""

    def __init__(self, plan: Plan, held: HeldSlice, ray_address: str) -> None:
        self.port = 0
        self.max_model_len = plan.fit.max_model_len
        self._plan = plan
        self._held = held
        self._ray_address = ray_address
        self._engine = Engine(plan, Physics(plan, factors_for(plan)))
        self._server: uvicorn.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Go through the phases of a start, then open the HTTP server."""
        await self._go_through_phases(Startup.parse(os.environ.get(STARTUP, "")))
        listener = socket.create_server((self._held.hosts[0].ip, 0), backlog=2048)
        self.port = listener.getsockname()[1]
        self._server = uvicorn.Server(
            uvicorn.Config(
                Api(self._plan, self._engine).app(),
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_keep_alive=120,
                timeout_graceful_shutdown=max(1, round(self._plan.model.drain_s)),
            )
        )
        self._tasks = [
            asyncio.create_task(self._engine.run()),
            asyncio.create_task(self._server.serve(sockets=[listener])),
        ]

    @property
    def load(self) -> Load:
        scheduler = self._engine.scheduler
        return Load(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_usage=scheduler.pool.usage,
            last_output_s=self._engine.last_output_s,
        )

    async def probe(self) -> None:
        """Answered while the engine takes steps; raises SliceLostError once it is dead."""
        await self._engine.probe()

    async def died(self) -> str:
        """Wait until the engine is dead; returns why."""
        return await self._engine.died()

    async def drain(self) -> None:
        """Take no new connection, wait until requests are answered or drain_s is over, then end the engine."""
        if self._server:
            self._server.should_exit = True
            await self._tasks[1]
        self.kill()

    def kill(self) -> None:
        """End the engine at once; requests in flight then end with an error."""
        self._engine.die("the replica ended it")

    @property
    def requests_open(self) -> int:
        return len(self._server.server_state.tasks) if self._server else 0

    async def _go_through_phases(self, startup: Startup) -> None:
        """Told as a real engine tells them: the replica reads them off Ray's GCS."""
        phases = startup.phases()
        if not phases:
            return
        report = board.phase_writer(self._ray_address, os.environ[REPLICA])
        for name, seconds in phases:
            report(name)
            await asyncio.sleep(seconds)
