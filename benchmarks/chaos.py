"""What breaks, and what clients notice of it: a table of faults by measured columns.

    make chaos                                # or with ARGS="--faults engine router --json chaos.json"
    make chaos ARGS="--engine vllm --faults host engine replica preempted"

Two slices of two hosts each serve and a third is spare, all simulated; so is the engine (no model, only its timing) unless
it is to be vLLM with the stand-in model. Everything else is as it is: Serve, HAProxy, two routers. Clients ask one
streamed or whole answer after the other; after a while a fault (faults.py) happens under them, and they go on until the
service is at full strength again, on the spare. Every answer is held to what the same question was answered before: text
word for word, usage and finish_reason. One that differs, ends early or ends with an error counts as failed.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import yaml
from rich.console import Console

from benchmarks import accounting
from benchmarks.faults import (
    FAULTS,
    NAMESPACES_ONLY,
    SIMULATED_ONLY,
    VLLM_ONLY,
    Belongings,
    Fault,
    Left,
    controllers,
    mend,
    routers,
)
from serving.cli.simulated_service import SimulatedService, answers, running
from serving.simulation.cluster import default_directory
from serving.simulation.network import LOOPBACK, best
from serving.simulation.ports import free_port

LLAMA = Path(__file__).parent.parent / "deployments" / "llama.yaml"
SHAPE = {"generation": "v6e", "topology": "2x4", "hosts": 2}
ROUTERS = 2
SENTINEL_SHARE = 0.2
LEAD_S = 3.0  # of load before the fault, and after the service has recovered
LONGEST_S = 240.0
LOOK_S = 0.1
LOOK_AT_S = 0.5  # for an answer, or it is none


@dataclass(frozen=True)
class Scale:
    """How much an engine is asked: vLLM computes on the cores that all else shares."""

    clients: int
    tokens: int
    stall_s: float  # after which a slice whose engine hangs gives itself up


SCALES = {"simulated": Scale(16, 200, 6.0), "vllm": Scale(4, 150, 15.0)}


@dataclass
class Outcome:
    """What was measured while one fault happened. `failed` of `requests`, in what `errors` says."""

    fault: str
    requests: int = 0
    failed: int = 0
    resumed: int = 0
    longest_gap_s: float = 0.0
    detected_s: float | None = None
    recovered_s: float | None = None
    left: Left | None = None  # of a slice that was given up
    load_average: float = 0.0
    errors: list[str] = field(default_factory=list)


COLUMNS = {
    "detected_s": "noticed after, s",
    "requests": "requests",
    "failed": "failed",
    "resumed": "continued or retried",
    "longest_gap_s": "longest silence in a stream, s",
    "recovered_s": "back at full strength, s",
    "left": "left: groups, processes, ports",
}

QUESTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "Tell me a story"}],
            "stream_options": {"include_usage": True},
        },
    ),
    ("/v1/completions", {"prompt": "Once upon a time", "logprobs": 1}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "And another"}], "stream": False}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "The last"}], "stop": ["never said."]},
    ),
)


class Load:
    """Clients that ask until they are told to stop."""

    def __init__(self, address: str, model: str, tokens: int = 200, engine: str = "simulated") -> None:
        self._address = address
        self._model = model
        self._tokens = tokens
        self._engine = engine
        self._right: dict[int, Any] = {}
        self.outcome = Outcome("")
        self.over = False

    async def learn(self, session: aiohttp.ClientSession) -> None:
        """The right answers, of a service that nothing happens to."""
        deadline_s = time.monotonic() + LONGEST_S
        while len(self._right) < len(QUESTIONS):
            try:
                self._right[len(self._right)] = await self._ask(session, len(self._right))
            except (aiohttp.ClientError, AnswerError):  # the routers may be coming up still
                if time.monotonic() > deadline_s:
                    raise
                await asyncio.sleep(1)

    async def client(self, session: aiohttp.ClientSession, number: int) -> None:
        while not self.over:
            self.outcome.requests += 1
            try:
                found = await self._ask(session, number % len(QUESTIONS))
                wrong = "" if found == self._right[number % len(QUESTIONS)] else "another answer"
            except (aiohttp.ClientError, AnswerError, TimeoutError) as error:
                wrong = f"{type(error).__name__}: {error}"
                # Where nobody listens, a failure a client and second.
                await asyncio.sleep(1 if isinstance(error, aiohttp.ClientConnectorError) else 0.1)
            if wrong:
                self.outcome.failed += 1
                self.outcome.errors.append(wrong[:200])
            number += 1

    async def _ask(self, session: aiohttp.ClientSession, number: int) -> Any:
        path, more = QUESTIONS[number]
        fields = {"model": self._model, "max_tokens": self._tokens, "ignore_eos": True}
        fields |= {"temperature": 0, "stream": True, **more}
        async with session.post(self._address + path, json=fields) as response:
            if response.status != 200:
                raise AnswerError(f"{response.status} {(await response.text())[:120]}")
            if not fields["stream"]:
                body = await response.json()
                return [body["choices"][0]["message"]["content"], body["usage"]]
            return await self._read(response)

    async def _read(self, response: aiohttp.ClientResponse) -> Any:
        data, last_s = b"", time.monotonic()
        async for piece in response.content.iter_any():
            now_s = time.monotonic()
            if data:
                self.outcome.longest_gap_s = max(self.outcome.longest_gap_s, now_s - last_s)
            last_s = now_s
            data += piece
        *events, end = [event.removeprefix(b"data: ") for event in data.split(b"\n\n") if event] or [b""]
        if end != b"[DONE]":
            raise AnswerError(f"ends with {end[:150]!r}")
        bodies = [json.loads(event) for event in events]
        for body in bodies:
            if "error" in body:
                raise AnswerError(body["error"]["message"])
            del body["created"]
        if len({body.pop("id") for body in bodies}) != 1:
            raise AnswerError("parts of two answers")
        return bodies if self._engine == "simulated" else joined(bodies)


def joined(bodies: list[dict[str, Any]]) -> Any:
    """An answer put together: how many of vLLM's tokens make an event depends on how busy the machine is."""
    text, finish, usage = "", None, None
    for body in bodies:
        usage = body.get("usage") or usage
        for choice in body["choices"]:
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            finish = choice["finish_reason"] or finish
    return [text, finish, usage]


