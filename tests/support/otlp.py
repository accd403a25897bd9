"""An OpenTelemetry collector that keeps what it was sent."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from support.servers import asgi_server


class Collector:
    """Spans sent over OTLP/HTTP, by name."""

    def __init__(self) -> None:
        self.spans: list[Any] = []

    async def take(self, request: Request) -> Response:
        sent = ExportTraceServiceRequest.FromString(await request.body())
        for resource in sent.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return Response(b"", media_type="application/x-protobuf")

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> Any:
        (span,) = self.named(name)
        return span


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    """A collector that listens, and its address, as OTEL_EXPORTER_OTLP_ENDPOINT takes it."""
    made = Collector()
    with asgi_server(Starlette(routes=[Route("/v1/traces", made.take, methods=["POST"])])) as address:
        yield made, address


def said(span: Any) -> dict[str, Any]:
    """A span's attributes."""
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}
