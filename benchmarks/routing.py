"""What the choice of a slice is worth: policies and other projects' routers in front of the same simulated engines.

    make bench-routing                                   # some 8 minutes; --quick for three
    python -m benchmarks.routing --svg benchmarks/routing.svg

Four engines of Llama 3.3 70B on v6e 2x4 at their calibrated pace, without Ray, each in a process of its own; one router at
a time in front of them. Our policies run in our relay and differ in their choice alone. Conversations begin at random
times whatever becomes of those before them; every router gets the same ones, with a first word of its own, so that none
finds in a cache what another left there. A request is good if its first token came within TTFT_S and the others at
TPOT_S each. Hits are tokens that the engines found in their caches, of the prompts' tokens.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from pydantic_core import from_json
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from benchmarks import peers
from benchmarks.simulator import nowhere
from serving.config import Affinity, ModelSpec
from serving.engine.simulator.server import SimulatorServer
from serving.engine.simulator.tokenizer import WORDS
from serving.planning import plan
from serving.router.answer import RelayedResponse
from serving.router.ask import Ask
from serving.router.relay import Relay
from serving.router.table import SliceTable
from serving.slices.board import BEAT_S, Entry, State
from serving.slices.simulation import free_port

MODEL = "llama-70b"
_SPEC = {
    "name": MODEL,
    "model": "meta-llama/Llama-3.3-70B-Instruct",
    "slice": {"generation": "v6e", "topology": "2x4", "hosts": 1},
    "engine": {"max_model_len": 32768},
}
CHAT = "/v1/chat/completions"
ENGINES = 4
TTFT_S, TPOT_S = 0.5, 0.05
_TIMEOUT_S = 60
OURS = "tpu-serving"


class RoundRobin(SliceTable):
    """Slices in turn, whatever they have to do."""

    _turn = 0

    def choose(self, model: str, tried: Any = (), ask: Ask | None = None) -> Entry:  # noqa: ARG002  as the table's
        entries = [entry for entry in self.entries(model) if entry.replica not in tried]
        self._turn += 1
        return entries[self._turn % len(entries)]


class TwoChoices(SliceTable):
    """Serve's own: of two slices at random the one with fewer of this router's requests."""

    def choose(self, model: str, tried: Any = (), ask: Ask | None = None) -> Entry:  # noqa: ARG002  as the table's
        entries = [entry for entry in self.entries(model) if entry.replica not in tried]
        return min(
            random.sample(entries, min(2, len(entries))), key=lambda entry: self.in_flight(entry.replica)
        )


@dataclass(frozen=True)
class Policy:
    """One row: how slices are chosen, by whom, and by how many routers."""

    name: str
    routers: int = 1
    peer: str = ""

    def table(self, model: str) -> SliceTable:
        wanted, shapes = {model: ENGINES}, {model: "simulated"}
        if self.name == "round robin":
            return RoundRobin(wanted, shapes)
        if self.name == "power of two":
            return TwoChoices(wanted, shapes)
        affinity = Affinity.NONE if self.name == "least loaded" else Affinity.PREFIX
        return SliceTable(wanted, shapes, affinity=affinity, routers=self.routers)


POLICIES = (
    Policy("round robin"),
    Policy("least loaded"),
    Policy("power of two"),
    Policy("smg", peer="smg"),
    Policy("vllm-router", peer="vllm-router"),
    Policy(OURS),
    Policy(f"{OURS}, 3 routers", routers=3),
)


@dataclass(frozen=True)
class Load:
    """Conversations a second, their turns, and tokens: of a system prompt (of so many), asked and answered a turn."""

    name: str
    per_s: float
    turns: tuple[int, int]
    asked: tuple[int, int]
    answered: tuple[int, int]
    system_prompts: int = 0
    system_tokens: int = 0
    think_s: float = 0.5


LOADS = (
    Load("multi-turn chat", 2.6, (3, 6), (500, 3000), (15, 40)),
    Load("shared system prompts", 12.0, (1, 1), (50, 400), (15, 40), system_prompts=24, system_tokens=6000),
    Load("nothing shared", 8.0, (1, 1), (1000, 9000), (15, 40)),
)


@dataclass
class Seen:
    """What came of one load through one router."""

    policy: str
    load: str
    seconds: float
    requests: int = 0
    refused: int = 0
    good: int = 0
    first_s: list[float] = field(default_factory=list)
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0

    def add(self, other: "Seen") -> None:
        """Another round of the same."""
        self.requests += other.requests
        self.refused += other.refused
        self.good += other.good
        self.first_s += other.first_s
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens

    def row(self) -> str:
        first = statistics.quantiles(self.first_s, n=100) if len(self.first_s) > 1 else [0.0] * 99
        return (
            f"| {self.load} | {self.policy} | {self.cached_tokens / max(1.0, self.prompt_tokens):.0%} "
            f"| {first[49] * 1000:.0f} | {first[98] * 1000:.0f} | {self.good / self.requests:.1%} "
            f"| {self.refused} of {self.requests} |"
        )


HEAD = (
    f"| load | choice of slice | hits | TTFT p50, ms | p99, ms | good: TTFT {TTFT_S * 1000:.0f} ms, TPOT "
    f"{TPOT_S * 1000:.0f} ms | refused |\n|---|---|---|---|---|---|---|"
)


def words(draw: random.Random, tokens: int) -> str:
    """Each word of the simulated engine's vocabulary, with the space before it, is a token."""
    return " ".join(draw.choices(WORDS, k=tokens))


