"""What Ray's control store tells its autoscaler of our pending groups, and of a host before and after one holds it.

The host is of one pool, and the first group leaves that pool out: it waits while the host is free.

`python tests/support/recorded_demand.py > tests/support/recorded_demand.json` records it anew on a simulated cluster of one host.
"""

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict

from serving.simulation.cluster import SimulatedCluster
from serving.slices.placement import Without, create_slice_group
from serving.state.gcs import show_token
from serving.tpu import resolve

HELD = resolve("v6e", "2x2")
POOL = "v6e-2x2-1h-spot"
PENDING = [HELD, resolve("v6e", "2x4", hosts=2), resolve("v6e", "4x4"), resolve("v6e", "8x8")]
_FILE = Path(__file__).with_suffix(".json")
_PATIENCE_S = 30


def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_FILE.read_text())
    return found


def nameless(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups without the ids that Ray made up for them, the smallest first, and without the order of Ray's hash maps."""
    found = []
    for group in groups:
        name, state = group["details"].split(":")
        text = json.dumps({**group, "details": state}).replace(f"_PG_{name}", "_PG_0")
        found.append(json.loads(text, object_hook=_in_order))
    return sorted(found, key=lambda group: (len(group["requests"]), json.dumps(group)))


def _in_order(fields: dict[str, Any]) -> dict[str, Any]:
    """A message's fields by name, a selector's constraints by label: Ray keeps both in hash maps."""
    ordered = dict(sorted(fields.items()))
    if constraints := ordered.get("labelConstraints"):
        ordered["labelConstraints"] = sorted(constraints, key=lambda constraint: constraint["labelKey"])
    return ordered


def record() -> dict[str, Any]:
    """Takes the one host with a group, then makes groups that have to wait."""
    import ray
    from ray._raylet import GcsClient
    from ray.autoscaler.v2.sdk import get_cluster_resource_state

    address = os.environ["RAY_ADDRESS"]
    ray.init(address, log_to_driver=False)
    store = GcsClient(address=address)

    def reported() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        state = MessageToDict(get_cluster_resource_state(store))
        host = next(node for node in state["nodeStates"] if "TPU" in node["totalResources"])
        return host, state.get("pendingGangResourceRequests", [])

    elsewhere = create_slice_group(HELD.bundles(), name="elsewhere", without=Without(pools=frozenset({POOL})))
    assert not elsewhere.wait(_PATIENCE_S / 10)
    free, _ = reported()
    assert create_slice_group(HELD.bundles(), name="held").wait(_PATIENCE_S)
    for number, shape in enumerate(PENDING):
        create_slice_group(shape.bundles(), name=f"pending-{number}")
    until = time.monotonic() + _PATIENCE_S
    while True:
        held, groups = reported()
        if (len(groups) == len(PENDING) + 1 and held["status"] == "RUNNING") or time.monotonic() > until:
            return {"host": {"free": free, "held": held}, "groups": groups}
        time.sleep(0.2)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="svt") as directory:
        cluster = SimulatedCluster.up([HELD], pools=[POOL], directory=Path(directory) / "sim")
        try:
            os.environ.update(cluster.environment)
            show_token(cluster.environment)
            print(json.dumps(record(), separators=(",", ":")))
        finally:
            cluster.down()


if __name__ == "__main__":
    main()