class AnswerError(Exception):
    """An answer that is not one."""


def moved(trial: SimulatedService) -> int:
    """Requests that routers have sent to a slice more than once."""
    page = httpx.get(f"{trial.address}/metrics", timeout=10).text
    names = ("tpu_serving_retries_total{", "tpu_serving_continuations_total{")
    return round(sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(names)))


class Watch:
    """Looks at what routers say of the slices, and notes when one no longer counts as serving."""

    def __init__(self, address: str, replica: str) -> None:
        self._address = address
        self._replica = replica
        self._over = threading.Event()
        self.seen_s: float | None = None  # by the monotonic clock
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        with httpx.Client(base_url=self._address, timeout=10) as client:
            while self.seen_s is None and not self._over.wait(LOOK_S):
                try:
                    models = client.get("/status.json").raise_for_status().json()["models"]
                except httpx.HTTPError:
                    continue  # routers are away too
                slices = [slice_ for model in models for slice_ in model["slices"]]
                if self._replica not in {one["replica"] for one in slices if one["state"] == "serving"}:
                    self.seen_s = time.monotonic()


async def play(trial: SimulatedService, fault: Fault) -> Outcome:
    """Load, the fault, and load until the service is back; then what was left, and a spare for the next fault."""
    engine = trial.cluster.engine
    scale = SCALES[engine]
    load = Load(trial.address, trial.plans[0].model.name, scale.tokens, engine)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=60)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    until_s = time.monotonic() + LONGEST_S
    while not await asyncio.to_thread(whole, trial, fault.slices) and time.monotonic() < until_s:  # noqa: ASYNC110
        await asyncio.sleep(1)  # a busy machine loses slices of itself
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        await load.learn(session)
        load.outcome = outcome = Outcome(fault.name)
        before = await asyncio.to_thread(moved, trial)
        clients = [asyncio.create_task(load.client(session, number)) for number in range(scale.clients)]
        await asyncio.sleep(LEAD_S)
        victim = max((one for one in trial.store.slices() if one.serves), key=lambda one: one.running)
        belongings = await asyncio.to_thread(Belongings, trial, victim, fault.slices)
        watch = Watch(trial.address, victim.replica)
        began_s = time.monotonic()
        await asyncio.to_thread(fault.happens, trial, victim)
        await asyncio.sleep(fault.follows_s)
        await asyncio.to_thread(fault.follows, trial, victim)
        while time.monotonic() - began_s < LONGEST_S:
            gone = watch.seen_s is not None or not fault.takes_slice
            if gone and await asyncio.to_thread(whole, trial, fault.slices):
                outcome.recovered_s = time.monotonic() - began_s
                break
            await asyncio.sleep(0.2)
        await asyncio.to_thread(watch.close)
        if watch.seen_s is not None:
            outcome.detected_s = watch.seen_s - began_s
        outcome.load_average = os.getloadavg()[0]
        await asyncio.sleep(LEAD_S)
        load.over = True
        await asyncio.gather(*clients)
        await asyncio.sleep(6)  # Ray's agents gather what routers count every few seconds
        after = await asyncio.to_thread(moved, trial)
        outcome.resumed = after - before if after >= before else after  # new routers count from none
    if fault.takes_slice:
        await asyncio.to_thread(belongings.resume, victim)
        outcome.left = await asyncio.to_thread(belongings.left)
        await asyncio.to_thread(mend, trial, victim)
    return outcome