class Client:
    """The conversations of one load."""

    def __init__(
        self, session: aiohttp.ClientSession, addresses: Sequence[str], load: Load, seen: Seen
    ) -> None:
        self._session = session
        self._addresses = addresses
        self._load = load
        self._seen = seen

    async def run(self, seed: int) -> None:
        """All of them: begin at random times for `seconds`, end when they end."""
        load, draw, own = self._load, random.Random(seed), f"{self._seen.policy} {time.time()}: "
        systems = [own + words(draw, load.system_tokens) for _ in range(load.system_prompts)]
        talks, now_s = [], 0.0
        while (now_s := now_s + draw.expovariate(load.per_s)) < self._seen.seconds:
            system = draw.choice(systems) if systems else ""
            talks.append(self._talk(now_s, system, own, random.Random(draw.random())))
        await asyncio.gather(*talks)

    async def _talk(self, begins_s: float, system: str, own: str, draw: random.Random) -> None:
        load = self._load
        messages = [{"role": "system", "content": system}] if system else []
        await asyncio.sleep(begins_s)
        for turn in range(draw.randint(*load.turns)):
            asked = words(draw, draw.randint(*load.asked))
            messages.append({"role": "user", "content": asked if turn or system else own + asked})
            answer = await self._ask(messages, draw.randint(*load.answered), draw)
            if answer is None:
                return
            messages.append({"role": "assistant", "content": answer})
            await asyncio.sleep(draw.expovariate(1 / load.think_s))

    async def _ask(self, messages: list[dict[str, str]], tokens: int, draw: random.Random) -> str | None:
        body = {"model": MODEL, "messages": messages, "stream": True, "max_tokens": tokens}
        seen, sent_s, first_s, said, whole = self._seen, time.perf_counter(), 0.0, [], False
        seen.requests += 1
        try:
            async with self._session.post(
                draw.choice(self._addresses) + CHAT, json=body | {"ignore_eos": True}
            ) as answer:
                async for line in answer.content:
                    whole = whole or line.startswith(b"data: [DONE]")
                    if not line.startswith(b"data: {") or not (text := _text(line)):
                        continue
                    first_s = first_s or time.perf_counter()
                    said.append(text)
        except (aiohttp.ClientError, TimeoutError):
            whole = False
        if answer_failed := not (whole and said and answer.status == 200):
            seen.refused += answer_failed
            return None
        seen.first_s.append(first_s - sent_s)
        tpot_s = (time.perf_counter() - first_s) / max(1, len(said) - 1)
        seen.good += seen.first_s[-1] <= TTFT_S and tpot_s <= TPOT_S
        return "".join(said)


