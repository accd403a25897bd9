import asyncio
import csv
import itertools
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from support.servers import PATIENCE_S, asgi_server, free_address, until

from serving.simulation.ports import free_port

pytestmark = pytest.mark.http

LOCUSTFILE = Path(__file__).parents[2] / "loadtest" / "locustfile.py"
STATISTICS = Path(__file__).parents[1] / "support" / "locust_statistics.py"
CHAT = "/v1/chat/completions"
FIRST_S, NEXT_S, TOKENS = 0.3, 0.05, 5
SHORTER_S = 0.01  # each of uvloop's sleeps may be a millisecond shorter


async def models(_: Request) -> Response:
    return JSONResponse({"data": [{"id": "llama"}]})


def service(broken: bytes = b"") -> Starlette:
    """An OpenAI-compatible service with known times; `broken` follows the second token instead of the others."""

    async def chat(request: Request) -> Response:
        asked = await request.json()
        assert asked["model"] == "llama"
        usage = {"completion_tokens": TOKENS}
        if not asked.get("stream"):
            await asyncio.sleep(FIRST_S + (TOKENS - 1) * NEXT_S)
            return JSONResponse({"choices": [], "usage": usage})

        async def stream() -> AsyncIterator[bytes]:
            yield event(delta={"role": "assistant", "content": ""})
            for number in range(TOKENS):
                await asyncio.sleep(NEXT_S if number else FIRST_S)
                yield event(delta={"content": "token"})
                if broken and number:
                    yield broken
                    return
            yield b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    posts = [Route(path, chat, methods=["POST"]) for path in (CHAT, "/v1/completions")]
    return Starlette(routes=[Route("/v1/models", models), *posts])


