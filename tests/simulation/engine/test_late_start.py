"""A start that takes longer than it should, on a simulated slice."""

from pathlib import Path

import pytest
from support.leases import Leases
from support.service import service

pytestmark = pytest.mark.cluster
BORROWS = "one chip, 3"


@pytest.mark.slow
def test_a_late_start_says_what_it_waits_for_and_serves_in_the_end(leases: Leases) -> None:
    one_chip = {"generation": "v6e", "topology": "1x1"}
    with service(
        leases, slices=3, engine="simulated", startup="load=30", slice=one_chip, start_s=1, wait=False
    ) as running:
        (reason,) = running.until(
            lambda: [entry.reason for entry in running.entries() if entry.reason], "a late start"
        )
        late, _, where = reason.partition("; stacks and last log lines in ")
        assert late == "the start has taken more than 1 s"
        path, _, host = where.partition(" on ")
        report = Path(path).read_text()
        assert "SimulatorServer._go_through_phases" in report
        (entry,) = running.until_serving(1)
        assert entry.hosts == (host,)
        assert entry.reason == ""
