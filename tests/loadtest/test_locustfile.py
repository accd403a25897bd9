import asyncio
import csv
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from servers import asgi_server
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

pytestmark = pytest.mark.cluster

LOCUSTFILE = Path(__file__).parents[2] / "loadtest" / "locustfile.py"
CHAT = "/v1/chat/completions"
FIRST_S, NEXT_S, TOKENS = 0.3, 0.05, 5


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

    return Starlette(routes=[Route("/v1/models", models), Route(CHAT, chat, methods=["POST"])])


def event(**choice: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


@dataclass
class Run:
    """What a run of locust says; rows by request type and name."""

    status: int
    said: str
    rows: dict[str, dict[str, str]]

    def count(self, row: str) -> int:
        return int(self.rows[row]["Request Count"])

    def failures(self, row: str) -> int:
        return int(self.rows[row]["Failure Count"])

    def mean_s(self, row: str) -> float:
        return float(self.rows[row]["Average Response Time"]) / 1000


def load(address: str, directory: Path, seconds: int, *options: str) -> Run:
    """Two users' load."""
    done = subprocess.run(
        [sys.executable, "-m", "locust", "-f", LOCUSTFILE, "--headless", "--host", address, "-u", "2"]
        + ["-r", "2", "-t", f"{seconds}s", "--only-summary", "--csv", directory / "run", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    with (directory / "run_stats.csv").open() as table:
        rows = {f"{row['Type']} {row['Name']}": row for row in csv.DictReader(table)}
    return Run(done.returncode, done.stdout + done.stderr, rows)


def test_times_are_those_of_the_service(tmp_path: Path) -> None:
    with asgi_server(service()) as address:
        run = load(address, tmp_path, 4)
    assert run.status == 0, run.said
    assert FIRST_S <= run.mean_s(f"TTFT {CHAT}") < FIRST_S + 0.1
    assert NEXT_S * 0.9 <= run.mean_s(f"ITL {CHAT}") < NEXT_S + 0.03
    whole_s = FIRST_S + (TOKENS - 1) * NEXT_S
    assert whole_s <= run.mean_s(f"POST {CHAT} streamed") < whole_s + 0.2
    whole_answers = run.count(f"POST {CHAT} streamed")
    assert run.count(f"ITL {CHAT}") >= whole_answers * (TOKENS - 1)
    assert "output tokens/s: " in run.said


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
        run = load(address, tmp_path, 2, "--tags", "streamed")
    assert run.status == 1
    row = f"POST {CHAT} streamed"
    assert run.failures(row) == run.count(row) > 0
    assert says in run.said
    assert "Traceback" not in run.said


def test_a_service_without_a_model_is_a_failure(tmp_path: Path) -> None:
    with asgi_server(Starlette()) as address:
        run = load(address, tmp_path, 1)
    assert run.status == 1
    assert "no model to be had: 404" in run.said