def event(**choice: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


@dataclass
class Run:
    """What a run of locust says; rows by request type and name."""

    status: int
    said: str
    rows: dict[str, dict[str, str]]

    def count(self, row: str) -> int:
        return int(self.rows[row]["Request Count"]) if row in self.rows else 0

    def failures(self, row: str) -> int:
        return int(self.rows[row]["Failure Count"])

    def mean_s(self, row: str) -> float:
        return float(self.rows[row]["Average Response Time"]) / 1000


def load(address: str, directory: Path, *options: str | Path, more: Path = STATISTICS) -> Run:
    """`more`: one more locustfile."""
    written = directory / "statistics.csv"
    files = ",".join(map(str, dict.fromkeys((LOCUSTFILE, STATISTICS, more))))
    done = subprocess.run(
        [sys.executable, "-m", "locust", "-f", files, "--headless", "--only-summary"]
        + ["--host", address, *options],
        env=os.environ | {"STATISTICS": str(written)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    if not written.exists():
        return Run(done.returncode, done.stdout + done.stderr, {})
    with written.open() as table:
        rows = {f"{row['Type']} {row['Name']}": row for row in csv.DictReader(table)}
    return Run(done.returncode, done.stdout + done.stderr, rows)


TWO_USERS = ("ShortChat", "-u", "2", "-r", "2")
PATIENT = f"slo: {{ttft_ms: {1000 * PATIENCE_S:.0f}, itl_ms: {1000 * PATIENCE_S:.0f}}}\n"  # kept on a busy machine too


def test_times_are_those_of_the_service(tmp_path: Path) -> None:
    limits = tmp_path / "limits.yaml"
    limits.write_text(PATIENT)
    with asgi_server(service()) as address:
        run = load(address, tmp_path, *TWO_USERS, "-t", "4s", "--thresholds", limits)
    assert run.status == 0, run.said
    assert run.mean_s("TTFT short chat") >= FIRST_S - SHORTER_S
    # On a busy machine a first text is read late, by which the gaps behind it are short.
    assert run.mean_s("ITL short chat") > 0
    assert run.mean_s("POST short chat") >= FIRST_S + (TOKENS - 1) * NEXT_S - SHORTER_S
    assert run.count("tokens short chat") == run.count("POST short chat") == run.count("good short chat")
    assert run.count("ITL short chat") >= (TOKENS - 1) * (
        run.count("TTFT short chat") - 2
    )  # two may be under way


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (b'data: {"error": {"message": "the slice is lost"}}\n\n', "the slice is lost"),
        (b"\n", "the stream ended without [DONE]"),
    ],
    ids=["error event", "early end"],
)
def test_an_answer_that_breaks_off_is_a_failure(tmp_path: Path, broken: bytes, says: str) -> None:
    with asgi_server(service(broken)) as address:
        run = load(address, tmp_path, *TWO_USERS, "-t", "2s", "--streamed", "1")
    assert run.status == 1
    assert run.failures("POST short chat") == run.count("POST short chat") > 0
    assert run.count("good short chat") == 0
    assert says in run.said


def test_open_loop_counts_latency_from_the_intended_start(tmp_path: Path) -> None:
    """One request at a time and twice as many arrivals as that can serve: a closed loop would see no queue."""
    busy = asyncio.Semaphore(1)

    async def chat(_: Request) -> Response:
        async with busy:
            await asyncio.sleep(0.2)
        return JSONResponse({"choices": [{"text": "yes"}], "usage": {"completion_tokens": 1}})

    limits = tmp_path / "limits.yaml"
    limits.write_text("slo: {ttft_ms: 500}\nthresholds: {latency_p99_ms: 500, dropped: 1}")
    routes = [Route("/v1/models", models), Route("/v1/completions", chat, methods=["POST"])]
    with asgi_server(Starlette(routes=routes)) as address:
        run = load(
            address, tmp_path, "Completion", "--arrivals", "constant", "--rate", "10", "-t", "4s", "--streamed", "0",
            "--max-in-flight", "10", "--thresholds", limits, "--html", tmp_path / "report.html",
        )  # fmt: skip
    started, dropped = run.count("start completion"), run.count("dropped completion")
    assert run.count("POST completion") == started + dropped
    assert run.failures("POST completion") == dropped > 0
    assert 25 <= started + dropped <= 60
    assert float(run.rows["POST completion"]["99%"]) > 1500
    assert 0 < run.count("good completion") < started
    assert run.status == 1
    assert "broken latency_p99_ms" in run.said
    assert "10 requests in flight already" in run.said
    report = (tmp_path / "report.html").read_text()
    assert report.count("<svg") >= 6
    assert "broken: latency_p99_ms" in report


LATE = """
import gevent
from open_loop import OpenLoop

start = OpenLoop._start


def late(*arguments):
    gevent.sleep(3)
    start(*arguments)


OpenLoop._start = late
"""


def test_what_a_busy_machine_sends_after_the_end_is_waited_for_too(tmp_path: Path) -> None:
    late = tmp_path / "late.py"
    late.write_text(LATE)
    constant = ("--arrivals", "constant", "--rate", "20", "-t", "1s")
    with asgi_server(service()) as address:
        run = load(address, tmp_path, "ShortChat", *constant, more=late)
    assert run.count("POST short chat") == run.count("start short chat") > 0
    assert run.failures("POST short chat") == 0


def test_refusals_are_their_own_statistic_and_each_key_has_its_rows(tmp_path: Path) -> None:
    async def chat(request: Request) -> Response:
        if request.headers["authorization"] == "Bearer sk-batch":
            return JSONResponse({"error": {"message": "no room"}}, 429, {"Retry-After": "1"})
        return JSONResponse({"choices": [{"message": {"content": "yes"}}], "usage": {"completion_tokens": 1}})

    async def with_key(request: Request) -> Response:
        return await models(request) if "authorization" in request.headers else Response(status_code=401)

    api_keys = tmp_path / "keys.yaml"
    api_keys.write_text("interactive: {key: sk-interactive}\nbatch: {key: sk-batch}")
    limits = tmp_path / "limits.yaml"
    limits.write_text(PATIENT + "thresholds: {failures: 0, refusals: 0.9}")
    routes = [Route("/v1/models", with_key), Route(CHAT, chat, methods=["POST"])]
    with asgi_server(Starlette(routes=routes)) as address:
        run = load(
            address, tmp_path, "ShortChat", "Rag", "--arrivals", "constant", "--rate", "50", "-t", "3s",
            "--streamed", "0", "--api-keys", api_keys, "--thresholds", limits,
        )  # fmt: skip
    assert run.status == 0, run.said
    assert run.count("refused short chat, batch") == run.failures("POST short chat, batch") > 0
    assert run.count("good rag, interactive") == run.count("POST rag, interactive") > 0
    assert "429: no room" in run.said


def test_latency_is_of_answers_and_of_what_is_still_awaited_not_of_refusals_and_failures(
    tmp_path: Path,
) -> None:
    """One request answered, one that never is, and many that end at once without an answer."""
    asked = itertools.count()

    async def chat(_: Request) -> Response:
        number = next(asked)
        if number < 2:
            await asyncio.sleep(60 if number else 0.5)
            return JSONResponse({"choices": [{"text": "yes"}], "usage": {"completion_tokens": 1}})
        return JSONResponse({"error": {"message": "no room"}}, 503 if number % 2 else 500)

    limits = tmp_path / "limits.yaml"
    limits.write_text("thresholds: {latency_p50_ms: 400, failures: 1, refusals: 1}")
    routes = [Route("/v1/models", models), Route("/v1/completions", chat, methods=["POST"])]
    with asgi_server(Starlette(routes=routes)) as address:
        run = load(
            address, tmp_path, "Completion", "--arrivals", "constant", "--rate", "10", "-t", "2s", "--streamed", "0",
            "--drain-s", "1", "--thresholds", limits,
        )  # fmt: skip
    assert run.count("refused completion") > 2
    assert run.failures("POST completion") > run.count("refused completion") + 2
    assert run.count("latency completion") == 2
    assert run.status == 1
    assert "broken latency_p50_ms" in run.said


def test_a_replay_sends_every_record_on_all_workers(tmp_path: Path) -> None:
    lines = [
        f'{{"timestamp": {100 * number}, "input_length": 20, "output_length": 3}}' for number in range(10)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(lines))
    with asgi_server(service()) as address:
        run = load(address, tmp_path, "--arrivals", "replay", "--trace", trace, "--processes", "2")
    assert run.status == 0, run.said
    assert run.count("POST replay") == run.count("start replay") == 10


def test_what_cannot_work_is_refused_before_the_run(tmp_path: Path) -> None:
    limits, trace = tmp_path / "limits.yaml", tmp_path / "trace.jsonl"
    limits.write_text("thresholds: {ttft_p98_ms: 500}")
    trace.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1}\n{"timestamp": 1')
    for options, says in (
        (("--thresholds", limits), "ttft_p98_ms, which nothing measures; known are ttft_p50_ms"),
        (("--arrivals", "replay", "--trace", trace), "line 2"),
        (("--arrivals", "ramp"), "give --thresholds FILE"),
        ((), "is down"),
    ):
        run = load(free_address(), tmp_path, *options, "-t", "20s")
        assert run.status == 1
        assert says in run.said
        assert not run.rows


def test_a_service_without_a_model_is_refused(tmp_path: Path) -> None:
    with asgi_server(Starlette()) as address:
        run = load(address, tmp_path, "-t", "1s")
    assert run.status == 1
    assert "/v1/models was answered 404" in run.said


def test_the_web_ui_shows_inference_in_a_tab_of_its_own_and_in_its_report(tmp_path: Path) -> None:
    limits = tmp_path / "limits.yaml"
    limits.write_text(PATIENT)
    web_ui = f"http://127.0.0.1:{free_port()}"
    with asgi_server(service()) as address:
        locust = subprocess.Popen(
            [sys.executable, "-m", "locust", "-f", LOCUSTFILE, "--host", address, "--autostart"]
            + ["--web-host", "127.0.0.1", "--web-port", web_ui.rpartition(":")[2]]
            + ["--arrivals", "constant", "--rate", "10", "-t", "60s", "--thresholds", str(limits)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            until(lambda: any(row["goodput"] == "100" for row in shown(web_ui)), "figures in the tab")
            page, report = (httpx.get(web_ui + path).text for path in ("/", "/stats/report"))
        finally:
            locust.terminate()
            locust.wait(timeout=PATIENCE_S)
    assert '"extended_tabs": [{"key": "inference", "title": "Inference"}]' in page
    assert '"structure": [{"key": "name", "title": "Name"}' in page
    assert '<section id="inference"' in report


def shown(web_ui: str) -> list[dict[str, str]]:
    """The rows of the tab, as the page asks for them."""
    try:
        (table,) = httpx.get(f"{web_ui}/stats/requests").json()["extended_stats"]
    except httpx.TransportError:
        return []
    assert table["key"] == "inference"
    return list(table["data"])
