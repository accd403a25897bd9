"""What breaks, and what clients notice of it: a table of faults by measured columns.

    make chaos                                # or with ARGS="--faults engine router --json chaos.json"

Simulated engines (no model, only its timing) on simulated one-chip slices, everything else as it is: Serve, HAProxy, two
routers. CLIENTS clients ask one streamed or whole answer after the other; after a while a fault happens under them, and
they go on until the service is at full strength again. Every answer is held to what the same question was answered
before: text word for word, usage and finish_reason. One that differs, ends early or ends with an error counts as failed.

A row is a Fault, a column a figure of Outcome: both lists are there to be added to.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import psutil
import yaml
from rich.console import Console

from serving.errors import SimulationError
from serving.slices import board
from serving.slices.simulation import SimulatedCluster, default_directory
from serving.trial import Trial, running

LLAMA = Path(__file__).parent.parent / "deployments" / "llama.yaml"
CLIENTS = 16
SLICES = 3
ROUTERS = 2
STALL_S = 6.0  # after which a slice that hangs gives itself up
LEAD_S = 3.0  # of load before the fault, and after the service has recovered
LONGEST_S = 120.0
TOKENS = 200
NOTICE_S = 5


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong, by name: `happens` is done to a running service, to this slice."""

    name: str
    tells: str
    happens: Callable[[Trial, board.Entry], None]
    heals: Callable[[Trial, board.Entry], None] = lambda _, __: None


def told(**faults: Any) -> Callable[[Trial, board.Entry], None]:
    def tell(_: Trial, victim: board.Entry) -> None:
        httpx.post(f"{victim.address}/simulator/faults", json=faults, timeout=5)

    return tell


def kill_replica(trial: Trial, victim: board.Entry) -> None:
    port = int(victim.address.rpartition(":")[2])
    for process in trial.cluster.processes(victim.slice, 0):
        if any(one.laddr and one.laddr.port == port for one in process.net_connections()):
            process.kill()


def kill_host(trial: Trial, victim: board.Entry) -> None:
    trial.cluster.kill_host(victim.slice, 0)


def start_host(trial: Trial, victim: board.Entry) -> None:
    """Ray gives a node 30 s to start, which a busy machine may not make."""
    for left in reversed(range(3)):
        try:
            trial.cluster.restart_host(victim.slice, 0)
        except SimulationError:
            if not left:
                raise
            trial.cluster.kill_host(victim.slice, 0)
        else:
            return


def give_notice(trial: Trial, victim: board.Entry) -> None:
    """As GKE's preemption does through the pods' preStop hook: Ray is told that the host will go in a few seconds."""
    find = "import ray; ray.init(log_to_driver=False); print(*(n['NodeID'] for n in ray.nodes() if n['Alive'] and n['NodeManagerAddress'] == %r))"
    environment = trial.cluster.environment
    python = [sys.executable, "-c", find % victim.hosts[0]]
    node = subprocess.run(python, env=environment, capture_output=True, text=True, check=True, timeout=60)
    drain = ["ray", "drain-node", "--address", trial.cluster.address, "--node-id", node.stdout.split()[-1]]
    drain += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "chaos"]
    drain += ["--deadline-remaining-seconds", str(NOTICE_S)]
    subprocess.run(drain, env=environment, capture_output=True, check=True, timeout=60)


def take_host(trial: Trial, victim: board.Entry) -> None:
    time.sleep(NOTICE_S)
    kill_host(trial, victim)
    start_host(trial, victim)


def routers(cluster: SimulatedCluster) -> list[psutil.Process]:
    found = []
    for process in cluster.processes():
        with contextlib.suppress(psutil.Error):  # it has ended since
            if ":router" in " ".join(process.cmdline()):
                found.append(process)
    return found


def kill_router(trial: Trial, _: board.Entry) -> None:
    routers(trial.cluster)[0].send_signal(signal.SIGKILL)


FAULTS = (
    Fault("nothing", "for comparison", lambda _, __: None),
    Fault("engine", "an engine dies: its streams carry an error", told(die=True)),
    Fault("replica", "SIGKILL to a slice's replica: connections break", kill_replica),
    Fault("host", "a host loses its power, and comes back", kill_host, start_host),
    Fault("notice", "Ray is told that a host will go in 5 s, and it goes", give_notice, take_host),
    Fault("hang", "an engine stops computing, connections stand", told(hang=True)),
    Fault(
        "errors", "half of a slice's requests are answered with 500", told(error_rate=0.5), told(error_rate=0)
    ),
    Fault("router", "SIGKILL to one of two routers", kill_router),
)


@dataclass
class Outcome:
    """What was measured while one fault happened. `failed` of `requests`, in what `errors` says."""

    fault: str
    requests: int = 0
    failed: int = 0
    resumed: int = 0
    longest_gap_s: float = 0.0
    recovered_s: float = 0.0
    errors: list[str] = field(default_factory=list)


