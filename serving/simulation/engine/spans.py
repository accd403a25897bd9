"""The simulated engine's span of a request: vLLM's own `llm_request`, under the router's, with vLLM's attributes."""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from serving import tracing
from serving.simulation.engine.engine import Stream

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


class EngineSpans:
    """Spans of one engine."""

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry import trace  # noqa: PLC0415  only where tracing is on
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

        self._kind = trace.SpanKind.SERVER
        self._provider = provider
        self._tracer = provider.get_tracer("vllm.llm_engine")
        self._context = TraceContextTextMapPropagator()

    def of(self, headers: Mapping[str, str], request_id: str) -> Callable[[Stream], None]:
        """Begin the span of a request; the function returned ends it."""
        parent = self._context.extract({name: headers[name] for name in tracing.HEADERS if name in headers})
        begun_ns, begun_s = time.time_ns(), time.monotonic()

        def end(stream: Stream) -> None:
            requests = [choice.request for choice in stream.choices]
            first_s = min(
                (request.first_token_s for request in requests if request.first_token_s), default=None
            )
            scheduled_s = min(
                (request.scheduled_s for request in requests if request.scheduled_s), default=None
            )
            attributes: dict[str, str | int | float] = {
                "gen_ai.request.id": request_id,
                "gen_ai.usage.prompt_tokens": len(requests[0].prompt) if requests else 0,
                "gen_ai.usage.completion_tokens": sum(request.written for request in requests),
                "gen_ai.latency.e2e": time.monotonic() - begun_s,
            }
            if first_s is not None and scheduled_s is not None:
                attributes["gen_ai.latency.time_in_queue"] = scheduled_s - begun_s
                attributes["gen_ai.latency.time_to_first_token"] = first_s - begun_s
            span = self._tracer.start_span(
                "llm_request", parent, self._kind, attributes=attributes, start_time=begun_ns
            )
            span.end()

        return end

    def close(self) -> None:
        """Send the spans that wait."""
        self._provider.shutdown()
