"""Where Ray's metrics agents of the cluster's nodes answer."""

import ray


def addresses() -> list[str]:
    """The address of every live node's agent."""
    return [
        f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}"
        for node in ray.nodes()
        if node["Alive"] and node.get("MetricsExportPort")
    ]