def _text(line: bytes) -> str:
    choices = json.loads(line[6:]).get("choices") or [{}]
    return (choices[0].get("delta") or {}).get("content") or ""


async def counted(session: aiohttp.ClientSession, address: str) -> dict[str, float]:
    """An engine's own figures, by vLLM's names."""
    async with session.get(f"{address}/metrics") as answer:
        families = text_string_to_metric_families(await answer.text())
        return {
            sample.name.removeprefix("vllm:"): sample.value for each in families for sample in each.samples
        }


async def play(
    policy: Policy,
    addresses: Sequence[str],
    engines: Sequence[str],
    load: Load,
    seconds: float,
    seed: int = 0,
) -> Seen:
    seen = Seen(policy.name, load.name, seconds)
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        before = [await counted(session, engine) for engine in engines]
        await Client(session, addresses, load, seen).run(seed)
        for engine, then in zip(engines, before, strict=True):
            now = await counted(session, engine)
            seen.prompt_tokens += now["prefix_cache_queries_total"] - then["prefix_cache_queries_total"]
            seen.cached_tokens += now["prefix_cache_hits_total"] - then["prefix_cache_hits_total"]
    return seen


# Processes: engines, our routers, peers.


async def route(policy: Policy, port: int, engines: Sequence[str]) -> None:
    """One of our routers: the relay over a table that is kept from the engines' metrics, as elsewhere from the board."""
    table = policy.table(MODEL)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.relay = Relay(table)
        async with aiohttp.ClientSession() as session:
            await read(session, 1)
            following = asyncio.create_task(follow(session))
            yield
            following.cancel()
        await app.state.relay.close()

    async def follow(session: aiohttp.ClientSession) -> None:
        for beat in range(2, sys.maxsize):
            await asyncio.sleep(BEAT_S)
            await read(session, beat)

    async def read(session: aiohttp.ClientSession, beat: int) -> None:
        figures = [await counted(session, engine) for engine in engines]
        table.update(
            [entry(engine, now, beat) for engine, now in zip(engines, figures, strict=True)], beat * BEAT_S
        )

    async def forward(request: Request) -> Response:
        body = await request.body()
        return RelayedResponse(
            app.state.relay, Ask.of(request, MODEL, request.scope["path"], body, from_json(body))
        )

    app = Starlette(routes=[Route("/{path:path}", forward, methods=["POST"])], lifespan=lifespan)
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", access_log=False)
    await uvicorn.Server(config).serve()


def entry(engine: str, figures: dict[str, float], beat: int) -> Entry:
    return Entry(
        engine,
        MODEL,
        State.SERVING,
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
        beat=beat,
    )


async def serve() -> None:
    """One engine: print its port, end with the input."""
    server = SimulatorServer(plan(ModelSpec.model_validate(_SPEC)), nowhere(), "")
    await server.start()
    print(server.port, flush=True)
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
        for port in ports:
            command = (
                peer_command(policy.peer, port, engines)
                if policy.peer
                else own_command(policy, port, engines)
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
    deadline_s = time.monotonic() + _TIMEOUT_S
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline_s:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.post(address + CHAT, json=body) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.2)
    raise RuntimeError(f"{address} does not answer")


def own_command(policy: Policy, port: int, engines: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "benchmarks.routing", "--route", policy.name, "--port", str(port), *engines]


def peer_command(peer: str, port: int, engines: Sequence[str]) -> list[str]:
    """With its own defaults, and its cache-aware policy by name."""
    binary = str(peers.environment(f"{peer}.txt") / "bin" / peer)
    return [
        *([binary, "launch"] if peer == "smg" else [binary]),
        *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())),
        *("--policy", "cache_aware", "--worker-urls", *engines),
    ]


