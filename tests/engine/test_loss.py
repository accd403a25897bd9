"""Two replicas, three slices: what happens when hosts, engines and workers go away under load."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from service import MODEL, Service, leftovers, service

from serving.slices import board

pytestmark = pytest.mark.engine
STALL_S = 15  # more than a step takes while another engine starts on the same two cores


@pytest.fixture(scope="module")
def running(short_directory: Path) -> Iterator[Service]:
    with service(short_directory, slices=3, replicas=2, stall_s=STALL_S) as started:
        yield started
    assert leftovers(started.cluster.id) == []


def stream(running: Service, prompt: str) -> list[str]:
    """The data lines of a long streamed answer, however it ends."""
    fields = {"model": MODEL, "prompt": prompt, "max_tokens": 400, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{running.address}/v1/completions", json=fields, timeout=120) as answer:
        return [line for line in answer.iter_lines() if line]


def errors(lines: list[str]) -> list[dict[str, str]]:
    pieces = (json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]")
    return [piece["error"] for piece in pieces if "error" in piece]


def on_both_slices(running: Service) -> list[Future[list[str]]]:
    """Four long streams, two on each slice."""
    pool = ThreadPoolExecutor(4)
    streams = [pool.submit(stream, running, f"stream {number}") for number in range(4)]
    running.until(
        lambda: [entry.running for entry in running.serving()] == [2, 2], 30, "two streams on each slice"
    )
    return streams


def called(name: str, processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if name in " ".join(process.cmdline())]


def groups(running: Service) -> list[str]:
    """The states of all placement groups that are not removed."""
    script = "import ray; ray.init(log_to_driver=False); print(*(g['state'] for g in ray.util.placement_group_table().values()))"
    shown = subprocess.run(
        [sys.executable, "-c", script],
        env=running.cluster.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    return sorted(state for state in shown.split() if state != "REMOVED")


def test_two_replicas_hold_two_whole_slices(running: Service) -> None:
    first, second = running.serving()
    assert first.slice != second.slice
    assert not set(first.hosts) & set(second.hosts)
    assert len(first.hosts) == len(second.hosts) == 2


def test_a_lost_host_ends_its_slice_s_streams_with_an_error_and_the_spare_takes_over(
    running: Service,
) -> None:
    used = {entry.slice for entry in running.serving()}
    victim = min(used)
    streams = on_both_slices(running)
    running.cluster.kill_host(victim, 1)
    killed = time.monotonic()
    running.until(lambda: len(running.serving()) == 1, 5, "the loss to be noticed")
    print(f"killed host noticed after {time.monotonic() - killed:.1f} s")
    ends = [one.result(timeout=60) for one in streams]
    assert sorted(bool(errors(lines)) for lines in ends) == [False, False, True, True]
    assert running.post("/v1/completions", prompt="still there", max_tokens=2).is_success
    serving = running.until_serving(2)
    print(f"back at full strength after {time.monotonic() - killed:.1f} s")
    spare = {one.name for one in running.cluster.status()} - used
    assert {entry.slice for entry in serving} == (used - {victim}) | spare
    assert groups(running) == ["CREATED", "CREATED"]


def test_without_a_spare_it_says_what_it_waits_for_and_takes_a_slice_that_comes(running: Service) -> None:
    victim = running.serving()[0].slice
    running.cluster.kill_host(victim, 0)  # the replica's own host: it can't say goodbye
    running.until(lambda: len(running.serving()) == 1, 15, "the loss to be noticed")
    (wanted,) = running.until(
        lambda: [one for one in board.wanted() if one.missing_for_s > 5], 60, "a wait to be told"
    )
    assert (wanted.slices, wanted.missing) == (2, 1)
    assert wanted.shape == "v6e 2x4 (2 hosts x 4 chips)"
    shape = running.cluster.status()[0].shape
    added = running.cluster.add_slice(shape)
    serving = running.until_serving(2)
    assert added in {entry.slice for entry in serving}
    assert groups(running) == ["CREATED", "CREATED"]


def test_a_hung_worker_is_noticed_and_its_slice_given_up(running: Service) -> None:
    """SIGSTOP on the far host's worker: alive for Ray, silent for the engine."""
    victim = running.serving()[0]
    (worker,) = called("RayWorkerProc", running.cluster.processes(victim.slice, 1))
    worker.send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    running.until(
        lambda: victim.replica not in {one.replica for one in running.serving()}, STALL_S + 10, "the hang"
    )
    print(f"hung worker noticed after {time.monotonic() - stopped:.1f} s")
    running.until_serving(2)
    assert not worker.is_running()


def test_a_killed_engine_is_noticed_at_once_and_so_is_a_worker_killed_while_the_next_one_starts(
    running: Service,
) -> None:
    """vLLM's executor watches its workers only once it has them all; until then its EngineCore waits for a dead one."""
    victim = running.serving()[0]
    (engine,) = called("EngineCore", running.cluster.processes(victim.slice, 0))
    engine.kill()
    running.until(lambda: victim.replica not in {one.replica for one in running.serving()}, 5, "the death")

    def starting() -> board.Entry:
        return next(entry for entry in running.entries() if entry.state is board.State.STARTING)

    (worker,) = running.until(
        lambda: called("RayWorkerProc", running.cluster.processes(starting().slice, 1)), 120, "a worker"
    )
    second = starting().replica
    worker.kill()
    (lost,) = running.until(
        lambda: [
            entry for entry in running.entries() if (entry.replica, entry.state) == (second, board.State.LOST)
        ],
        15,
        "the worker's death",
    )
    assert "RayWorkerProc" in lost.reason
    running.until_serving(2)
    assert groups(running) == ["CREATED", "CREATED"]
