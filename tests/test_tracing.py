import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import httpx
import pytest
from fastapi import FastAPI
from support import simulated_engine
from support.otlp import Collector, collecting, said
from support.servers import PATIENCE_S, asgi_server, free_address

from serving import tracing
from serving.config import FailoverSpec, RouterSpec
from serving.errors import BadRequestError, OverloadedError, RateLimitError, ServingError, SliceLostError
from serving.metrics.recorder import Recorder
from serving.router.admission.controller import AdmissionController
from serving.router.forwarding.dispatch import Dispatcher
from serving.router.http.api import Api
from serving.router.http.auth import KeyFile
from serving.router.scheduling.slice_table import SliceTable
from serving.router.telemetry.journal import Journal
from serving.router.telemetry.record import RequestRecord
from serving.router.telemetry.spans import RequestSpans
from serving.simulation.engine import spans as engine_spans
from serving.state.records import SliceRecord, SliceState

pytestmark = pytest.mark.http

CHAT = "/v1/chat/completions"
PARENT = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as (made, address):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        yield made


def router_spans() -> RequestSpans:
    provider = tracing.provider("router", {})
    assert provider
    return RequestSpans(provider)


@contextmanager
def router(upstream: str, spans: RequestSpans | None) -> Iterator[str]:
    """The router's surface in front of these slices, without Ray."""
    plan = simulated_engine.small_plan()
    table = SliceTable({plan.model.name: 1}, {plan.model.name: str(plan.slice)})
    entry = SliceRecord(
        "a", plan.model.name, SliceState.SERVING, "", "v6e", slice="slice-0", address=upstream
    )
    table.update([entry], 0.0)

    async def nothing() -> str:
        return ""

    @asynccontextmanager
    async def lifespan(outer: FastAPI) -> AsyncIterator[None]:
        relay = Dispatcher(table, FailoverSpec(retries=1, wait_s=0.2))
        journal = Journal(Recorder("default"), spans=spans)
        gate = AdmissionController(RouterSpec(), [plan], table, KeyFile(None))
        outer.mount("/", Api([plan], table, relay, gate, journal, lambda: None, nothing).app())  # type: ignore[arg-type,return-value]
        yield
        await relay.close()

    with asgi_server(FastAPI(lifespan=lifespan)) as address:
        yield address


def ask(address: str, **headers: str) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True}
    body["stream_options"] = {"include_usage": True}
    return httpx.post(address + CHAT, json=body, headers=headers, timeout=PATIENCE_S)


def test_one_trace_goes_from_the_client_through_the_router_to_the_engine(collector: Collector) -> None:
    spans = router_spans()
    provider = tracing.provider("engine", {})
    assert provider
    of_engine = engine_spans.EngineSpans(provider)
    with simulated_engine.serving(spans=of_engine) as (engine, _), router(engine, spans) as address:
        assert ask(address, traceparent=f"00-{PARENT}-00f067aa0ba902b7-01").is_success
    spans.close()
    of_engine.close()
    root, engine_span = collector.one("chat llama"), collector.one("llm_request")
    assert {span.trace_id.hex() for span in collector.spans} == {PARENT}
    assert root.parent_span_id.hex() == "00f067aa0ba902b7"
    assert engine_span.parent_span_id == root.span_id
    for name in ("admission", "choose slice", "lease"):
        child = collector.one(name)
        assert child.parent_span_id == root.span_id
        assert root.start_time_unix_nano <= child.start_time_unix_nano <= child.end_time_unix_nano
        assert child.end_time_unix_nano <= root.end_time_unix_nano
    assert [event.name for event in collector.one("lease").events] == ["first token"]
    assert said(engine_span)["gen_ai.usage.completion_tokens"] == 4


def test_the_root_span_speaks_the_semantic_conventions_and_no_word_of_the_client(
    collector: Collector,
) -> None:
    spans = router_spans()
    with simulated_engine.serving() as (engine, _), router(engine, spans) as address:
        ask(address)
    spans.close()
    root = said(collector.one("chat llama"))
    assert root["gen_ai.operation.name"] == "chat"
    assert root["gen_ai.request.model"] == "llama"
    assert root["gen_ai.usage.output_tokens"] == 4
    assert root["http.response.status_code"] == 200
    assert "hi" not in root.values()
    assert not [key for key in root if "message" in key or "prompt" in key]


def test_a_failed_request_is_an_error_with_its_type(collector: Collector) -> None:
    spans = router_spans()
    with router(free_address(), spans) as address:
        assert ask(address).status_code == 503
    spans.close()
    root = collector.one("chat llama")
    assert root.status.code == root.status.STATUS_CODE_ERROR
    assert said(root)["error.type"] == "no_slice_ready"
    assert said(collector.one("lease"))["serving.attempt"] == 1  # within wait_s nobody else is there


