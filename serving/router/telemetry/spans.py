"""A request as OpenTelemetry spans, by the semantic conventions for generative AI.

The root span starts with the request, so that the slice gets its context. The child spans are made when the request is
over, from the record's times.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from serving import tracing
from serving.router.http.routes import ROUTES
from serving.router.telemetry.record import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_NS = 1_000_000_000
_NO_ROUTE = "POST"  # the name of a span whose path is none of ours: strangers choose it


class RequestSpans:
    """Starts and ends the spans of requests."""

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry import trace  # noqa: PLC0415  only where tracing is on
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

        self._otel = trace
        self._provider = provider
        self._tracer = provider.get_tracer("serving.router")
        self._context = TraceContextTextMapPropagator()

    def begin(self, record: RequestRecord, headers: Mapping[str, str]) -> None:
        """Start the root span, under the client's span where the client sent one."""
        parent = self._context.extract({name: headers[name] for name in tracing.HEADERS if name in headers})
        name = record.path if record.path in ROUTES else _NO_ROUTE
        span = self._tracer.start_span(
            name, parent, self._otel.SpanKind.SERVER, start_time=round(record.arrived_at * _NS)
        )
        carried: dict[str, str] = {}
        self._context.inject(carried, self._otel.set_span_in_context(span))
        record.span, record.carried = span, carried
        record.trace_id = format(span.get_span_context().trace_id, "032x")

    def end(self, record: RequestRecord) -> None:
        """Make the child spans and end the root span."""
        span = record.span
        if span.is_recording():
            route = ROUTES.get(record.path)
            operation = route.operation if route else None
            if route:
                span.update_name(f"{operation or route.path} {record.model}")
            span.set_attributes(_attributes(record, operation))
            if _broken(record):
                span.set_status(self._otel.StatusCode.ERROR, record.code or record.outcome)
            self._children(record, self._otel.set_span_in_context(span))
        span.end(_at(record, record.ended_s))

    def close(self) -> None:
        """Send the spans that wait."""
        self._provider.shutdown()

    def _children(self, record: RequestRecord, under: Any) -> None:
        first_lease_s = record.leases[0].at_s if record.leases else record.ended_s
        admitted_s = record.admitted_s or first_lease_s
        self._child("admission", under, record, record.arrived_s, admitted_s, {"queued_s": record.queued_s})
        if not record.leases:
            return
        self._child("choose slice", under, record, admitted_s, first_lease_s, {})
        # The last byte may be an earlier slice's: the last slice then gave none, and its span lasts until the end.
        last_s = record.last_s if record.last_s >= record.leases[-1].at_s else record.ended_s
        ends = [lease.at_s for lease in record.leases[1:]] + [last_s]
        for number, (lease, end_s) in enumerate(zip(record.leases, ends, strict=True)):
            kind = "continuation" if record.first_s and lease.at_s > record.first_s else "lease"
            attributes = {"slice": lease.slice, "pool": lease.pool, "attempt": number + 1}
            span = self._child(kind, under, record, lease.at_s, end_s, attributes)
            if lease.at_s <= record.first_s <= end_s:
                span.add_event("first token", timestamp=_at(record, record.first_s))
            span.end(_at(record, end_s))

    def _child(
        self,
        name: str,
        under: Any,
        record: RequestRecord,
        begin_s: float,
        end_s: float,
        attributes: Mapping[str, Any],
    ) -> Any:
        """A span between two times of the record. A lease's span is not ended: it may still get an event."""
        span = self._tracer.start_span(name, under, start_time=_at(record, begin_s))
        span.set_attributes(
            {f"serving.{key}": value for key, value in attributes.items() if value not in ("", None)}
        )
        if name in {"admission", "choose slice"}:
            span.end(_at(record, end_s))
        return span


def _broken(record: RequestRecord) -> bool:
    """By the HTTP conventions a server's span is no error where the client is at fault."""
    clients = HTTPStatus.BAD_REQUEST <= record.status < HTTPStatus.INTERNAL_SERVER_ERROR
    return record.outcome not in {"ok", "cancelled"} and not clients


def _attributes(record: RequestRecord, operation: str | None) -> dict[str, Any]:
    """Attributes by the semantic conventions (gen_ai.*, http.*); serving.* where those lack a name."""
    attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "tpu-serving",
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model if record.leases else None,
        "gen_ai.request.stream": record.streamed,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "gen_ai.response.time_to_first_chunk": record.first_s - record.arrived_s if record.first_s else None,
        "http.request.method": "POST",
        "http.route": record.path if record.path in ROUTES else None,
        "http.response.status_code": int(record.status) or int(HTTPStatus.INTERNAL_SERVER_ERROR),
        "error.type": record.code or (record.outcome if record.outcome != "ok" else None),
        "serving.request_id": record.request_id,
        "serving.key": record.key,
        "serving.outcome": record.outcome,
        "serving.slice": record.slice or None,
        "serving.retries": record.retries,
        "serving.continuations": record.continuations,
        "serving.preemptions": record.preemptions,
        "serving.paused_s": record.paused_s or None,
    }
    return {key: value for key, value in attributes.items() if value is not None}


def _at(record: RequestRecord, moment_s: float) -> int:
    """A monotonic time as calendar time, in nanoseconds."""
    return round((record.arrived_at + moment_s - record.arrived_s) * _NS)
