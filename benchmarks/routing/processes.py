"""The processes under measurement: engines, our routers, other projects' routers."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import aiohttp
import uvicorn
from pydantic_core import from_json
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from benchmarks import peers
from benchmarks.routing.load import CHAT, TIMEOUT_S, counted
from benchmarks.routing.policies import MODEL, Policy
from benchmarks.simulator import nowhere
from serving.config import ModelSpec
from serving.planning import plan
from serving.router.forwarding.dispatch import Dispatcher
from serving.router.forwarding.response import Forwarding
from serving.router.http.downstream import OverAsgi
from serving.router.http.protocol import InferenceRequest
from serving.router.neighbours import Neighbours
from serving.simulation.engine.server import SimulatorServer
from serving.simulation.ports import free_port
from serving.state.records import Demand, SliceRecord, SliceState
from serving.timings import TIMINGS

_SPEC = {
    "name": MODEL,
    "model": "meta-llama/Llama-3.3-70B-Instruct",
    "slice": {"generation": "v6e", "topology": "2x4", "hosts": 1},
    "engine": {"max_model_len": 32768},
}


async def route(policy: Policy, port: int, engines: Sequence[str], folder: Path) -> None:
    """One of our routers: the relay over a table that is kept from the engines' metrics, as elsewhere from the board.

    Routers that share have a file each in `folder`, with their address.
    """
    table = policy.table(MODEL)
    name = str(port)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.relay = Dispatcher(table)
        app.state.neighbours = Neighbours(name, table, "127.0.0.1")
        if policy.shares:
            app.state.neighbours.start()
            (folder / name).write_text(app.state.neighbours.peer.address)
        async with aiohttp.ClientSession() as session:
            await read(session, 1)
            following = asyncio.create_task(follow(session))
            yield
            following.cancel()
        await app.state.relay.close()

    async def follow(session: aiohttp.ClientSession) -> None:
        for beat in range(2, sys.maxsize):
            await asyncio.sleep(TIMINGS.beat_s)
            await read(session, beat)

    async def read(session: aiohttp.ClientSession, beat: int) -> None:
        figures = [await counted(session, engine) | await dropped(session, engine) for engine in engines]
        table.update(
            [entry(engine, now, beat) for engine, now in zip(engines, figures, strict=True)],
            beat * TIMINGS.beat_s,
        )
        app.state.neighbours.settle(told(folder))

    async def forward(request: Request) -> Response:
        body = await request.body()
        return OverAsgi(
            Forwarding(
                app.state.relay,
                InferenceRequest.of(request, MODEL, request.scope["path"], body, from_json(body)),
            ).run
        )

    app = Starlette(routes=[Route("/{path:path}", forward, methods=["POST"])], lifespan=lifespan)
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", access_log=False)
    await uvicorn.Server(config).serve()


def told(folder: Path) -> list[Demand]:
    """The routers that have a file."""
    return [Demand(file.name, MODEL, address=file.read_text()) for file in folder.iterdir()]


def entry(engine: str, figures: dict[str, float], beat: int) -> SliceRecord:
    return SliceRecord(
        engine,
        MODEL,
        SliceState.SERVING,
        "serving",
        "simulated",
        address=engine,
        simulated=True,
        running=int(figures["num_requests_running"]),
        waiting=int(figures["num_requests_waiting"]),
        kv_usage=figures["kv_cache_usage_perc"],
        prompt_tokens=int(figures["prompt_tokens_total"]),
        cached_tokens=int(figures["prefix_cache_hits_total"]),
        output_tokens=int(figures["generation_tokens_total"]),
        cache_age_s=figures["cache_age_s"],
        beat=beat,
    )


async def dropped(session: aiohttp.ClientSession, engine: str) -> dict[str, float]:
    """What a slice's record says of its cache beside vLLM's metrics."""
    async with session.get(f"{engine}/simulator/cache") as answer:
        return {"cache_age_s": (await answer.json())["age_s"]}


async def serve() -> None:
    """One engine: print its port, end with the input."""
    server = SimulatorServer(plan(ModelSpec.model_validate(_SPEC)), nowhere())
    await server.start()
    print(server.http.port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.kill()


@contextlib.contextmanager
def engines(count: int) -> Iterator[list[str]]:
    """Simulated engines on ports of their own; they end with their input."""
    with contextlib.ExitStack() as stack:
        command = [sys.executable, "-m", "benchmarks.routing", "--engine"]
        started = [
            stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            for _ in range(count)
        ]
        for each in started:
            stack.callback(each.kill)
        yield [f"http://127.0.0.1:{each.stdout.readline().strip()}" for each in started if each.stdout]


@contextlib.contextmanager
def routers(policy: Policy, engines: Sequence[str]) -> Iterator[list[str]]:
    """The routers of a policy, answering; raises RuntimeError where one does not."""
    ports = [free_port() for _ in range(policy.routers)]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for port in ports:
            command = (
                peer_command(policy.peer, port, engines)
                if policy.peer
                else own_command(policy, port, engines, folder)
            )
            process = subprocess.Popen(
                command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
            )
            stack.callback(process.wait)
            stack.callback(os.killpg, process.pid, signal.SIGKILL)
        addresses = [f"http://127.0.0.1:{port}" for port in ports]
        for address in addresses:
            asyncio.run(answers(address))
        yield addresses


async def answers(address: str) -> None:
    """Wait until a chat is answered: a router may be up before it knows its engines."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "ready?"}], "max_tokens": 1}
    deadline_s = time.monotonic() + TIMEOUT_S
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline_s:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.post(address + CHAT, json=body) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.2)
    raise RuntimeError(f"{address} does not answer")


def own_command(policy: Policy, port: int, engines: Sequence[str], folder: Path) -> list[str]:
    options = ["--route", policy.name, "--port", str(port), "--folder", str(folder)]
    return [sys.executable, "-m", "benchmarks.routing", *options, *engines]


def peer_command(peer: str, port: int, engines: Sequence[str]) -> list[str]:
    """With its own defaults, and its cache-aware policy by name."""
    binary = str(peers.environment(f"{peer}.txt") / "bin" / peer)
    return [
        *([binary, "launch"] if peer == "smg" else [binary]),
        *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())),
        *("--policy", "cache_aware", "--worker-urls", *engines),
    ]
