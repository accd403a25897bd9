"""A word that a client sends in any field of any route turns up nowhere but at the engine, and in that client's own answer.

Exempt is what is no text: the path, the client's own request id, and the model's name, which an error repeats.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.fronts import Front, front
from support.simulated_engine import MODEL

from serving.metrics.recorder import Recorder
from serving.router.http.auth import KeyFile, new
from serving.router.http.envelope import error_object
from serving.router.http.routes import ROUTES
from serving.router.telemetry.journal import Journal
from serving.router.telemetry.request_log import RequestLog
from serving.router.telemetry.spans import RequestSpans

pytestmark = pytest.mark.http

CANARY = "CanaryQ7x"
# Fields that some route counts with, routes by, or that its schema has, beside every field of the tables of routes.
FIELDS = (
    "messages", "prompt", "input", "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n", "best_of",
    "stream", "stream_options", "stop", "stop_token_ids", "bad_words", "temperature", "top_p", "seed", "user", "metadata",
    "tools", "tool_choice", "response_format", "structured_outputs", "logit_bias", "logprobs", "echo", "suffix", "cache_salt",
    "prompt_cache_key", "priority", "vllm_xargs", "chat_template", "chat_template_kwargs", "documents", "query", "texts",
    "system", "instructions", "token_ids", "sampling_params", "return_token_ids", "request_id", "truncate_prompt_tokens",
)  # fmt: skip
SHAPES: dict[str, Any] = {
    "a text": CANARY,
    "a list": [CANARY],
    "an object": {CANARY: CANARY, "type": CANARY},
    "an object in a list": [{"role": CANARY, "content": CANARY, "type": CANARY}],
    "an image": [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"http://h/{CANARY}"}}]}
    ],
    "a long text": [CANARY * 2000],
}


@dataclass
class Watched:
    """A running router before a simulated engine, and all that it may tell of its requests."""

    front: Front
    client: httpx.Client
    recorder: Recorder
    log: RequestLog
    spans: InMemorySpanExporter
    caplog: pytest.LogCaptureFixture
    refusals: list[str]

    def post(self, path: str, **sent: Any) -> None:
        answer = self.client.post(self.front.address + path, **sent)
        if answer.status_code >= 400:
            self.refusals.append(f"{path.partition('?')[0]}: {answer.text} {answer.headers}")

    def told(self) -> dict[str, str]:
        """Everything that was told, by where."""
        self.log.flush()
        recorder = self.recorder
        pages = ("/metrics", "/status.json", "/v1/models", "/health", "/openapi.json")
        return {
            "logs": self.caplog.text + "".join(str(vars(record)) for record in self.caplog.records),
            "request log": "".join(path.read_text() for path in self.log.path.parent.glob("requests*")),
            "metrics": f"{recorder._counted} {recorder._gauges} {list(recorder._series)}",
            "spans": "".join(span.to_json() for span in self.spans.get_finished_spans()),
            "errors": "\n".join(self.refusals),
            "pages": "".join(self.client.get(self.front.address + page).text for page in pages),
        }


@pytest.fixture
def watched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Watched]:
    caplog.set_level(logging.INFO)
    for name in ("ray.serve", "serving", "uvicorn", "asyncio", "fastapi"):
        caplog.set_level(logging.DEBUG, name)
    for name in ("httpx", "httpcore"):  # the client's own
        caplog.set_level(logging.CRITICAL, name)
    key, line = new("reader")
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    recorder, log = Recorder("default"), RequestLog(tmp_path / "requests.jsonl")
    journal = Journal(recorder, log, spans=RequestSpans(provider))
    with (
        front(journal, KeyFile(None, line), max_body_bytes=1 << 20) as running,
        httpx.Client(headers={"authorization": f"Bearer {key}"}, timeout=30) as client,
    ):
        found = Watched(running, client, recorder, log, spans, caplog, [])
        yield found
        assert key not in str(found.told())


def leaks(watched: Watched) -> dict[str, str]:
    """Where the word stands, with what is around it."""
    return {
        where: text[max(0, at - 200) : at + 100]
        for where, text in watched.told().items()
        if (at := text.find(CANARY)) >= 0
    }


@pytest.mark.parametrize("path", ROUTES)
def test_no_field_of_a_route_is_told_of(watched: Watched, path: str) -> None:
    route = ROUTES[path]
    whole = {
        "messages": [{"role": "user", "content": CANARY}],
        "prompt": CANARY,
        "input": CANARY,
        "max_tokens": 2,
    }
    watched.post(path, json={"model": MODEL, **whole})
    watched.post(path, json={"model": MODEL, **whole, "stream": True})
    needed = {name: whole[name] for name in route.needed if name in whole}
    shapes = list(SHAPES.values())
    for number, field in enumerate(sorted({*FIELDS, *route.fields, CANARY})):
        for shape in shapes if field in route.fields else shapes[number % len(shapes) :][:1]:
            watched.post(path, json={"model": MODEL, **needed, "max_tokens": 1, field: shape})
    assert watched.refusals
    assert leaks(watched) == {}


def test_no_body_that_can_not_be_read_is_told_of(watched: Watched) -> None:
    path = "/v1/chat/completions"
    for body in (
        CANARY,
        f'{{"{CANARY}": 1, "{CANARY}": 2}}',
        f'{{"messages": "{CANARY}", "messages": "{CANARY}"}}',
        f'{{"prompt": "{CANARY}\\ud800"}}',
        f'{{"prompt": "{CANARY}',
        json.dumps([CANARY]),
        json.dumps(CANARY),
        f'{{"max_tokens": {CANARY}}}',
        f'{{"{CANARY}": 1e999}}',
        json.dumps({"model": MODEL, "prompt": "x", CANARY: "x" * 900_000}),
        json.dumps({"model": MODEL, "prompt": "x", "structured_outputs": {CANARY: "x" * 900_000}}),
    ):
        watched.post(path, content=body, headers={"content-type": "application/json"})
        watched.post(path, content=body, headers={"content-type": f"text/{CANARY}"})
    watched.post(
        path, json={"model": MODEL, "prompt": CANARY}, headers={"x-session-id": CANARY, "cookie": CANARY}
    )
    watched.post(
        path, json={"model": MODEL, "prompt": CANARY}, headers={"traceparent": CANARY, "user-agent": CANARY}
    )
    watched.post(f"{path}?q={CANARY}", json={"model": MODEL, "prompt": CANARY})
    watched.post(
        "/v1/audio/transcriptions",
        data={"model": MODEL, CANARY: CANARY},
        files={CANARY: (CANARY, b"x", CANARY)},
    )
    boundary = {"content-type": f"multipart/form-data; boundary={CANARY}"}
    watched.post(
        "/v1/audio/transcriptions", content=f"--{CANARY}\r\n{CANARY}\r\n\r\n{CANARY}", headers=boundary
    )
    watched.post(path, content=CANARY * 200_000)
    assert len(watched.refusals) > 15
    assert leaks(watched) == {}


def test_a_key_that_is_not_known_is_told_of_nowhere(watched: Watched) -> None:
    for headers in (
        {"authorization": f"Bearer sk-{CANARY}"},
        {"x-api-key": CANARY},
        {"authorization": CANARY},
    ):
        watched.client.headers.pop("authorization", None)
        watched.post("/v1/chat/completions", json={"model": MODEL}, headers=headers)
    assert len(watched.refusals) == 3
    assert leaks(watched) == {}


def test_what_pydantic_says_in_an_engine_loses_the_input_that_it_repeats() -> None:
    errors = [
        {
            "type": "missing",
            "loc": ("body", "messages", 0, "role"),
            "msg": "Field required",
            "input": {"x": f"{CANARY}\n', "},
        },
        {
            "type": "value_error",
            "loc": ("body",),
            "msg": "Value error, no",
            "input": CANARY,
            "ctx": {"error": CANARY},
        },
    ]
    message = "2 validation errors:\n" + "\n".join(f"  {error}" for error in errors)
    said = error_object(json.dumps({"error": {"message": message, "code": 400}}).encode(), 400)["message"]
    assert CANARY not in said
    assert said == "The request is not valid: messages.0.role: Field required; no."
