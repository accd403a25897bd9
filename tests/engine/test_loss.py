"""Two replicas, three slices: what happens when hosts, engines and workers go away under load."""

import asyncio
import json
import re
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.leases import Leases
from support.service import MODEL, Service, two_replicas

from serving import secret
from serving.config import FailoverSpec, RouterSpec
from serving.engine import known_faults
from serving.router.core import RouterCore, Served
from serving.router.http.auth import KeyFile
from serving.router.store_loop import StoreLoop
from serving.simulation.processes import called
from serving.state.records import SliceRecord, SliceState

pytestmark = pytest.mark.engine
BORROWS = "two hosts, 3, and what they lose"  # last of those that share them


@pytest.fixture
def running(leases: Leases) -> Service:
    return two_replicas(leases)


def stream(running: Service, number: int) -> dict[str, Any]:
    """What a client has of a long streamed greedy answer, however it ends: two of completions, two of chat."""
    fields = {"model": MODEL, "max_tokens": 150, "stream": True, "ignore_eos": True, "temperature": 0}
    fields["stream_options"] = {"include_usage": True}
    if number < 2:
        path = "/v1/completions"
        fields |= {"prompt": f"stream {number}", "logprobs": 1}
    else:
        path = "/v1/chat/completions"
        fields |= {
            "messages": [{"role": "user", "content": f"stream {number}"}],
            "stop": ["a host is lost, "],
        }
    with httpx.stream("POST", f"{running.address}{path}", json=fields, timeout=120) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    found: dict[str, Any] = {"end": lines.pop(), "text": "", "tokens": [], "ids": set()}
    for event in map(json.loads, lines):
        if "error" in event:
            return {**found, "error": event["error"]}
        found["ids"].add(event["id"])
        found["usage"] = event.get("usage")
        for choice in event["choices"]:
            assert choice.get("token_ids") is None
            found["text"] += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            found["finish"] = choice["finish_reason"]
            if logprobs := choice.get("logprobs"):
                found["tokens"] += logprobs["tokens"]
                # Not text_offset: vLLM counts it anew in each event, and how many tokens make one varies with load.
    assert len(found.pop("ids")) == 1
    return found


def streams(running: Service) -> list[Future[dict[str, Any]]]:
    """Four long streams, two on each slice."""
    pool = ThreadPoolExecutor(4)
    asked = [pool.submit(stream, running, number) for number in range(4)]
    running.until(
        lambda: [entry.running for entry in running.serving()] == [2, 2], "two streams on each slice"
    )
    return asked


def test_two_replicas_hold_two_whole_slices(running: Service) -> None:
    first, second = running.serving()
    assert first.slice != second.slice
    assert not set(first.hosts) & set(second.hosts)
    assert len(first.hosts) == len(second.hosts) == 2


def test_a_lost_host_s_streams_go_on_word_for_word_on_the_other_slice(running: Service) -> None:
    """Greedy, the same engine build on both: what a client gets is what it would have got."""
    victim = running.serving()[0].slice
    undisturbed = [one.result(timeout=300) for one in streams(running)]
    assert all(one["end"] == "[DONE]" and one["usage"]["completion_tokens"] for one in undisturbed)
    asked = streams(running)
    written = {entry.slice: entry.output_tokens for entry in running.serving()}
    running.until(
        lambda: all(entry.output_tokens > written[entry.slice] + 40 for entry in running.serving()),
        "a good part of every answer",
    )
    assert not any(one.done() for one in asked)
    running.cluster.kill_host(victim, 1)
    killed = time.monotonic()
    running.until(lambda: len(running.serving()) == 1, "the loss to be noticed", within_s=20)
    print(f"killed host noticed after {time.monotonic() - killed:.1f} s")
    for got, expected in zip([one.result(timeout=300) for one in asked], undisturbed, strict=True):
        assert {key: got[key] for key in got if got[key] != expected.get(key)} == {}
    assert running.post("/v1/completions", prompt="still there", max_tokens=2).is_success


@pytest.mark.slow
def test_the_spare_takes_over_for_a_lost_slice(running: Service) -> None:
    used = {entry.slice for entry in running.serving()}
    spare = {one.name for one in running.cluster.status() if all(one.alive)} - used
    spare = spare or {running.cluster.add_slice(running.cluster.status()[0].shape)}
    victim = min(used)
    running.cluster.kill_host(victim, 1)
    killed = time.monotonic()
    running.until(lambda: len(running.serving()) == 1, "the loss to be noticed", within_s=20)
    serving = running.until_serving(2)
    print(f"back at full strength after {time.monotonic() - killed:.1f} s")
    assert {entry.slice for entry in serving} == (used - {victim}) | spare
    assert running.groups() == ["CREATED", "CREATED"]


@pytest.mark.slow
def test_without_a_spare_it_says_what_it_waits_for_and_takes_a_slice_that_comes(running: Service) -> None:
    used = {entry.slice for entry in running.serving()}
    for free in running.cluster.status():
        if free.name not in used:
            running.cluster.kill_slice(free.name)
    victim = min(used)
    running.cluster.kill_host(victim, 0)  # the replica's own host: it can't say goodbye
    running.until(lambda: len(running.serving()) == 1, "the loss to be noticed", within_s=20)
    (wanted,) = running.until(
        lambda: [one for one in running.records().wanted if one.missing_for_s > 5], "a wait to be told"
    )
    assert (wanted.slices, wanted.missing) == (2, 1)
    assert wanted.shape == "v6e 2x4 (2 hosts x 4 chips)"
    shape = running.cluster.status()[0].shape
    added = running.cluster.add_slice(shape)
    serving = running.until_serving(2)
    assert added in {entry.slice for entry in serving}
    assert running.groups() == ["CREATED", "CREATED"]


