"""What a service on simulated slices takes: memory by kind of process, and seconds until it serves.

    python -m benchmarks.footprint            # or with --replicas 1

Memory is PSS: pages that several processes share are counted once, split between them.
"""

import argparse
import time

from rich.console import Console

from benchmarks import accounting
from benchmarks.service import serving

_GIB = 2**30


def main() -> None:
    accounting.unwind_on_sigterm()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    for replicas in parser.parse_args().replicas:
        print(measure(replicas), flush=True)


def measure(replicas: int) -> str:
    """One service of so many two-host slices, as two markdown tables."""
    began = time.monotonic()
    with serving("llama", replicas, engine="vllm", console=Console(stderr=True)) as service:
        seconds = time.monotonic() - began
        phases = [entry.phases for entry in service.trial.store.slices()]
        memory = accounting.pss_bytes(service.processes())
    rows = [f"| {name} | {used / _GIB:.2f} |" for name, used in memory.most_common()]
    table = [
        f"| {replicas} slices of 2 hosts | GiB (PSS) |",
        "|---|---|",
        *rows,
        f"| all | {memory.total() / _GIB:.2f} |",
    ]
    starts = [", ".join(f"{phase} {took:.0f} s" for phase, took in each) for each in phases]
    return "\n".join([*table, "", f"ready after {seconds:.0f} s; replicas: {'; '.join(starts)}", ""])


if __name__ == "__main__":
    main()
