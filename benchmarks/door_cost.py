"""What one answer and one streamed chunk cost a router's process in CPU time, without Ray and without HAProxy.

    python -m benchmarks.door_cost                          # this tree
    python -m benchmarks.door_cost --against ../before      # and another working tree, round by round in turn

A real router behind its own door, in a process of its own, relays from an engine that makes its events beforehand. Client
and engine are the measuring process; only the router's CPU is counted. Rounds of both trees alternate, so that other work on
the machine slows both alike: the quotient of the two is steadier than either figure.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import httptools
import uvicorn
import uvloop

from benchmarks.client import Load, put
from serving.config import ModelSpec, RouterSpec
from serving.planning import plan
from serving.router.core import RouterCore
from serving.router.http.auth import KeyFile
from serving.router.http.door import Door, Relay
from serving.router.telemetry.request_log import RequestLog
from serving.state.records import SliceRecord, SliceState, Snapshot

MODEL = "llama"
TOKENS = 32
_CONCURRENCY = 32
_BEAT_S = 0.5
_STEP_S = 0.01  # between the tokens of a stream: events of one stream come one by one
_NAME = b'{"id":"chatcmpl-0123456789abcdef01234567","object":"chat.completion.chunk","created":1700000000,"model":"llama",'
_OPENING = (
    b"data: "
    + _NAME
    + b'"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],'
    b'"prompt_token_ids":[%s],"prompt_text":null}\n\n' % b",".join(b"%d" % n for n in range(1000, 1060))
)
_TOKEN = (
    b"data: " + _NAME + b'"choices":[{"index":0,"delta":{"content":" slice"},"logprobs":null,'
    b'"finish_reason":null,"token_ids":[12345]}]}\n\n'
)
_LAST = _TOKEN.replace(b'"finish_reason":null', b'"finish_reason":"length","stop_reason":null')
_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Sun, 01 Jan 2023 00:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


class _Engine(asyncio.Protocol):
    """One connection of an engine."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._begin()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        tokens = json.loads(self._body).get("max_tokens", 1)
        self._transport.write(_HEAD + _chunk(_OPENING))
        self._write(tokens)
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""

    def _write(self, left: int) -> None:
        if self._transport.is_closing():
            return
        if left > 1:
            self._transport.write(_chunk(_TOKEN))
            asyncio.get_running_loop().call_later(_STEP_S, self._write, left - 1)
        else:
            self._transport.write(_chunk(_LAST) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def route(upstream: str, log: Path) -> None:
    """The router's process: prints its port, then its CPU seconds for every line that comes; ends with its input."""
    plans = [
        plan(
            ModelSpec.model_validate(
                {
                    "name": MODEL,
                    "model": "meta-llama/Llama-3.1-8B-Instruct",
                    "slice": {"generation": "v6e", "topology": "2x4", "hosts": 1},
                    "engine": {"max_num_seqs": 256, "max_model_len": 8192},
                }
            )
        )
    ]

    async def no_metrics() -> str:
        return ""

    core = RouterCore(plans, RouterSpec(), KeyFile(None), no_metrics, log=RequestLog(log))
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server = uvicorn.Server(
        uvicorn.Config(
            core.app(),
            http=partial(Door, Relay(core.relay)),
            log_level="critical",
            timeout_graceful_shutdown=1,
        )
    )

    async def beat() -> None:
        for number in range(sys.maxsize):
            record = SliceRecord(
                "a",
                MODEL,
                SliceState.SERVING,
                "serving",
                "v6e 2x4",
                slice="slice-0",
                pool=plans[0].pool,
                address=upstream,
                max_model_len=8192,
                beat=number,
            )
            for _ in core.take(Snapshot(slices=(record,)), time.monotonic()):
                pass
            core.publish(core.demands(), time.monotonic())
            await asyncio.sleep(_BEAT_S)

    beating = [asyncio.create_task(beat()), asyncio.create_task(core.admission.run())]
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    print(listener.getsockname()[1], flush=True)
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def tell() -> None:
        for _ in sys.stdin:
            print(time.process_time(), flush=True)
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=tell, daemon=True).start()
    await ended.wait()
    server.should_exit = True
    await serving
    for task in beating:
        task.cancel()
    await core.close()


class Router:
    """A tree's router in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdin  # noqa: S101  both were asked for
        assert process.stdout  # noqa: S101
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self.address = f"http://127.0.0.1:{self._stdout.readline().strip()}"

    def cpu_s(self) -> float:
        self._stdin.write("\n")
        self._stdin.flush()
        return float(self._stdout.readline())


@contextmanager
def started(tree: Path, upstream: str, folder: Path) -> Iterator[Router]:
    """The router of a working tree; it ends with its input."""
    with subprocess.Popen(
        [sys.executable, __file__, "--route", upstream, "--log", str(folder / "requests.jsonl")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
    ) as process:
        try:
            yield Router(process)
        finally:
            process.kill()


async def measure(trees: Sequence[Path], rounds: int, seconds: float) -> list[list[tuple[float, float]]]:
    """For each tree and round: CPU µs of a one-token answer, and of a further chunk."""
    server = await asyncio.get_running_loop().create_server(_Engine, "127.0.0.1", 0)
    upstream = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    found: list[list[tuple[float, float]]] = [[] for _ in trees]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        routers = [stack.enter_context(started(tree, upstream, Path(folder))) for tree in trees]
        for router in routers:
            await put([router.address], MODEL, Load(_CONCURRENCY, 1, 0.5))
        for _ in range(rounds):
            for router, times in zip(routers, found, strict=True):
                answer = await _cpu_us(router, Load(_CONCURRENCY, 1, seconds))
                stream = await _cpu_us(router, Load(_CONCURRENCY, TOKENS, seconds))
                times.append((answer, (stream - answer) / (TOKENS - 1)))
        server.close()
    return found


async def _cpu_us(router: Router, load: Load) -> float:
    before_s = router.cpu_s()
    seen = await put([router.address], MODEL, load)
    return 1e6 * (router.cpu_s() - before_s) / seen.answers


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, help="another working tree, measured beside this one")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--route", metavar="UPSTREAM", help=argparse.SUPPRESS)
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.route:
        with suppress(KeyboardInterrupt):
            uvloop.run(route(options.route, options.log))
        return
    here = Path(__file__).resolve().parent.parent
    trees = [tree.resolve() for tree in (options.against, here) if tree]
    found = uvloop.run(measure(trees, options.rounds, options.seconds))
    print(f"| tree, median of {options.rounds} rounds | CPU µs a 1-token answer | CPU µs a further chunk |")
    print("|---|---|---|")
    for tree, times in zip(trees, found, strict=True):
        answers, chunks = zip(*times, strict=True)
        print(
            f"| {tree.name} | {statistics.median(answers):.0f} ({min(answers):.0f} to {max(answers):.0f}) "
            f"| {statistics.median(chunks):.1f} ({min(chunks):.1f} to {max(chunks):.1f}) |"
        )
    if len(trees) == 2:
        ratios = [
            statistics.median(now[at] / then[at] for then, now in zip(*found, strict=True)) for at in (0, 1)
        ]
        print(f"| now of before, median of quotients | {ratios[0]:.2f} | {ratios[1]:.2f} |")


if __name__ == "__main__":
    main()
