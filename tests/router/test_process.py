"""What a router read is given back to the host, and how often Python looks for what nobody needs."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.unit

# Bodies between small pieces that stay, as in a router, and how much of them the process has afterwards.
READ = """
from pathlib import Path
from serving.router.process import prepare

def resident_mib():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) >> 10

{first}
bytes(16 << 20)  # freed at once, which glibc takes for a sign
before = resident_mib()
bodies, stay = [], []
for _ in range(64):
    bodies.append(b"x" * (1 << 20))
    stay.append(b"y" * 100_000)
del bodies
print(resident_mib() - before)
"""


def kept_mib(first: str) -> int:
    ran = subprocess.run(
        [sys.executable, "-c", READ.format(first=first)], capture_output=True, check=True, text=True
    )
    return int(ran.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's")
def test_bodies_are_given_back_though_small_pieces_stay_between_them() -> None:
    assert kept_mib("prepare()") < 16


# What 100 connections bring in one turn of the loop, again and again, and how often the kernel had to map memory for it.
PIECES = """
import resource
from serving.router.process import prepare

def mapped():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

{first}
for turn in range(20):
    if turn == 10:
        before = mapped()
    pieces = [b"x" * 65_536 for _ in range(100)]
    del pieces
print(mapped() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's")
def test_pieces_of_bodies_are_not_mapped_anew_in_each_turn() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PIECES.format(first="prepare()")], capture_output=True, check=True, text=True
    )
    assert int(ran.stdout) < 1000  # of 16,000


# What is under way with some hundred requests, and how often it was looked through.
UNDER_WAY = """
import gc
from serving.router.process import settle

settle()
before = sum(generation["collections"] for generation in gc.get_stats())
under_way = [[] for _ in range(2000)]
print(sum(generation["collections"] for generation in gc.get_stats()) - before)
"""


def test_requests_under_way_are_not_looked_through_for_circles() -> None:
    ran = subprocess.run([sys.executable, "-c", UNDER_WAY], capture_output=True, check=True, text=True)
    assert int(ran.stdout) == 0
