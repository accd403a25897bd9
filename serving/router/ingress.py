"""A router replica of Serve: the HTTP surface over a table of slices that is kept from the board."""

import asyncio
import logging
import time
from collections import Counter
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve

from serving import tracing
from serving.config import RouterSpec
from serving.metrics.recorder import Recorder
from serving.planning import Plan
from serving.router.api import Api
from serving.router.gate import Gate
from serving.router.journal import Journal
from serving.router.keys import KeyFile
from serving.router.recent import Recent
from serving.router.relay import Relay
from serving.router.request_log import RequestLog
from serving.router.scrape import Scraper
from serving.router.spans import Spans
from serving.router.status import Status, status, told
from serving.router.table import SliceTable
from serving.router.window import Window
from serving.slices import agents, board, placement

logger = logging.getLogger("ray.serve")


@serve.ingress()
class Router:
    """One router replica: a table of slices kept from the board, and a relay."""

    async def __init__(self, plans: list[Plan], spec: RouterSpec, *_slices: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        """`_slices`: the deployments of the slices; that they are bound here is what makes Serve run them."""
        keys = KeyFile.of(spec.keys_file)
        self._plans = plans
        wanted: Counter[str] = Counter()
        shapes: dict[str, list[str]] = {}
        for plan in plans:  # one a pool
            wanted[plan.model.name] += plan.model.replicas.min
            shapes.setdefault(plan.model.name, []).append(str(plan.slice))
        self._table = SliceTable(
            wanted,
            {name: " or ".join(each) for name, each in shapes.items()},
            adapters={adapter: plan.model.name for plan in plans for adapter in plan.adapters},
            affinity=spec.affinity,
            routers=spec.replicas,
        )
        self._scaled = {plan.model.name for plan in plans if plan.model.replicas.scales}
        self._reader = board.Reader()
        self._relay = Relay(self._table, spec.failover)
        self._window = Window()
        self._entries: list[board.Entry] = []
        self._serving: set[str] = set()
        self._endings: set[asyncio.Task[None]] = set()
        self._demands: list[board.Demand] = []
        self._log = RequestLog(_log_path()) if spec.request_log else None
        self._recent = Recent()
        provider = tracing.provider("tpu-serving-router", {"service.instance.id": _name()})
        self._spans = Spans(provider) if provider else None
        self._journal = Journal(
            Recorder(),
            self._recent,
            *([self._log] if self._log else []),
            spans=self._spans,
            slos={plan.model.name: plan.model.slo for plan in plans},
            keep_content=spec.log_content,
        )
        self._replica = serve.get_replica_context().replica_tag
        self._beats = 0
        self._scraper = Scraper(lambda: asyncio.to_thread(agents.addresses), lambda: self._entries)
        self._gate = Gate(spec, plans, self._table, keys)
        self._decisions: list[board.Decision] = []
        await self._read_board()
        self._gate.beat()
        self._beating = asyncio.create_task(self._gate.run())
        if not keys.ring.required:
            await asyncio.to_thread(_warn_if_public)
        self._reading = asyncio.create_task(self._follow_board())

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve asks for the app once this replica is made."""
        return Api(
            self._plans,
            self._table,
            self._relay,
            self._gate,
            self._journal,
            self._status,
            self._scraper.page,
        ).app(returns_id=False)  # Serve does, around every app

    async def __del__(self) -> None:
        self._reading.cancel()
        self._beating.cancel()
        await self._relay.close()
        await self._scraper.close()
        if self._log:
            self._log.close()
        if self._spans:
            await asyncio.to_thread(self._spans.close)
        for plan in self._plans:
            await asyncio.to_thread(board.unwant, plan.model.name)
            await asyncio.to_thread(board.undemand, self._replica, plan.model.name)

    def _status(self) -> Status:
        wanted = self._table.wanted(time.monotonic())
        return status(self._entries, wanted, self._demands, told(self._decisions), self._window, time.time())

    async def _follow_board(self) -> None:
        while True:
            await asyncio.sleep(board.BEAT_S)
            try:
                await self._read_board()
            except Exception:
                # The table stays as it was: slices go on answering while the head restarts.
                logger.exception("the board can't be read; routing by the last view of it")

    async def _read_board(self) -> None:
        found, demands, ordered, self._decisions = await asyncio.to_thread(
            lambda: (board.read(), board.demands(), board.ordered(), board.decisions())
        )
        now_s = time.monotonic()
        entries, forgotten = self._reader.live(found, now_s)
        silent = [entry for entry in found if entry.replica in forgotten]
        alive, gone = self._reader.asking(demands, now_s)
        # What was ordered for a model stays on the board when its number is fixed.
        for model in self._scaled & ordered.keys():
            self._table.want(model, ordered[model])
        self._table.update(entries, now_s)
        self._entries, self._demands = entries, alive
        self._window.observe(entries, alive, now_s)
        self._relay.settle(entries)
        self._gate.others(self._demands, self._replica)
        serving = {entry.replica for entry in entries if entry.serves}
        if serving != self._serving:  # at once: the relay finds none where the gate still counts seats
            self._serving = serving
            self._gate.beat()
        self._beats += 1
        mine = [self._demand(model) for model in self._table.shapes]
        for entry in silent:
            ending = asyncio.create_task(self._end_if_silent(entry))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)
        await asyncio.to_thread(_write_board, self._table.wanted(now_s), mine, silent, gone)
        await asyncio.to_thread(self._tell, entries, mine, now_s)

    async def _end_if_silent(self, entry: board.Entry) -> None:
        """One that answers only can't write the board, as after a restart of the head: its engine is worth more."""
        if entry.address and not await self._relay.reaches(entry):
            logger.warning(
                "slice %s of %s neither beats nor answers: its replica ends", entry.slice, entry.model
            )
            await asyncio.to_thread(placement.end_replica, entry.deployment, entry.tag)

    def _demand(self, model: str) -> board.Demand:
        times = self._recent.percentiles(model)
        return board.Demand(self._replica, model, **self._gate.counts(model), **times, beat=self._beats)

    def _tell(self, entries: list[board.Entry], demands: list[board.Demand], now_s: float) -> None:
        self._journal.beat(entries, self._table.wanted(now_s), demands, self._relay.breaker.left_out(now_s))
        if self._log:
            self._log.flush()


def _log_path() -> Path:
    """Beside the logs of Ray and Serve, one file a router process."""
    session = Path(ray._private.worker.global_worker.node.get_session_dir_path())  # noqa: SLF001
    return session / "logs" / f"requests-{_name()}.jsonl"


def _name() -> str:
    return str(ray.get_runtime_context().get_actor_id())


def _warn_if_public() -> None:
    host = placement.http_host()
    if host not in ("localhost", "::1") and not host.startswith("127."):
        logger.warning(
            "this service listens on %s and asks nobody for an API key; router.keys_file names a file of keys, "
            "`serving keys NAME` makes one",
            host,
        )


def _write_board(
    wanted: list[board.Wanted],
    demands: list[board.Demand],
    silent: list[board.Entry],
    gone: list[board.Demand],
) -> None:
    """What this router says, less what others left behind that ended without a word."""
    for one in wanted:
        board.want(one)
    for demand in demands:
        board.demand(demand)
    for entry in silent:
        board.delete(entry.replica)
    for demand in gone:
        board.undemand(demand.router, demand.model)
