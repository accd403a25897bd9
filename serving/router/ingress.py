"""A router replica of Serve: the router's core, wired to Ray."""

import asyncio
import logging
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve

from serving import tracing
from serving.config import Doors
from serving.metrics import agents
from serving.metrics.scrape import Scraper
from serving.router import direct_door, process, serve_door
from serving.router.core import Outputs, RouterCore, Served
from serving.router.http.auth import KeyFile
from serving.router.http.door import Relay
from serving.router.http.oidc import Oidc
from serving.router.store_loop import StoreLoop
from serving.router.telemetry.audit_log import AuditLog
from serving.router.telemetry.request_log import RequestLog
from serving.router.telemetry.spans import RequestSpans
from serving.slices import placement
from serving.slices.tpu_hosts import tpu_hosts
from serving.state.gcs import Store

logger = logging.getLogger("ray.serve")


@serve.ingress()
class Router:
    """One router replica."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        served: Served,
        *_slices: Any,
        store: Any = None,
    ) -> None:
        """`store`: the deployment that keeps files, batches and usage, if there is one; `_slices`: those of the slices.

        Serve runs them because they are bound here.
        """
        spec = served.router
        process.prepare()
        self._closing = AsyncExitStack()  # Serve ends a router that could not be made as it ends any other
        oidc = Oidc(spec.oidc) if spec.oidc else None
        keys = KeyFile.of(spec.keys_file, adds_up=store is not None, stored=spec.keys.stored, bearers=oidc)
        if oidc:
            await oidc.start()
            self._closing.push_async_callback(oidc.close)
        here = serve.get_replica_context()
        provider = tracing.provider("tpu-serving-router", {"service.instance.id": _process()})
        self._scraper = Scraper(
            here.app_name, lambda: asyncio.to_thread(agents.addresses), lambda: self._core.seen.slices
        )
        self._closing.push_async_callback(self._scraper.close)
        spans = RequestSpans(provider) if provider else None
        if spans:
            self._closing.push_async_callback(asyncio.to_thread, spans.close)
        self._core = RouterCore(
            served,
            keys,
            self._scraper.page,
            name=here.replica_tag,
            application=here.app_name,
            outputs=Outputs(
                log=RequestLog(_log_path("requests")) if spec.request_log else None,
                audit=AuditLog(_log_path("audit")),
                spans=spans,
            ),
            store=partial(_place, store) if store else None,
        )
        self._closing.push_async_callback(self._core.close)
        self._core.listen(ray.util.get_node_ip_address())
        records = Store(ray.get_runtime_context().gcs_address)
        self._loop = StoreLoop(
            self._core, records, placement.end_replica, hosts=lambda: tpu_hosts(ray.nodes())
        )
        self._closing.push_async_callback(self._loop.close)
        await self._loop.start()
        self._core.admission.refresh()
        refreshing = asyncio.create_task(self._core.admission.run())
        self._closing.callback(refreshing.cancel)
        if self._core.filler:
            filling = asyncio.create_task(self._core.filler.run())
            self._closing.push_async_callback(self._core.filler.close)
            self._closing.push_async_callback(asyncio.wait, [filling])
            self._closing.callback(filling.cancel)
        if self._core.usage:
            await self._core.usage.start()
            self._closing.push_async_callback(self._core.usage.close)
        shared = None
        if spec.door is Doors.DIRECT:
            shared = direct_door.bind(await asyncio.to_thread(placement.http_host), spec.direct_port)
            self._closing.callback(shared.close)
        admission = self._core.admission
        relay = Relay(self._core.relay, whose=admission.whose, delay_s=admission.delay_of_stranger_s)
        serve_door.install(relay, shared)
        if not keys.ring.required:
            await asyncio.to_thread(_warn_if_public)

    def reconfigure(self, settings: dict[str, Any]) -> None:
        """Take over what the YAML may change while a router runs; Serve calls this also after the start."""
        self._core.reconfigure(settings["slices"])

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve calls this once this replica is made. Serve puts the request's id on answers itself."""
        app = self._core.app(returns_id=False)
        process.settle()
        return app

    async def __del__(self) -> None:
        await self._closing.aclose()


def _log_path(name: str) -> Path:
    """A file per router process, beside the logs of Ray and Serve."""
    return placement.session_logs() / f"{name}-{_process()}.jsonl"


async def _place(store: Any) -> tuple[str, str]:
    address, token = await store.place.remote()
    return address, token


def _process() -> str:
    return str(ray.get_runtime_context().get_actor_id())


def _warn_if_public() -> None:
    host = placement.http_host()
    if host not in ("localhost", "::1") and not host.startswith("127."):
        logger.warning(
            "this service listens on %s and asks nobody for an API key; router.keys_file names a file of keys, "
            "`serving keys new NAME` makes one",
            host,
        )
