"""`python -m serving.doctor.cluster_look FD PARENT`: all that `serving doctor` asks of Ray, in a process of its own.

Ray's client waits for minutes for a head that stands still, or ends its process. An address, the facts so far and a limit come from
FD; each time something is found it goes there as fields of the facts, with the step that comes next. The process ends with the
process PARENT; its actors on hosts end with it.
"""

import logging
import platform
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import ray
from ray import serve
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from serving.doctor.facts import Application, Facts, HostFacts
from serving.doctor.host import HostLook
from serving.engine.parent_death import die_with
from serving.errors import ServingError
from serving.slices.tpu_hosts import TpuHost, counted, tpu_hosts
from serving.state.gcs import Store

_HEAD = "node:__internal_head__"
_BY_RAY = "hosts", "head", "serve"  # what is asked of the cluster once it is joined

# What is done next, and what was found before.
Report = tuple[str, dict[str, Any]]


def look(address: str, facts: Facts, limit_s: float) -> Iterator[Report]:
    """Everything to be known of the cluster at this address; hosts, then Serve have `limit_s` seconds to answer."""
    here = {"ray": ray.__version__, "python": platform.python_version()}
    try:
        store = Store(address)
        cluster = store.cluster_versions()
        snapshot = store.read()
        records = {record.replica: store.start(record.replica) for record in snapshot.slices}
    except Exception as error:  # noqa: BLE001  Ray's client raises errors of its own that no module names
        problem = (
            error.message if isinstance(error, ServingError) else f"the control store can't be read: {error}"
        )
        yield "", {"cluster": problem}
        return
    starts = {replica: start for replica, start in records.items() if start}
    unseen = "this command has not joined the cluster"
    facts_read = {"cluster": cluster, "here": here, "snapshot": snapshot, "starts": starts}
    yield "joining the cluster", facts_read | dict.fromkeys(_BY_RAY, unseen)
    why = "this command can't join a cluster of other versions" if cluster != here else _join(address)
    if why:
        yield "", dict.fromkeys(_BY_RAY, why)
        return
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        hosts = tpu_hosts(nodes)
        yield f"waiting for {counted(len(hosts), 'host')}", {"hosts": hosts}
        head = next((node for node in nodes if _HEAD in node["Resources"]), None)
        facts = replace(facts, hosts=hosts, snapshot=snapshot)
        answers = _told(hosts, head, facts, limit_s)
        told_by_head = answers.get(head["NodeID"], "it did not answer") if head else "Ray lists no head"
        yield "asking Serve", {"told": answers, "head": told_by_head}
        yield "leaving the cluster", {"serve": _applications(limit_s)}
    finally:
        ray.shutdown()
    yield "", {}


def _join(address: str) -> str:
    """Join the cluster as a driver; returns why that can't be, as on a machine that is no host of it."""
    try:
        ray.init(
            address=address, namespace="serving-doctor", log_to_driver=False, logging_level=logging.ERROR
        )
    except Exception as error:  # noqa: BLE001  Ray raises errors of Python's own kinds, and of its client
        return f"this command can't join the cluster ({_last_line(error)}); run it on one of its hosts"
    return ""


def _applications(limit_s: float) -> dict[str, Application] | str:
    """Serve's applications by name; none where Serve does not run. Serve itself would wait for a hung controller for ever."""
    answers: list[dict[str, Application] | str] = []
    asking = threading.Thread(target=lambda: answers.append(_asked_of_serve()), daemon=True)
    asking.start()
    asking.join(limit_s)
    return answers[0] if answers else f"Serve's controller did not answer in {limit_s:g} s"


def _asked_of_serve() -> dict[str, Application] | str:
    try:
        status = serve.status()
    except Exception as error:  # noqa: BLE001  Ray and Serve raise errors of many kinds
        return f"Serve can't be asked ({_last_line(error)})"
    return {
        name: Application(
            application.status.value,
            application.message,
            {
                of: deployment.message
                for of, deployment in application.deployments.items()
                if deployment.status.value in ("DEPLOY_FAILED", "UNHEALTHY")
            },
        )
        for name, application in status.applications.items()
    }


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _told(
    hosts: Sequence[TpuHost], head: Mapping[str, Any] | None, facts: Facts, limit_s: float
) -> dict[str, HostFacts | str]:
    """What every host tells of itself, or why it does not, by node; all at once."""
    until_s = time.monotonic() + limit_s
    ips = {host.node_id: host.ip for host in hosts}
    if head:
        ips.setdefault(head["NodeID"], head["NodeManagerAddress"])
    look = ray.remote(num_cpus=0, max_restarts=0)(HostLook)
    actors = {
        node: look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(ip)
        for node, ip in ips.items()
    }
    try:
        ports = _answers({node: actor.port.remote() for node, actor in actors.items()}, until_s)
        asked = {}
        for node in ports:
            host = next((host for host in hosts if host.node_id == node), None)
            peers = _peers(host, hosts, ports) if host else []
            plans = facts.plans_of(host) if host else []
            if not isinstance(ports[node], str):
                asked[node] = actors[node].look.remote(plans, peers)
        return {node: port for node, port in ports.items() if isinstance(port, str)} | _answers(
            asked, until_s
        )
    finally:
        for actor in actors.values():
            ray.kill(actor)


def _peers(host: TpuHost, hosts: Sequence[TpuHost], ports: Mapping[str, Any]) -> list[tuple[str, int]]:
    """The other hosts of the slice, by their raylet's port and by the one that the look opened."""
    peers = []
    for other in hosts:
        if other.slice == host.slice and other.slice and other.node_id != host.node_id:
            opened = ports.get(other.node_id)
            peers += [(other.ip, port) for port in (other.port, opened) if isinstance(port, int) and port]
    return peers


def _answers(asked: Mapping[str, Any], until_s: float) -> dict[str, Any]:
    """Each node's answer, or why there is none. What has come in time counts, however late the others are."""
    left_s = max(0.1, until_s - time.monotonic())
    if asked:
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=left_s)
    answers: dict[str, Any] = {}
    for node, reference in asked.items():
        try:
            answers[node] = ray.get(reference, timeout=0.1)
        except GetTimeoutError:
            answers[node] = "it did not answer in time"
        except RayError as error:
            answers[node] = f"it could not look ({_last_line(error)})"
    return answers


def main() -> None:
    die_with(int(sys.argv[2]))
    with Connection(int(sys.argv[1])) as asking:
        for report in look(*asking.recv()):
            asking.send(report)


if __name__ == "__main__":
    main()