def whole(trial: SimulatedService, slices: int) -> bool:
    """As many slices and routers as the YAML asks for, a Serve controller, and a front door that answers."""
    serving = [one for one in trial.store.slices() if one.serves]
    healthy = [one for one in serving if answers(f"{one.address}/health", LOOK_AT_S)]
    there = len(routers(trial.cluster)) == ROUTERS and len(controllers(trial.cluster)) == 1
    return (
        len(healthy) == len(serving) == slices and there and answers(f"{trial.address}/v1/models", LOOK_AT_S)
    )


def table(outcomes: Sequence[Outcome]) -> str:
    tells = {fault.name: fault.tells for fault in FAULTS}
    lines = [f"| fault | {' | '.join(COLUMNS.values())} |", "|---|" + "---|" * len(COLUMNS)]
    for outcome in outcomes:
        cells = [getattr(outcome, name) for name in COLUMNS]
        shown = [
            "-" if cell is None else f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in cells
        ]
        lines.append(f"| {outcome.fault}: {tells[outcome.fault]} | {' | '.join(shown)} |")
    return "\n".join(lines)


def deployment(path: Path, engine: str, slices: int) -> None:
    raw = yaml.safe_load(LLAMA.read_text())
    raw["http_options"]["port"] = free_port()
    arguments = raw["applications"][0]["args"]
    arguments["models"][0] |= {"slice": SHAPE, "replicas": slices, "stall_s": SCALES[engine].stall_s}
    arguments["router"] = {"replicas": ROUTERS}
    if slices > 2:  # fewer can't tell which of them is wrong
        arguments["router"]["sentinel"] = {"share": SENTINEL_SHARE}
    path.write_text(yaml.safe_dump(raw))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = [fault.name for fault in FAULTS]
    parser.add_argument("--engine", choices=SCALES, default="simulated")
    parser.add_argument("--faults", nargs="+", choices=names)
    parser.add_argument("--name", default="chaos", help="name of the simulation (default: chaos)")
    parser.add_argument("--json", type=Path, help="write every outcome here, with what failed")
    options = parser.parse_args(arguments)
    accounting.unwind_on_sigterm()
    other, others = ("vllm", VLLM_ONLY) if options.engine == "simulated" else ("simulated", SIMULATED_ONLY)
    impossible = dict.fromkeys(others, f"--engine {other}")
    if best() == LOOPBACK:
        impossible |= dict.fromkeys(NAMESPACES_ONLY, "hosts in network namespaces (root and iproute2)")
    chosen = options.faults or [name for name in names if name not in impossible]
    if unmet := {name: impossible[name] for name in chosen if name in impossible}:
        parser.error("; ".join(f"{name} needs {what}" for name, what in unmet.items()))
    console, outcomes = Console(stderr=True), []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chaos.yaml"
        for slices in sorted({fault.slices for fault in FAULTS if fault.name in chosen}):
            deployment(path, options.engine, slices)
            directory = default_directory(options.name)
            with running(path, spare=1, directory=directory, console=console, engine=options.engine) as trial:
                for fault in FAULTS:
                    if fault.name in chosen and fault.slices == slices:
                        outcomes.append(asyncio.run(play(trial, fault)))
                        console.print(outcomes[-1], highlight=False)
                        if options.json:
                            options.json.write_text(json.dumps([asdict(one) for one in outcomes], indent=1))
    print(table(outcomes))


if __name__ == "__main__":
    sys.exit(main())