COLUMNS = {
    "requests": "requests",
    "failed": "failed",
    "resumed": "continued or retried",
    "longest_gap_s": "longest silence in a stream, s",
    "recovered_s": "back at full strength, s",
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

    def __init__(self, address: str, model: str) -> None:
        self._address = address
        self._model = model
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
                await asyncio.sleep(0.1)
            if wrong:
                self.outcome.failed += 1
                self.outcome.errors.append(wrong[:200])
            number += 1

    async def _ask(self, session: aiohttp.ClientSession, number: int) -> Any:
        path, more = QUESTIONS[number]
        fields = {"model": self._model, "max_tokens": TOKENS, "ignore_eos": True, "stream": True, **more}
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
        return bodies


class AnswerError(Exception):
    """An answer that is not one."""


def moved(trial: Trial) -> int:
    """Requests that routers have sent to a slice more than once."""
    page = httpx.get(f"{trial.address}/metrics", timeout=10).text
    names = ("tpu_serving_retries_total{", "tpu_serving_continuations_total{")
    return round(sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(names)))


async def play(trial: Trial, fault: Fault) -> Outcome:
    """Load, the fault, and load until the service is back."""
    load = Load(trial.address, trial.plans[0].model.name)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=60)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        await load.learn(session)
        load.outcome = outcome = Outcome(fault.name)
        before = await asyncio.to_thread(moved, trial)
        clients = [asyncio.create_task(load.client(session, number)) for number in range(CLIENTS)]
        await asyncio.sleep(LEAD_S)
        victim = max((one for one in board.read() if one.serves), key=lambda one: one.running)
        await asyncio.to_thread(fault.happens, trial, victim)
        began_s = time.monotonic()
        await asyncio.sleep(1)
        await asyncio.to_thread(fault.heals, trial, victim)
        while not whole(trial) and time.monotonic() - began_s < LONGEST_S:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        outcome.recovered_s = time.monotonic() - began_s - 1
        await asyncio.sleep(LEAD_S)
        load.over = True
        await asyncio.gather(*clients)
        await asyncio.sleep(6)  # Ray's agents gather what routers count every few seconds
        outcome.resumed = await asyncio.to_thread(moved, trial) - before
    return outcome


def whole(trial: Trial) -> bool:
    """As many slices and routers as the YAML asks for."""
    serving = [one for one in board.read() if one.serves]
    healthy = [one for one in serving if not httpx_fails(one)]
    return len(healthy) == len(serving) == SLICES and len(routers(trial.cluster)) == ROUTERS


def httpx_fails(entry: board.Entry) -> bool:
    try:
        return not httpx.get(f"{entry.address}/health", timeout=0.5).is_success
    except httpx.TransportError:
        return True


def table(outcomes: Sequence[Outcome]) -> str:
    tells = {fault.name: fault.tells for fault in FAULTS}
    lines = [f"| fault | {' | '.join(COLUMNS.values())} |", "|---|" + "---|" * len(COLUMNS)]
    for outcome in outcomes:
        cells = [getattr(outcome, name) for name in COLUMNS]
        shown = [f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in cells]
        lines.append(f"| {outcome.fault}: {tells[outcome.fault]} | {' | '.join(shown)} |")
    return "\n".join(lines)


def deployment(path: Path) -> None:
    raw = yaml.safe_load(LLAMA.read_text())
    with socket.create_server(("127.0.0.1", 0)) as probe:
        raw["http_options"]["port"] = probe.getsockname()[1]
    arguments = raw["applications"][0]["args"]
    one_chip = {"generation": "v6e", "topology": "1x1"}
    arguments["models"][0] |= {"slice": one_chip, "replicas": SLICES, "stall_s": STALL_S}
    arguments["router"] = {"replicas": ROUTERS}
    path.write_text(yaml.safe_dump(raw))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = [fault.name for fault in FAULTS]
    parser.add_argument("--faults", nargs="+", choices=names, default=names)
    parser.add_argument("--name", default="chaos", help="name of the simulation (default: chaos)")
    parser.add_argument("--json", type=Path, help="write every outcome here, with what failed")
    options = parser.parse_args(arguments)
    console, outcomes = Console(stderr=True), []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chaos.yaml"
        deployment(path)
        with running(
            path, directory=default_directory(options.name), console=console, engine="simulated"
        ) as trial:
            for fault in FAULTS:
                if fault.name in options.faults:
                    outcomes.append(asyncio.run(play(trial, fault)))
                    console.print(outcomes[-1], highlight=False)
                    if options.json:
                        options.json.write_text(json.dumps([asdict(one) for one in outcomes], indent=1))
    print(table(outcomes))


if __name__ == "__main__":
    sys.exit(main())
