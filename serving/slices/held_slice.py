"""The slice that a placement group stands on, read back from Ray and checked before an engine starts there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from serving.errors import PlacementError
from serving.slices.placement import CALLBACK
from serving.tpu import POOL_LABEL, SLICE_LABEL, WORKER_LABEL

RESTART = (
    "Serve keeps the options of its first start: run `serve shutdown -y`, then `serve run` the YAML again with "
    f"controller_options.runtime_env.env_vars.RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH: {CALLBACK}"
)


@dataclass(frozen=True)
class SliceHost:
    """One VM of a slice as Ray knows it; `port` is its raylet's."""

    worker_id: int
    bundle: int
    node_id: str
    ip: str
    port: int = 0


@dataclass(frozen=True)
class HeldSlice:
    """A whole slice held by a placement group; hosts in worker-id order. `bought_for`: the label of the pool that its hosts carry."""

    name: str
    hosts: tuple[SliceHost, ...]
    bought_for: str = ""

    @property
    def bundle_order(self) -> str:
        """Bundle indices by worker id, as vLLM's VLLM_RAY_BUNDLE_INDICES wants them."""
        return ",".join(str(host.bundle) for host in self.hosts)


def held_slice(group: Any, nodes: Sequence[dict[str, Any]] | None = None) -> HeldSlice:
    """The slice under a created placement group; raises PlacementError unless it is one whole slice, worker 0 first.

    `nodes` is Ray's node list, where the caller has it.
    """
    if group is None:
        raise PlacementError(f"this replica has no placement group, so it holds no TPU slice. {RESTART}")
    table = ray.util.placement_group_table(group)
    by_id = {node["NodeID"]: node for node in (ray.nodes() if nodes is None else nodes)}
    return read_group(table["bundles_to_node_id"], by_id)


def read_group(bundles_to_node: dict[int, str], nodes: dict[str, dict[str, Any]]) -> HeldSlice:
    """The decision of `held_slice`, on plain data."""
    hosts, slices = [], set()
    for bundle, node_id in bundles_to_node.items():
        node = nodes.get(node_id)
        if node is None:
            raise PlacementError(f"bundle {bundle} is on node {node_id}, which has left the cluster")
        labels = node["Labels"]
        if SLICE_LABEL not in labels or WORKER_LABEL not in labels:
            raise PlacementError(
                f"host {node['NodeManagerAddress']} carries no {SLICE_LABEL} label: it was not started as a TPU host "
                "(TPU_NAME, TPU_WORKER_ID, TPU_ACCELERATOR_TYPE and TPU_TOPOLOGY in its environment)"
            )
        slices.add(labels[SLICE_LABEL])
        address, port = node["NodeManagerAddress"], node.get("NodeManagerPort", 0)
        hosts.append(SliceHost(int(labels[WORKER_LABEL]), int(bundle), node_id, address, port))
    hosts.sort(key=lambda host: host.worker_id)
    if len(slices) != 1:
        raise PlacementError(
            f"the replica's {len(hosts)} bundles straddle {len(slices)} slices ({', '.join(sorted(slices))}); it needs one "
            f"whole slice, so the Serve controller runs without the placement hook. {RESTART}"
        )
    if [host.worker_id for host in hosts] != list(range(len(hosts))):
        raise PlacementError(
            f"the replica's bundles are on workers {[host.worker_id for host in hosts]} of slice {slices.pop()}, "
            f"not on each of its {len(hosts)} hosts once. {RESTART}"
        )
    if hosts[0].bundle != 0:
        raise PlacementError(f"bundle 0 is not on worker 0 of slice {slices.pop()}. {RESTART}")
    label = nodes[hosts[0].node_id]["Labels"].get(POOL_LABEL, "")
    return HeldSlice(slices.pop(), tuple(hosts), label)
