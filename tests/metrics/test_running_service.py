"""A running service on the simulated engine, scraped by a real Prometheus."""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from support.leases import Leases
from support.monitoring import MONITORING, QUERIES, RECORDED, exported, names, program
from support.service import MODEL, Service, service

from serving.metrics import table
from serving.metrics.table import TABLE, VLLM, Kind
from serving.simulation.ports import free_port

pytestmark = pytest.mark.cluster
BORROWS = "two hosts, 1"

# Rows that only a failure, a queue, priorities, a change of scale, a program compiled late or the sentinel brings; tests of those
# parts bring them.
QUIET = {
    table.RETRIES.name,
    table.CONTINUATIONS.name,
    table.PREEMPTIONS.name,
    table.PAUSED_SECONDS.name,
    table.POISONOUS.name,
    table.DECISIONS.name,
    table.CHECKED.name,
    table.DIFFERED.name,
    table.WRONG.name,
    table.QUARANTINED.name,
    table.SLICE_LATE_PROGRAMS.name,
    table.SLICE_LATE_COMPILE.name,
}
CHAT = "/v1/chat/completions"
LONG = "The same words, so that the cache knows them. " * 40


@pytest.fixture(scope="module")
def running(leases: Leases) -> Iterator[Service]:
    with service(leases, slices=1, engine="simulated", slo={"ttft_s": 2}) as started:
        yield started


@pytest.fixture
def traffic(running: Service) -> Iterator[None]:
    """Some requests of every kind, again and again, until the test is over."""
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            for stream in (True, False):
                messages = [{"role": "user", "content": LONG}]
                running.post(CHAT, messages=messages, max_tokens=8, stream=stream)
            running.post(CHAT, messages="not a list")
            over.wait(0.2)

    asking = threading.Thread(target=ask)
    asking.start()
    yield
    over.set()
    asking.join(timeout=30)


def page(running: Service) -> dict[str, Any]:
    """The families on /metrics by Prometheus's name of them."""
    answer = httpx.get(f"{running.address}/metrics", timeout=10)
    assert answer.is_success
    return {
        family.name + ("_total" if family.type == "counter" else ""): family
        for family in text_string_to_metric_families(answer.text)
    }


@pytest.mark.usefixtures("traffic")
def test_the_page_has_what_the_table_says_and_nothing_else(running: Service) -> None:
    def complete() -> dict[str, Any] | None:
        found = page(running)
        bare = {name for name in TABLE if not found[name].samples} - QUIET
        return found if not bare else None

    found = running.until(complete, "a series of every row")
    (slice_,) = (one.name for one in running.cluster.status())
    ours = {name for name in found if not name.startswith("vllm:")}
    assert ours == set(TABLE)
    for name, row in TABLE.items():
        assert found[name].type == row.kind
        for sample in found[name].samples:
            assert set(sample.labels) - {"le"} == set(row.page_labels), sample
    for name, kind in VLLM.items():
        assert found[name].type == kind
        for sample in found[name].samples:
            assert sample.labels["application"] == running.application
            assert sample.labels["model"] == MODEL
            assert sample.labels["slice"] == slice_
            assert "model_name" not in sample.labels


def test_chips_of_simulated_hosts_say_so(running: Service) -> None:
    chips = running.until(lambda: page(running)["tpu_duty_cycle"].samples, "chips on the page")
    assert len(chips) == 8
    assert {chip.labels["simulated"] for chip in chips} == {"true"}
    assert len({(chip.labels["host"], chip.labels["chip"]) for chip in chips}) == 8


@pytest.mark.usefixtures("traffic")
def test_rays_own_agents_have_it_too(running: Service) -> None:
    """Who scrapes Ray's agents, as GKE's PodMonitoring does, finds the same series under Ray's prefix."""
    addresses = _agents(running)
    rows = {name for name in TABLE if exported(name) and TABLE[name].kind is not Kind.HISTOGRAM}

    def missing() -> set[str]:
        texts = [httpx.get(f"{address}/metrics", timeout=10).text for address in addresses]
        lines = [line for text in texts for line in text.splitlines() if line.startswith("ray_tpu_")]
        return (
            rows
            - QUIET
            - {table.UNREACHABLE.name}
            - {line.split("{")[0].removeprefix("ray_") for line in lines}
        )

    running.until(lambda: not missing(), f"every row at Ray's agents {addresses}")


