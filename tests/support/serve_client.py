"""A process that stays connected to a simulated cluster and does what it reads: `serve run` takes four seconds to import Ray.

Each line of its input is an order, `["deploy", PATH]`, `["status"]`, `["delete"]` or `["groups"]`; each line of its output an answer.
What Ray prints of the cluster's logs goes to stderr.
"""

import json
import os
import sys
from typing import Any

import ray
from ray import serve
from ray.serve.scripts import cli


def deploy(path: str) -> str:
    """As `serve run --non-blocking` does."""
    cli(["run", "--non-blocking", path], standalone_mode=False)
    return "deployed"


def status() -> dict[str, str]:
    """Of each application, by name."""
    return {name: found.status.value for name, found in serve.status().applications.items()}


def delete() -> list[str]:
    """Every application; returns once their replicas are gone."""
    names = list(serve.status().applications)
    for name in names:
        serve.delete(name)
    return names


def groups() -> list[str]:
    """The states of all placement groups that are not removed."""
    states = (group["state"] for group in ray.util.placement_group_table().values())
    return sorted(state for state in states if state != "REMOVED")


def nodes() -> list[str]:
    """The addresses of all nodes that Ray takes for alive."""
    return sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])


ORDERS: dict[str, Any] = {
    "deploy": deploy,
    "status": status,
    "delete": delete,
    "groups": groups,
    "nodes": nodes,
}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray and the command line print where they like
    ray.init(namespace="serve")
    for line in sys.stdin:
        order, *words = json.loads(line)
        print(json.dumps(ORDERS[order](*words)), file=answers, flush=True)


if __name__ == "__main__":
    main()
