"""One real router behind its own door, before one engine, without Ray and without HAProxy: what several benchmarks measure.

    python -m benchmarks.one_router UPSTREAM [--certificate FILE] [--keys FILE] [--log FILE]

It prints its port, tells what it has done so far for every line of its input, and ends with it.
"""

import argparse
import asyncio
import itertools
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from benchmarks.children import until_input_ends
from serving.config import ModelSpec
from serving.planning import plan
from serving.router import process
from serving.router.core import Outputs, RouterCore, Served
from serving.router.direct_door import share
from serving.router.http.auth import KeyFile
from serving.router.http.door import Door, Relay
from serving.router.telemetry.request_log import RequestLog
from serving.state.records import Peer, SliceRecord, SliceState, Snapshot

MODEL = "llama"
_BEAT_S = 0.5
_TICK_S = 0.001
_SPEC = {
    "name": MODEL,
    "model": "meta-llama/Llama-3.1-8B-Instruct",
    "slice": {"generation": "v6e", "topology": "2x4", "hosts": 1},
    "engine": {"max_num_seqs": 256, "max_model_len": 8192},
}


@asynccontextmanager
async def routing(upstream: Peer, *, keys: Path | None = None, log: Path | None = None) -> AsyncIterator[int]:
    """The port of a router before an engine that is there for as long as the router is."""
    process.prepare()
    plans = [plan(ModelSpec.model_validate(_SPEC))]

    async def no_metrics() -> str:
        return ""

    outputs = Outputs(log=RequestLog(log) if log else None)
    core = RouterCore(Served(plans), KeyFile(keys), no_metrics, outputs=outputs)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    door: Any = partial(
        Door, Relay(core.relay, whose=core.admission.whose, delay_s=core.admission.delay_of_stranger_s)
    )
    app = core.app()
    process.settle()
    server = uvicorn.Server(uvicorn.Config(app, http=door, log_level="critical", timeout_graceful_shutdown=1))
    record = partial(
        SliceRecord, "a", MODEL, SliceState.SERVING, "serving", "v6e 2x4", slice="slice-0", pool=plans[0].pool
    )

    async def beat() -> None:
        for number in itertools.count():
            entry = record(**upstream._asdict(), max_model_len=8192, beat=number)
            for _ in core.take(Snapshot(slices=(entry,)), time.monotonic()):
                pass
            core.publish(core.demands(), time.monotonic())
            await asyncio.sleep(_BEAT_S)

    beating = [asyncio.create_task(beat()), asyncio.create_task(core.admission.run())]
    share(server, listener, lambda: False)
    serving = asyncio.create_task(server.serve(sockets=[]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await serving
        for task in beating:
            task.cancel()
        await core.close()


class Held:
    """How long this process kept its event loop from its next turn, in CPU time: other work on the machine does not count."""

    def __init__(self) -> None:
        self._held_s: list[float] = []

    async def watch(self) -> None:
        while True:
            before_s = time.process_time()
            await asyncio.sleep(_TICK_S)
            self._held_s.append(time.process_time() - before_s)

    def take(self) -> list[float]:
        """The seconds since the last call, the longest first."""
        held_s, self._held_s = self._held_s, []
        return sorted(held_s, reverse=True)


async def main(upstream: Peer, keys: Path | None, log: Path | None, *, held: bool) -> None:
    """Answers have the process' CPU seconds and, where they are asked for, how long the loop was held since the last one."""
    watched = Held()
    async with routing(upstream, keys=keys, log=log) as port:
        watching = asyncio.create_task(watched.watch()) if held else None
        print(port, flush=True)
        await until_input_ends(lambda: {"cpu_s": time.process_time(), "held_s": watched.take()[:100]})
        if watching:
            watching.cancel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("upstream")
    parser.add_argument("--certificate", type=Path, help="of an engine that speaks TLS")
    parser.add_argument("--keys", type=Path)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--held", action="store_true")
    given = parser.parse_args()
    peer = Peer(given.upstream, given.certificate.read_text() if given.certificate else "")
    uvloop.run(main(peer, given.keys, given.log, held=given.held))
