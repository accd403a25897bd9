"""What the records of a fleet cost Ray's control store: CPU time of a real GCS, and how old the records are that routers see.

    python -m benchmarks.store

First one process writes and reads in turn, so that each call's part of the GCS's CPU time can be told. Then six processes
write the beats of many slices, and four read as twenty routers do, at the pace of a service. No slice runs.
"""

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from serving.simulation.cluster import SimulatedCluster
from serving.state.board import Board
from serving.state.gcs import Store, show_token
from serving.state.records import BEATING, SliceRecord, SliceState
from serving.timings import TIMINGS

SLICES, ROUTERS = 1000, 20
FLEETS = (100, 250, 500, 1000)
WRITERS, READERS = 6, 4  # processes
SECONDS = 20.0
LOOKS = 200
_WRITTEN_MS = BEATING.index("output_tokens")  # a beat has its time there


@dataclass
class Seen:
    """What one process did in SECONDS."""

    puts: int = 0
    bytes: int = 0  # of beats that were read
    looks_s: list[float] = field(default_factory=list)
    ages_s: list[float] = field(default_factory=list)  # of records, when a look has brought them


def record(number: int) -> SliceRecord:
    return SliceRecord(
        f"{number:032x}",
        "llama",
        SliceState.SERVING,
        "serving",
        "v6e 2x4 (2 hosts x 4 chips)",
        application="default",
        slice=f"slice-{number}",
        hosts=("10.0.0.1", "10.0.0.2"),
        address="http://10.0.0.1:8000",
        phases=(("placing", 1.0), ("loading weights", 33.2)),
        prompt_tokens=123456,
        output_tokens=9876,
    )


def write(address: str, numbers: Sequence[int]) -> Seen:
    """The beats of these slices, spread over each beat's time."""
    store, seen, began_s = Store(address), Seen(), time.monotonic()
    records = [record(number) for number in numbers]
    while (now_s := time.monotonic()) - began_s < SECONDS:
        entry = records[seen.puts % len(records)]
        load = [seen.puts, *entry.load[1:]]
        load[_WRITTEN_MS] = round(time.time() * 1e3)
        store.put_slice(entry.beaten(load))
        seen.puts += 1
        time.sleep(max(0.0, began_s + seen.puts * TIMINGS.beat_s / len(records) - now_s))
    return seen


def read(address: str, routers: int) -> Seen:
    """What so many routers read, each once a beat."""
    store, seen, began_s = Store(address), Seen(), time.monotonic()
    boards = [Board() for _ in range(routers)]
    for number in range(int(SECONDS / TIMINGS.beat_s) * routers):
        if time.monotonic() - began_s > SECONDS:
            break
        board, asked_s = boards[number % routers], time.monotonic()
        found = store.look(board, "default")
        seen.looks_s.append(time.monotonic() - asked_s)
        seen.bytes += sum(map(len, found.beats.values()))
        for _ in board.take(found.beats, found.fixed):
            pass
        now_ms = time.time() * 1e3
        seen.ages_s += [(now_ms - entry.output_tokens) / 1e3 for entry in board.slices if number >= routers]
        time.sleep(max(0.0, began_s + (number + 1) * TIMINGS.beat_s / routers - time.monotonic()))
    return seen


def cpu_us(process: psutil.Process, calls: int, do: Callable[[], None]) -> float:
    """CPU time of a process for each of the calls."""
    before = process.cpu_times()
    do()
    after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / calls * 1e6


def main() -> None:
    """Print two tables."""
    with tempfile.TemporaryDirectory() as folder:
        cluster = SimulatedCluster.up([], directory=Path(folder) / "head")
        try:
            show_token(cluster.environment)
            gcs = next(process for process in cluster.processes() if "gcs_server" in process.name())
            calls(cluster.address, gcs)
            fleets(cluster.address, gcs)
        finally:
            cluster.down()


def calls(address: str, gcs: psutil.Process) -> None:
    """The table of single calls."""
    store, board = Store(address), Board()
    records = [record(number) for number in range(SLICES)]
    looks_s: list[float] = []

    def put() -> None:
        for number, entry in enumerate(records):
            store.put_slice(entry.beaten([number, *entry.load[1:]]))

    def look() -> None:
        for _ in range(LOOKS):
            begun_s = time.monotonic()
            found = store.look(board, "default")
            looks_s.append(time.monotonic() - begun_s)
            for _ in board.take(found.beats, found.fixed):
                pass

    put()
    put_us, look_us = cpu_us(gcs, SLICES, put), cpu_us(gcs, LOOKS, look)
    puts_per_s, looks_per_s = SLICES / TIMINGS.beat_s, ROUTERS / TIMINGS.beat_s
    cores = (put_us * puts_per_s + look_us * looks_per_s) / 1e6
    print("| GCS, µs a put | GCS, µs a look at 1,000 slices | look p50, ms | p99, ms | cores at 20 routers |")
    print("|---|---|---|---|---|")
    p50_ms, p99_ms = _at(looks_s, 50) * 1e3, _at(looks_s, 99) * 1e3
    print(f"| {put_us:.0f} | {look_us:,.0f} | {p50_ms:.1f} | {p99_ms:.1f} | {cores:.2f} |\n")
    for entry in records:
        store.delete_slice(entry)


def fleets(address: str, gcs: psutil.Process) -> None:
    """The table of whole fleets."""
    print(
        "| slices | puts/s | looks/s | GCS, cores | read, MB/s | look p50, ms | p99, ms | age p50, s | p99, s |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    with multiprocessing.get_context("spawn").Pool(WRITERS + READERS) as pool:
        for slices in FLEETS:
            before = gcs.cpu_times()
            work = [pool.apply_async(write, (address, range(at, slices, WRITERS))) for at in range(WRITERS)]
            work += [pool.apply_async(read, (address, ROUTERS // READERS)) for _ in range(READERS)]
            done = [one.get(SECONDS * 5) for one in work]
            after = gcs.cpu_times()
            looks_s = [each for seen in done for each in seen.looks_s]
            ages_s = [each for seen in done for each in seen.ages_s]
            figures = (
                f"{sum(seen.puts for seen in done) / SECONDS:,.0f}",
                f"{len(looks_s) / SECONDS:.0f}",
                f"{(after.user + after.system - before.user - before.system) / SECONDS:.2f}",
                f"{sum(seen.bytes for seen in done) / SECONDS / 1e6:.1f}",
                *(f"{_at(looks_s, percent) * 1e3:.0f}" for percent in (50, 99)),
                *(f"{_at(ages_s, percent):.2f}" for percent in (50, 99)),
            )
            print(f"| {slices:,} | {' | '.join(figures)} |", flush=True)


def _at(values: Sequence[float], percent: int) -> float:
    return sorted(values)[len(values) * percent // 100]


if __name__ == "__main__":
    main()