def svg(rows: Sequence[Seen]) -> str:
    """Median and 99th percentile of TTFT, a bar a policy, a group a load."""
    loads = list(dict.fromkeys(row.load for row in rows))
    width, left, line, head = 760, 170, 18, 26
    worst = max(statistics.quantiles(row.first_s, n=100)[98] for row in rows)
    scale, shapes, top = (width - left - 130) / worst, [], 14
    for load in loads:
        shapes.append(f'<text x="{left}" y="{top + 12}" font-weight="bold">{load}</text>')
        top += head
        for row in (row for row in rows if row.load == load):
            first = statistics.quantiles(row.first_s, n=100)
            fill = "#2a6f4e" if row.policy.startswith(OURS) else "#7a8ca8"
            hits = row.cached_tokens / max(1.0, row.prompt_tokens)
            said = f"{first[49] * 1000:.0f} / {first[98] * 1000:.0f} ms, {hits:.0%}"
            shapes += [
                f'<text x="{left - 8}" y="{top + 11}" text-anchor="end">{row.policy}</text>',
                f'<rect x="{left}" y="{top}" width="{first[98] * scale:.1f}" height="13" fill="{fill}" opacity="0.35"/>',
                f'<rect x="{left}" y="{top}" width="{first[49] * scale:.1f}" height="13" fill="{fill}"/>',
                f'<text x="{left + first[98] * scale + 6:.1f}" y="{top + 11}">{said}</text>',
            ]
            top += line
        top += 10
    shapes.append(
        f'<text x="{left}" y="{top + 8}">TTFT p50 (dark) and p99 (light), share of prompt tokens from the cache</text>'
    )
    height = top + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="12">\n<rect width="{width}" height="{height}" fill="white"/>\n'
        + "\n".join(shapes)
        + "\n</svg>\n"
    )


def compare(
    policies: Sequence[Policy],
    loads: Sequence[Load],
    seconds: float,
    rounds: int,
    say: Callable[[str], None],
) -> list[Seen]:
    """Rounds alternate between the policies, so that a machine that slows down slows all of them."""
    rows = {
        (load.name, policy.name): Seen(policy.name, load.name, seconds)
        for load in loads
        for policy in policies
    }
    with engines(ENGINES) as addresses:
        for load in loads:
            for number in range(rounds):
                for policy in policies if number % 2 == 0 else policies[::-1]:
                    with routers(policy, addresses) as fronts:
                        seen = asyncio.run(play(policy, fronts, addresses, load, seconds, seed=number))
                    rows[load.name, policy.name].add(seen)
                    say(seen.row())
    return list(rows.values())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5, help="of each round (default: 5)")
    parser.add_argument("--rounds", type=int, default=3, help="of each load on each router (default: 3)")
    parser.add_argument("--quick", action="store_true", help="one round of four seconds of each")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="policies by name")
    parser.add_argument("--svg", type=Path, help="where to draw the plot")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--route", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("engines", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.engine:
        asyncio.run(serve())
    elif options.route:
        policy = next(policy for policy in POLICIES if policy.name == options.route)
        asyncio.run(route(policy, options.port, options.engines))
    else:
        policies = [policy for policy in POLICIES if not options.only or policy.name in options.only]
        seconds, rounds = (4, 1) if options.quick else (options.seconds, options.rounds)
        loads_before = os.getloadavg()
        rows = compare(policies, LOADS, seconds, rounds, lambda row: print(row, file=sys.stderr))
        print("\n".join([HEAD, *(row.row() for row in rows)]))
        busy = " to ".join(f"{load[0]:.0f}" for load in (loads_before, os.getloadavg()))
        print(
            f"\nThe machine's load average was {busy} on {os.cpu_count()} cores; beside others' work times mean little."
        )
        if options.svg:
            options.svg.write_text(svg(rows))


if __name__ == "__main__":
    main()