def _agents(running: Service) -> list[str]:
    """Where Ray's agents of all nodes answer, found as `ray` finds them."""
    script = "import json, ray; from serving.metrics import agents; ray.init(log_to_driver=False); print(json.dumps(agents.addresses()))"
    done = subprocess.run(
        [os.sys.executable, "-c", script],
        env=running.cluster.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    addresses: list[str] = json.loads(done.stdout.splitlines()[-1])
    assert len(addresses) == 3  # the head and two hosts
    return addresses


@pytest.fixture(scope="module")
def prometheus(running: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Prometheus with the folder's own configuration, but for the target and the pace."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "4s", "evaluation_interval": "2s"}
    config["rule_files"] = [str(MONITORING / name) for name in config["rule_files"]]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [running.address.removeprefix("http://")]
    (folder / "prometheus.yml").write_text(json.dumps(config))
    port = free_port()
    started = subprocess.Popen(
        [
            program("prometheus"),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=(folder / "log").open("w"),
    )
    try:
        # Its port answers 503 in plain text until its store is open.
        running.until(lambda: httpx.get(f"http://127.0.0.1:{port}/-/ready").is_success, "Prometheus")
        yield f"http://127.0.0.1:{port}/api/v1"
    finally:
        started.send_signal(signal.SIGTERM)
        started.wait(timeout=10)


@pytest.mark.usefixtures("traffic")
def test_prometheus_answers_every_query_and_every_rule(running: Service, prometheus: str) -> None:
    def ask(query: str) -> list[Any]:
        for variable, value in (
            ("$application", ".*"),
            ("$model", ".*"),
            ("$slice", ".*"),
            ("$__rate_interval", "30s"),
        ):
            query = query.replace(variable, value)
        answer = httpx.get(f"{prometheus}/query", params={"query": query}, timeout=10).json()
        assert answer["status"] == "success", f"{query}: {answer}"
        return list(answer["data"]["result"])

    # Not all at one moment: Ray forgets a gauge for a while whose process a busy machine held up.
    open_ones = {query for query in QUERIES if not names(query) & QUIET}

    def all_answered() -> bool:
        open_ones.difference_update([query for query in open_ones if ask(query)])
        return not open_ones

    try:
        running.until(all_answered, "an answer to every query")
    except AssertionError:
        raise AssertionError(f"no series for {open_ones}") from None
    for query in QUERIES:
        ask(query)

    groups = httpx.get(f"{prometheus}/rules", timeout=10).json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}, [rule for rule in rules if rule["health"] != "ok"]
    assert {rule["name"] for rule in rules if rule["type"] == "recording"} == RECORDED
    assert not [rule["name"] for rule in rules if rule.get("state") == "firing"]


@pytest.mark.usefixtures("traffic")
def test_a_request_leaves_one_line_without_its_words(running: Service) -> None:
    logs = running.cluster.directory

    def lines() -> list[dict[str, Any]]:
        files = logs.glob("ray/session_2*/logs/requests-*.jsonl")
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    asked = "line-of-this-request"
    httpx.post(
        f"{running.address}{CHAT}",
        json={"model": MODEL, "messages": [{"role": "user", "content": "WORDS"}], "max_tokens": 4},
        headers={"x-request-id": asked},
        timeout=30,
    )
    (line,) = running.until(lambda: [one for one in lines() if one["request_id"] == asked], "its line")
    (slice_,) = (one.name for one in running.cluster.status())
    assert (line["model"], line["slice"], line["outcome"], line["output_tokens"]) == (MODEL, slice_, "ok", 4)
    assert "WORDS" not in json.dumps(line)
