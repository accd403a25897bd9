"""Two engines serve; a third starts on a host whose chips compute with a wrong weight."""

import httpx
import pytest
from support.leases import Leases
from support.service import service

pytestmark = [pytest.mark.engine, pytest.mark.slow]
BORROWS = "one chip, 3"


def test_an_engine_with_a_wrong_weight_does_not_begin_to_serve(leases: Leases) -> None:
    one_chip = {"generation": "v6e", "topology": "1x1"}
    with service(
        leases, slices=3, slice=one_chip, replicas=2, router={"sentinel": {"share": 0.001}}
    ) as running:
        right = running.serving()
        (third,) = {one.name for one in running.cluster.status()} - {entry.slice for entry in right}
        running.cluster.corrupt(third, 0)
        running.deploy(replicas=3)
        (quarantined,) = running.until(
            lambda: httpx.get(f"{running.address}/status.json").json()["quarantined"], "a quarantine"
        )
        assert quarantined["slice"] == third
        assert (
            f"slice {third} gives wrong tokens: it answers a fixed prompt otherwise than slices"
            in (quarantined["reason"])
        )
        assert {entry.replica for entry in running.serving()} == {entry.replica for entry in right}
        running.cluster.kill_slice(third)
