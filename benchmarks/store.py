"""What slices' records cost Ray's control store: CPU time of the GCS a put and a look, of a thousand slices on a real head.

    python -m benchmarks.store

One process writes and reads in turn, so that each call's part of the GCS's CPU time can be told. No slice runs.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from serving.simulation.cluster import SimulatedCluster
from serving.state.board import Board
from serving.state.gcs import Store, show_token
from serving.state.records import SliceRecord, SliceState
from serving.timings import TIMINGS

SLICES, ROUTERS = 1000, 20
LOOKS = 200


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


def cpu_us(process: psutil.Process, calls: int, do: Callable[[], None]) -> float:
    """CPU time of a process for each of the calls."""
    before = process.cpu_times()
    do()
    after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / calls * 1e6


def main() -> None:
    """Print a table."""
    with tempfile.TemporaryDirectory() as folder:
        cluster = SimulatedCluster.up([], directory=Path(folder) / "head")
        try:
            measure(cluster)
        finally:
            cluster.down()


def measure(cluster: SimulatedCluster) -> None:
    show_token(cluster.environment)
    gcs = next(process for process in cluster.processes() if "gcs_server" in process.name())
    store, board = Store(cluster.address), Board()
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
    looks_s.sort()
    puts_per_s, looks_per_s = SLICES / TIMINGS.beat_s, ROUTERS / TIMINGS.beat_s
    cores = (put_us * puts_per_s + look_us * looks_per_s) / 1e6
    print("| GCS, µs a put | GCS, µs a look at 1,000 slices | look p50, ms | p99, ms | cores at 20 routers |")
    print("|---|---|---|---|---|")
    p50_ms, p99_ms = looks_s[LOOKS // 2] * 1e3, looks_s[LOOKS * 99 // 100] * 1e3
    print(f"| {put_us:.0f} | {look_us:,.0f} | {p50_ms:.1f} | {p99_ms:.1f} | {cores:.2f} |")


if __name__ == "__main__":
    main()
