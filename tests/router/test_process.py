"""What a router read is given back to the host."""

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
