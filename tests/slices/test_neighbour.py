"""A pod's neighbour on the network of the hosts, who knows every address and no secret."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.leases import Leases
from support.service import MODEL, Service, service

from serving.router.http.auth import new
from serving.simulation import processes

pytestmark = pytest.mark.cluster
KEY, LINE = new("somebody")
BORROWS = "two hosts, 2"
# Sends each port what would make an engine, Serve or Ray work, and tells what came.
NEIGHBOUR = """
import http.client, json, sys
asked = {"model": sys.argv[1], "prompt": "hello", "max_tokens": 1}
requests = [("POST", "/v1/completions", asked), ("POST", "/simulator/faults", {"die": True}),
            ("POST", "/api/jobs/", {"entrypoint": "true"}), ("GET", "/api/serve/applications/", None)]
found = {}
for address, port in json.load(sys.stdin):
    answers = []
    for method, path, body in requests:
        connection = http.client.HTTPConnection(address, port, timeout=3)
        try:
            sent = body and json.dumps(body)
            connection.request(method, path, sent, {"Content-Type": "application/json"})
            answers.append(connection.getresponse().status)
        except Exception:
            answers.append(None)
        finally:
            connection.close()
    found[f"{address}:{port}"] = answers
print(json.dumps(found))
"""
# What `ray.init` and `ray.nodes` come down to.
GUEST = """
import sys
from ray._raylet import GcsClient
try:
    print(len(GcsClient(address=sys.argv[1]).get_all_node_info(timeout=5)))
except Exception as error:
    print(type(error).__name__, str(error)[:200])
"""


@pytest.fixture
def running(leases: Leases, tmp_path: Path) -> Iterator[Service]:
    keys = tmp_path / "keys.yaml"
    keys.write_text(LINE)
    with service(
        leases, slices=2, engine="simulated", router={"keys_file": str(keys)}, wait=False
    ) as started:
        started.until(started.serving, "a slice to serve")
        started.until(lambda: ask(started).is_success, "who has a key to be answered")
        yield started


def ask(running: Service) -> httpx.Response:
    asked = {"model": MODEL, "prompt": "hello", "max_tokens": 1}
    shown = {"Authorization": f"Bearer {KEY}"}
    return httpx.post(f"{running.address}/v1/completions", json=asked, headers=shown)


def neighbour(running: Service, script: str, *words: str, said: str = "") -> str:
    """What a script prints in the network of the slice that serves nothing, with nothing of our environment."""
    (used,) = {entry.slice for entry in running.serving()}
    cluster = running.cluster
    (free,) = [entry for name, entry in cluster._slices.items() if name != used]
    command = [*cluster._network.command(free.subnet, 0), sys.executable, "-c", script, *words]
    return subprocess.run(
        command,
        input=said,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout


def test_a_neighbour_gets_nothing_done_by_any_port_of_the_cluster(running: Service) -> None:
    (entry,) = running.serving()
    here = (*entry.hosts, running.cluster._network.head_ip)
    ports = {
        (at, port): " ".join(process.cmdline())
        for process in running.cluster.processes()
        for address, port in processes.listening(process)
        for at in (here if address == "0.0.0.0" else (address,))
    }
    told = json.loads(neighbour(running, NEIGHBOUR, MODEL, said=json.dumps(list(ports))))
    answered = {
        (name, port): answers for (at, port), name in ports.items() if any(answers := told[f"{at}:{port}"])
    }
    for who, (*work, look) in answered.items():
        assert set(work) <= {401, 403, 404, 405}, (who, work)
        # Ray's metrics agents show their page to any GET.
        assert look in (401, 403, 404, 405) or (set(work), look) == ({405}, 200), (who, look)
    assert any(answers[0] == 401 for (name, _), answers in answered.items() if ":router" in name)
    assert any(answers[0] == 401 for (name, _), answers in answered.items() if MODEL in name)
    assert neighbour(running, GUEST, running.cluster.address).startswith("AuthenticationError")
    assert running.serving()
    assert ask(running).is_success
