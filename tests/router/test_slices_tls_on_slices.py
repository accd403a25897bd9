"""A running service goes over to TLS between routers and slices, and back, under load: no engine restarts, no request is lost."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import yaml
from support.leases import Leases
from support.service import MODEL, ROUTER_END_UNDER_LOAD_S, Service, service

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
BORROWS = "one chip, 4"
SLICES = 2


def test_tls_comes_and_goes_while_engines_run_and_requests_are_under_way(leases: Leases) -> None:
    one_chip = {"generation": "v6e", "topology": "1x1"}
    with service(
        leases,
        slices=4,
        engine="simulated",
        slice=one_chip,
        replicas=SLICES,
        router_end_s=ROUTER_END_UNDER_LOAD_S,
    ) as running:
        before = {entry.replica for entry in running.serving()}
        expected = streamed(running)
        over = threading.Event()

        def ask() -> int:
            asked = 0
            while not over.is_set():
                assert streamed(running) == expected
                asked += 1
            return asked

        with ThreadPoolExecutor(3) as pool:
            asking = [pool.submit(ask) for _ in range(3)]
            try:
                for tls in (True, False):
                    speak(running, tls=tls)
                    assert streamed(running) == expected
            finally:
                over.set()
            assert all(done.result() for done in asking)
        assert {entry.replica for entry in running.serving()} == before


def streamed(running: Service) -> str:
    """The whole text of a stream."""
    fields = {"model": MODEL, "prompt": "Hello", "max_tokens": 200, "stream": True, "ignore_eos": True}
    with httpx.Client(timeout=120) as client:
        answer = client.post(f"{running.address}/v1/completions", json={**fields, "temperature": 0})
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events[-1:] == ["[DONE]"], answer.text[-1000:]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def speak(running: Service, *, tls: bool) -> None:
    """Deploy the YAML with the key changed, and wait until every slice and the routers have followed."""
    raw = yaml.safe_load(running.deployment.read_text())
    raw["applications"][0]["args"]["router"] = {"slices_tls": tls}
    running.deployment.write_text(yaml.safe_dump(raw))
    running.deploy()

    def followed() -> bool:
        entries = running.serving()
        return len(entries) == SLICES and all(
            bool(entry.certificate) is entry.address.startswith("https:") is tls for entry in entries
        )

    running.until(followed, f"TLS to be {'on' if tls else 'off'} at every slice")
    running.until_deployed()
