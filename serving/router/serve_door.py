"""Puts the router's door into the HTTP server that Ray Serve starts in a router replica.

Serve starts uvicorn around an ASGI app of its own, which makes two tasks, a proxy and some context managers for a request. The
door answers relayed requests before that, and counts them where Serve counts: Serve's draining waits for open requests. All
else on the port stays Serve's: health, draining, keep-alive, TLS. Only this module uses these private names:

- `ray.serve._private.replica.start_asgi_http_server`, which the replica calls once its user's class is made; its options
- of the replica: `_route_prefix`, `_shutting_down`, `_metrics_manager` with `inc_num_ongoing_requests`, `dec_num_ongoing_requests` and
  `record_request_metrics`
- `ray.serve._private.replica.RequestMetadata`, and `RequestProtocol.HTTP` of the same module

Every request goes through Serve's app, which is slower and otherwise the same, in two cases: where Ray lacks one of these names,
and where the service has Serve do something for each request (its timeout, its tracing, middlewares of a callback).
"""

import logging
import socket
from dataclasses import replace
from functools import partial
from typing import Any

import ray

from serving.errors import ConfigError
from serving.router.direct_door import share
from serving.router.http.door import Door, Relay

logger = logging.getLogger("ray.serve")

_START = "start_asgi_http_server"
# What Serve itself does for a request whose client asks for it by header. That an answer goes on though its client has gone
# (x-request-disconnect-disabled) is not a client's to ask: it would hold seats for nobody.
_SERVES_OWN = frozenset((b"x-request-timeout-seconds",))


def install(relay: Relay, shared: socket.socket | None = None) -> None:
    """Have the server that Serve is about to start in this process answer relayed requests as `relay` does, and tell Serve of them.

    It listens on `shared` too, where there is one (serving.router.direct_door). Raises ConfigError where Ray can't have it so.
    """
    from ray.serve._private import replica  # noqa: PLC0415  a replica has it loaded, and others need no Serve

    start = getattr(replica, _START, None)
    if start is None:
        if shared:
            raise ConfigError(
                f"router.door: Ray {ray.__version__} has no ray.serve._private.replica.{_START}, through which routers share a port; install "
                "ray[serve]==2.60.0, or leave router.door out"
            )
        _warn(f"ray.serve._private.replica has no {_START}")
        return

    async def start_with_door(app: Any, options: Any, **more: Any) -> Any:
        task, server = await start(app, options, **more)
        owner = app.__self__
        if shared:
            share(server, shared, lambda: getattr(owner, "_shutting_down", False))
        try:
            told = _telling(relay, replica, owner, options)
        except AttributeError as error:
            _warn(str(error))
        else:
            if told:
                # The server's task has not yet begun, and so not read it.
                server.config.http = partial(Door, told)
        return task, server

    setattr(replica, _START, start_with_door)


def _telling(relay: Relay, module: Any, owner: Any, options: Any) -> Relay | None:
    """`owner` is Serve's replica. None where Serve has to see every request; raises AttributeError where Ray has not what this needs."""
    if options.middlewares or options.request_timeout_s or module.is_tracing_enabled():
        logger.info("every request goes through Serve: it has a timeout, middlewares or tracing of Serve's")
        return None
    counts = owner._metrics_manager  # noqa: SLF001
    metadata = module.RequestMetadata(
        request_id="",
        internal_request_id="",
        is_streaming=True,
        is_direct_ingress=True,
        _request_protocol=module.RequestProtocol.HTTP,
    )
    prefix = (owner._route_prefix or "").rstrip("/")  # noqa: SLF001
    begins, ends, record = (
        counts.inc_num_ongoing_requests,
        counts.dec_num_ongoing_requests,
        counts.record_request_metrics,
    )

    def ended(path: str, seconds: float, error: BaseException | None) -> None:
        ends(metadata)
        record(
            route=prefix + path,
            latency_ms=1000 * seconds,
            is_error=error is not None,
            exception_type=type(error).__name__ if error else None,
        )

    return replace(
        relay,
        prefix=prefix,
        left_out=_SERVES_OWN,
        began=partial(begins, metadata),
        ended=ended,
        leaving=lambda: bool(owner._shutting_down),  # noqa: SLF001
    )


def _warn(why: str) -> None:
    logger.warning(
        "every request goes through Serve's own app, which takes several times the CPU: %s in Ray %s; install ray[serve]==2.60.0",
        why,
        ray.__version__,
    )
