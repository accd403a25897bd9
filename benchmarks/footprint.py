"""What a service on simulated slices takes: memory by kind of process, and seconds until it serves.

    python benchmarks/footprint.py            # or with --replicas 1

Memory is PSS: pages that several processes share are counted once, split between them.
"""

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
import yaml
from relay import role
from rich.console import Console

from serving.slices import board
from serving.slices.simulation import SimulatedCluster, default_directory
from serving.trial import running

LLAMA = Path(__file__).parent.parent / "deployments" / "llama.yaml"
GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    for replicas in parser.parse_args().replicas:
        print(measure(replicas), flush=True)


def measure(replicas: int) -> str:
    """One service of so many two-host slices, as two markdown tables."""
    console = Console(stderr=True)
    raw = yaml.safe_load(LLAMA.read_text())
    raw["applications"][0]["args"]["models"][0]["replicas"] = replicas
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as deployment:
        yaml.safe_dump(raw, deployment)
        deployment.flush()
        began = time.monotonic()
        with running(
            Path(deployment.name), directory=default_directory("footprint"), console=console
        ) as trial:
            seconds = time.monotonic() - began
            phases = [entry.phases for entry in board.read()]
            memory = memory_by_role(trial.cluster)
    rows = [f"| {name} | {used / GIB:.2f} |" for name, used in memory.most_common()]
    table = [
        f"| {replicas} slices of 2 hosts | GiB (PSS) |",
        "|---|---|",
        *rows,
        f"| all | {memory.total() / GIB:.2f} |",
    ]
    starts = [", ".join(f"{phase} {took:.0f} s" for phase, took in each) for each in phases]
    return "\n".join([*table, "", f"ready after {seconds:.0f} s; replicas: {'; '.join(starts)}", ""])


def memory_by_role(cluster: SimulatedCluster) -> Counter[str]:
    used: Counter[str] = Counter()
    for process in cluster.processes():
        try:
            used[role(" ".join(process.cmdline()))] += process.memory_full_info().pss
        except psutil.Error:
            continue
    return used


if __name__ == "__main__":
    main()
