"""The simulated engine as a replica holds it."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator

import httpx
import pytest

from benchmarks.calibration import plan_of
from benchmarks.simulator import nowhere
from serving.engine.late_programs import Late, Step, StepRequest
from serving.engine.server import EngineServer
from serving.errors import SliceLostError
from serving.simulation.engine.server import SimulatorServer

pytestmark = pytest.mark.http


@pytest.fixture
async def server() -> AsyncIterator[SimulatorServer]:
    found = plan_of("llama-8b-v6e-1")
    made = SimulatorServer(found, nowhere())
    await made.start()
    yield made
    made.kill()


def completion(server: EngineServer, client: httpx.AsyncClient, most: int) -> "asyncio.Task[httpx.Response]":
    asked = {"prompt": "x", "max_tokens": most, "ignore_eos": True}
    return asyncio.create_task(client.post(f"http://127.0.0.1:{server.http.port}/v1/completions", json=asked))


async def until_running(server: EngineServer) -> None:
    while not server.load.running:  # noqa: ASYNC110  the server tells nobody
        await asyncio.sleep(0.001)


async def test_it_answers_and_tells_its_load(server: SimulatorServer) -> None:
    async with httpx.AsyncClient() as client:
        running = completion(server, client, 4)
        await until_running(server)
        assert server.requests_open == 1
        assert 0 < server.load.kv_usage < 1
        assert (await running).is_success
    assert server.load.running == server.load.waiting == 0
    assert server.load.last_output_s > 0
    assert server.max_model_len == 2048
    await server.probe()


async def test_killing_it_ends_requests_with_an_error_and_is_noticed(server: SimulatorServer) -> None:
    died = asyncio.create_task(server.died())
    async with httpx.AsyncClient() as client:
        running = completion(server, client, 2000)
        await until_running(server)
        server.kill()
        assert (await running).status_code == 500
    assert await died == "the replica ended it"
    with pytest.raises(SliceLostError):
        await server.probe()


async def test_a_program_that_it_is_made_to_compile_is_late_and_named_with_its_step(
    server: SimulatorServer,
) -> None:
    assert await server.late_programs() == Late()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.http.port}") as client:
        await client.post("/simulator/faults", json={"compile_s": 0.05})
        headers = {"x-request-id": "abc"}
        asked = {"prompt": [1, 2, 3], "max_tokens": 2, "ignore_eos": True}
        assert (await client.post("/v1/completions", json=asked, headers=headers)).is_success
    late = await server.late_programs()
    assert late.programs == 1
    assert late.seconds >= 0.05
    assert late.newest[0].step == Step(1, 3, (StepRequest("cmpl-abc", 3, 3),))


def test_a_replica_with_it_loads_no_engine_and_starts_at_once() -> None:
    script = """
import sys, serving.engine.replica, serving.simulation.engine.server
print([name for name in ("vllm", "jax", "torch", "tpu_inference", "transformers") if name in sys.modules])
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