@pytest.mark.slow
def test_a_hung_worker_is_noticed_and_its_slice_given_up(running: Service) -> None:
    """SIGSTOP on the far host's worker: alive for Ray, silent for the engine."""
    victim = running.serving()[0]
    (worker,) = called("RayWorkerProc", running.cluster.processes(victim.slice, 1))
    worker.send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    running.until(lambda: victim.replica not in {one.replica for one in running.serving()}, "the hang")
    print(f"hung worker noticed after {time.monotonic() - stopped:.1f} s")
    (lost,) = [entry for entry in running.entries() if entry.replica == victim.replica]
    told, _, where = lost.reason.partition("; stacks and last log lines in ")
    assert "the engine or one of its workers has not answered for" in told
    report = Path(where.partition(" on ")[0]).read_text()
    for host in (0, 1):
        assert f"=== host {host} ({victim.hosts[host]})" in report
    assert "is stopped" in report.partition("=== host 1")[2]  # the worker can't write its own stacks
    assert "EngineCore" in report.partition("=== host 1")[0]
    assert "core.py" in report.partition("=== host 1")[0]  # the stacks of vLLM's loop
    running.until_serving(2)
    assert not worker.is_running()


@pytest.mark.slow
def test_a_killed_engine_is_noticed_at_once_and_so_is_a_worker_killed_while_the_next_one_starts(
    running: Service,
) -> None:
    """vLLM's executor watches its workers only once it has them all; until then its EngineCore waits for a dead one."""
    victim = running.serving()[0]
    (engine,) = called("EngineCore", running.cluster.processes(victim.slice, 0))
    engine.kill()
    running.until(
        lambda: victim.replica not in {one.replica for one in running.serving()}, "the death", within_s=20
    )

    def starting() -> list[SliceRecord]:
        return [entry for entry in running.entries() if entry.state is SliceState.STARTING]

    (worker,) = running.until(
        lambda: [
            worker
            for entry in starting()
            for worker in called("RayWorkerProc", running.cluster.processes(entry.slice, 1))
        ],
        "a worker",
    )
    (second,) = (entry.replica for entry in starting())
    worker.kill()
    (lost,) = running.until(
        lambda: [
            entry for entry in running.entries() if (entry.replica, entry.state) == (second, SliceState.LOST)
        ],
        "the worker's death",
        within_s=20,
    )
    # Whoever sees it first: our watch, or EngineCore where it was just about to ask that worker.
    assert re.search("RayWorkerProc .* died|Engine core initialization failed", lost.reason)
    # The next start need not wait for a minute of quarantine.
    running.until(
        lambda: any(failed.replica == second for failed in running.records().slice_failures), "its note"
    )
    running.release_slices()
    running.until_serving(2)
    assert running.groups() == ["CREATED", "CREATED"]


@pytest.mark.slow
async def test_a_request_that_ends_engines_takes_two_slices_and_is_refused_from_then_on(
    running: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through a router of its own, which knows nothing of this fault; the service's routers refuse the request."""

    async def no_metrics() -> str:
        return ""

    before = {entry.replica for entry in running.until_serving(2)}
    monkeypatch.setattr(known_faults, "FAULTS", ())
    monkeypatch.setenv(secret.VARIABLE, running.cluster.secret)
    core = RouterCore(
        # A suspect waits for a slice of its own, which may have to start first: 260 s on a busy machine.
        Served([running.plan()], RouterSpec(failover=FailoverSpec(wait_s=1200))),
        KeyFile(None),
        no_metrics,
        name="beside",
        application=running.application,
    )
    loop = StoreLoop(core, running.store, lambda *_: None)
    await loop.start()
    core.admission.refresh()
    admitting = asyncio.create_task(core.admission.run())
    # Its hosts part ways at the first token; that a few more steps pass was seen once.
    asked = {
        "model": MODEL,
        "prompt": "Hello",
        "max_tokens": 100,
        "ignore_eos": True,
        "echo": True,
        "logprobs": 2,
    }
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(core.app()), base_url="http://beside", timeout=1500
    ) as client:
        poison = await client.post("/v1/completions", json=asked)
        assert not poison.is_success, poison.text
        assert (poison.status_code, poison.json()["error"]["code"]) == (500, "request_ends_engines")
        after = await asyncio.to_thread(running.until_serving, 2)
        assert not before & {entry.replica for entry in after}
        again = await client.post("/v1/completions", json=asked)
        assert (again.status_code, again.json()["error"]["code"]) == (500, "request_ends_engines")
        innocent = await client.post("/v1/completions", json={**asked, "echo": False})
        assert innocent.is_success
    admitting.cancel()
    await loop.close()
    await core.close()
    assert {entry.replica for entry in running.serving()} == {entry.replica for entry in after}
