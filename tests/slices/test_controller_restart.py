"""The Serve controller dies and comes back: real Ray and Serve, simulated slices and engines."""

import psutil
import pytest
from support.leases import Leases
from support.service import Service, service

from serving.simulation.processes import called
from serving.state.records import SliceState

pytestmark = pytest.mark.cluster
BORROWS = "two hosts, 2"


def controller(running: Service) -> list[psutil.Process]:
    return called("ServeController", running.cluster.processes())


@pytest.mark.slow
def test_a_start_goes_on_while_the_controller_dies_and_comes_back(leases: Leases) -> None:
    with service(
        leases, slices=2, engine="simulated", startup="load=20", wait=False, replicas={"min": 2, "max": 2}
    ) as running:

        def loading() -> set[str]:
            found = {entry.replica for entry in running.entries() if entry.phase == "loading weights"}
            return found if len(found) == 2 else set()

        before = running.until(loading, "two slices that load")
        (old,) = running.until(lambda: controller(running), "the controller's process")
        old.kill()
        running.until(
            lambda: [new for new in controller(running) if new.pid != old.pid], "another controller"
        )
        running.until_serving(2)
        assert {entry.replica for entry in running.serving()} == before
        assert not [entry for entry in running.entries() if entry.state is SliceState.LOST]
        assert running.records().slice_failures == ()