@pytest.mark.parametrize(
    ("error", "begun", "broken"),
    [
        (BadRequestError("x"), False, False),
        (RateLimitError("x"), False, False),
        (OverloadedError("x"), False, True),
        (SliceLostError("x"), True, True),
        (BadRequestError("x"), True, True),
    ],
)
def test_what_the_client_did_wrong_is_no_error_of_the_server_and_a_broken_stream_is(
    collector: Collector, error: ServingError, begun: bool, broken: bool
) -> None:
    spans = router_spans()
    record = RequestRecord(CHAT, on_end=spans.end)
    spans.begin(record, {})
    if begun:
        record.answered(200, streamed=True)
        record.passed_on(b"a\n\n", 1)
    record.failed(error)
    record.end()
    spans.close()
    (root,) = (span for span in collector.spans if span.name != "admission")
    assert (root.status.code == root.status.STATUS_CODE_ERROR) is broken
    assert said(root)["error.type"] == error.code


def test_a_path_that_there_is_not_gives_no_span_its_name(collector: Collector) -> None:
    spans = router_spans()
    record = RequestRecord("/of/strangers", on_end=spans.end)
    spans.begin(record, {})
    record.failed(BadRequestError("x"))
    record.end()
    spans.close()
    (root,) = (span for span in collector.spans if span.name != "admission")
    assert root.name == "POST"
    assert "/of/strangers" not in said(root).values()


def test_retries_and_continuations_are_spans_of_their_own(collector: Collector) -> None:
    spans = router_spans()
    record = RequestRecord(CHAT, on_end=spans.end)
    spans.begin(record, {})
    for number, token in enumerate((b"", b"a\n\n", b"b\n\n")):
        entry = SliceRecord(str(number), "llama", SliceState.SERVING, "", "v6e", slice=f"slice-{number}")
        record.sent(entry)
        if token:
            record.passed_on(token, 1)
    record.failed(SliceLostError("gone"))
    record.end()
    spans.close()
    assert [said(span)["serving.slice"] for span in collector.named("lease")] == ["slice-0", "slice-1"]
    assert said(collector.one("continuation"))["serving.slice"] == "slice-2"


def test_a_lease_that_gave_no_byte_lasts_until_the_request_ends(collector: Collector) -> None:
    spans = router_spans()
    record = RequestRecord(CHAT, model="llama", on_end=spans.end)
    spans.begin(record, {})
    record.sent(SliceRecord("0", "llama", SliceState.SERVING, "", "v6e", slice="slice-0"))
    record.passed_on(b"a\n\n", 1)
    record.sent(SliceRecord("1", "llama", SliceState.SERVING, "", "v6e", slice="slice-1"))
    record.failed(SliceLostError("gone"))
    record.end()
    spans.close()
    lease, continuation, root = (collector.one(name) for name in ("lease", "continuation", "chat llama"))
    assert lease.end_time_unix_nano == continuation.start_time_unix_nano
    assert continuation.start_time_unix_nano < continuation.end_time_unix_nano == root.end_time_unix_nano


def test_a_trace_that_the_client_does_not_sample_is_passed_on_and_not_recorded(collector: Collector) -> None:
    spans = router_spans()
    record = RequestRecord(CHAT, on_end=spans.end)
    spans.begin(record, {"traceparent": f"00-{PARENT}-00f067aa0ba902b7-00"})
    assert record.carried["traceparent"].startswith(f"00-{PARENT}-")
    record.end()
    spans.close()
    assert not collector.spans


@pytest.mark.parametrize(
    ("environment", "endpoint"),
    [
        ({}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, "http://c:4318/v1/traces"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "http://c:4317",
        ),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c/x"}, "http://c/x"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "true"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": "none"}, None),
    ],
)
def test_the_standard_environment_decides(environment: dict[str, str], endpoint: str | None) -> None:
    assert tracing.endpoint(environment) == endpoint


def test_off_imports_nothing() -> None:
    script = "import sys; from serving import tracing; from serving.router.telemetry import spans; assert tracing.provider('x', {}) is None; "
    script += "sys.exit(any(name.startswith('opentelemetry.sdk.trace') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", script], env={"PATH": ""}, check=False).returncode == 0


def test_a_missing_exporter_is_said_and_costs_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    with caplog.at_level(logging.ERROR):
        assert tracing.provider("x", {}) is None
    assert "pip install tpu-serving[tracing]" in caplog.text
