"""A simulated engine as the engine of a slice replica: same members, same port on worker 0, same way to die."""

import asyncio
import threading
import time

from serving import tracing
from serving.engine.late_programs import Late
from serving.engine.server import EngineSite, Load
from serving.errors import EngineStartError
from serving.http_server import HttpServer
from serving.planning import Plan
from serving.planning.checkpoints import folder_of
from serving.simulation import chips
from serving.simulation.engine.calibration import factors_for
from serving.simulation.engine.engine import Engine
from serving.simulation.engine.http import EngineApi
from serving.simulation.engine.physics import Physics
from serving.simulation.engine.spans import EngineSpans
from serving.simulation.engine.startup import Startup
from serving.slices.host_watch import first
from serving.slices.preflight import Needs
from serving.state.gcs import Store
from serving.state.records import WorkerStart


class SimulatorServer:
    """One simulated engine on one slice and the HTTP server in front of it."""

    def __init__(self, plan: Plan, site: EngineSite, startup: str = "") -> None:
        """`startup`: how long each phase of a start takes, as `Startup.parse` reads it."""
        self.max_model_len = plan.fit.max_model_len
        self._plan = plan
        self._site = site
        self._startup = startup
        self._engine = Engine(plan, Physics(plan, factors_for(plan)))
        provider = tracing.provider(
            "tpu-serving-engine", {"serving.slice": site.held.name, "serving.simulated": "true"}
        )
        self._spans = EngineSpans(provider) if provider else None
        self._http: HttpServer | None = None
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Go through the phases of a start, then open the HTTP server; raises EngineStartError."""
        _refuse_missing_tokenizer(self._plan)
        chips.hold()
        await self._go_through_phases(Startup.parse(self._startup))
        app = EngineApi(self._plan, self._engine, self._spans).app()
        self._http = HttpServer(app, self._site.held.hosts[0].ip, tls=self._site.tls)
        self._running = asyncio.create_task(self._engine.run())
        self._http.start()

    @property
    def http(self) -> HttpServer:
        assert self._http is not None  # noqa: S101  it has started
        return self._http

    @property
    def load(self) -> Load:
        scheduler = self._engine.scheduler
        return Load(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            reading=sum(
                request.first_token_s is None for request in (*scheduler.running, *scheduler.waiting)
            ),
            kv_usage=scheduler.pool.usage,
            last_output_s=self._engine.last_output_s,
            prompt_tokens=scheduler.totals.prompt_tokens,
            cached_tokens=scheduler.totals.cached_tokens,
            output_tokens=scheduler.totals.written_tokens,
            cache_age_s=self._engine.cache_age_s(time.monotonic()),
        )

    async def worker_starts(self) -> tuple[WorkerStart, ...]:
        """Nothing: it has neither workers nor devices."""
        return ()

    async def late_programs(self) -> Late:
        """What it was made to compile, on request of a fault."""
        return self._engine.compilations.serve()

    async def worker_died(self) -> str:
        """Waits for ever: the simulated engine has no worker processes."""
        await asyncio.Event().wait()
        raise AssertionError

    async def probe(self) -> None:
        """Returns while the engine takes steps; raises SliceLostError once it is dead."""
        await self._engine.probe()

    def needs(self) -> Needs:
        """Nothing: it has no weights and no process of its own."""
        return Needs()

    def processes(self) -> dict[str, dict[int, str]]:
        """None but the replica's own."""
        return {}

    def compiling_s(self) -> float | None:
        """For how long a step has been compiled, on request of a fault."""
        since_s = self._engine.compiling_since_s
        return None if since_s is None else time.monotonic() - since_s

    async def died(self) -> str:
        """Wait until the engine is dead, or its HTTP server has ended; returns which."""
        return await first(self._engine.died, self.http.ended)

    def kill(self) -> None:
        """End the engine at once; requests in flight then end with an error."""
        self._engine.die("the replica ended it")
        if self._spans:  # it may wait for a collector that is away, and an end does not
            threading.Thread(target=self._spans.close, daemon=True).start()

    @property
    def requests_open(self) -> int:
        return self._http.requests_open if self._http else 0

    async def _go_through_phases(self, startup: Startup) -> None:
        """Report phases as a real engine does: the replica reads them from Ray's GCS."""
        phases = startup.phases()
        if not phases:
            return
        store = Store(self._site.gcs_address)
        for name, seconds in phases:
            store.put_phase(self._site.replica, name)
            await asyncio.sleep(seconds)


def _refuse_missing_tokenizer(plan: Plan) -> None:
    """As vLLM does. Whether a folder is there only a host can see."""
    folder = str(plan.engine.get("tokenizer", ""))
    if folder.startswith("/") and not folder_of(folder):
        raise EngineStartError(
            f"{plan.model.name}: engine.tokenizer is {folder}, which is not on this host; mount it, or name one of Hugging Face's"
        )
