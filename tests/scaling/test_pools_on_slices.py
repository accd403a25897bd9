"""Pools of a model: real Serve and its controller, simulated slices and engines."""

from pathlib import Path

import pytest
import yaml
from support.leases import Leases
from support.service import LLAMA, service

from serving.simulation.cluster import SimulatedCluster
from serving.tpu import resolve

pytestmark = pytest.mark.cluster
BORROWS = "one host, 2"
PREFERRED, NEXT = resolve("v6e", "2x4", 2), resolve("v6e", "2x4", 1)
FIRST, SECOND = "v6e-2x4-2h-on-demand", "v6e-2x4-1h-on-demand"


@pytest.mark.slow
def test_a_pool_that_delivers_nothing_gives_way_until_it_delivers(leases: Leases, tmp_path: Path) -> None:
    """The service's only hosts are of the second pool's shape, until a slice of the first one's comes."""
    raw = yaml.safe_load(LLAMA.read_text())
    (model,) = raw["applications"][0]["args"]["models"]
    del model["slice"]
    pools = [{"generation": "v6e", "topology": "2x4", "hosts": one.hosts} for one in (PREFERRED, NEXT)]
    bounds = {"min": 0, "max": 1, "patience_s": 5}
    del model["replicas"]
    model["pools"] = [{"slice": one, "replicas": bounds} for one in pools]
    source = tmp_path / "pools.yaml"
    source.write_text(yaml.safe_dump(raw))

    def only_the_second(cluster: SimulatedCluster) -> None:
        (lent,) = cluster.status()
        cluster.kill_slice(lent.name)
        cluster.add_slice(NEXT, name="second")

    with service(
        leases,
        slices=1,
        source=source,
        wait=False,
        engine="simulated",
        before=only_the_second,
        queue={"wait_s": 120},
        cool_down_s=10,
        drain_s=1,
    ) as running:
        running.until(
            lambda: running.post("/v1/completions", prompt="a", max_tokens=1).is_success, "an answer"
        )
        assert [(one.slice, one.pool) for one in running.serving()] == [("second", SECOND)]

        def first_alone() -> bool:
            running.post("/v1/completions", prompt="a", max_tokens=1)
            return [(one.slice, one.pool) for one in running.serving()] == [("first", FIRST)]

        running.cluster.add_slice(PREFERRED, name="first")
        running.until(first_alone, "the preferred pool alone")
        assert running.post("/v1/completions", prompt="a", max_tokens=1).is_success
        for one in running.records().decisions:
            print(one)
