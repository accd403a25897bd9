"""OpenTelemetry's spans, set up as its standard environment says, or not at all.

On where OTEL_EXPORTER_OTLP_ENDPOINT (or ..._TRACES_ENDPOINT) names a collector, unless OTEL_SDK_DISABLED or
OTEL_TRACES_EXPORTER=none says otherwise. Off, nothing of OpenTelemetry is imported.
"""

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger("ray.serve")

# The W3C's two; only these go on to a slice.
HEADERS = ("traceparent", "tracestate")
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def endpoint(environment: Mapping[str, str] = os.environ) -> str | None:
    """Where spans go, for libraries that want it told; None where tracing is off."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if environment.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return None
    traces, base = (environment.get(name) for name in _ENDPOINTS)
    if traces or not base:
        return traces
    return base if protocol(environment) == "grpc" else base.rstrip("/") + "/v1/traces"


def protocol(environment: Mapping[str, str] = os.environ) -> str:
    """OpenTelemetry's default is HTTP."""
    return next((environment[name] for name in _PROTOCOLS if environment.get(name)), "http/protobuf")


def provider(service: str, attributes: Mapping[str, str]) -> "TracerProvider | None":
    """The provider of a process, or None where tracing is off. `service` stands where OTEL_SERVICE_NAME does not.

    Without the exporter's package it is off too, and the log says what to install.
    """
    if endpoint() is None:
        return None
    try:
        exporter = _exporter()
    except ImportError:
        logger.error(  # noqa: TRY400  the reason is the message
            "tracing is off: %s is set, but no exporter is installed; pip install tpu-serving[tracing]",
            next(name for name in _ENDPOINTS if os.environ.get(name)),
        )
        return None
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415  off costs nothing, not even the import
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": service}
    made = TracerProvider(resource=Resource.create({**named, **attributes}))
    made.add_span_processor(BatchSpanProcessor(exporter))
    return made


def _exporter() -> Any:
    if protocol() == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter  # noqa: PLC0415
    else:
        from opentelemetry.exporter.otlp.proto.http import trace_exporter  # type: ignore[no-redef]  # noqa: PLC0415
    return trace_exporter.OTLPSpanExporter()
