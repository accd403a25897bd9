"""Slices that come and go with the load: real Serve and its controller, simulated slices and engines."""

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from support.leases import Leases
from support.service import MODEL, Service, service

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
BORROWS = "one host, 1-2"
ONE_HOST = {"generation": "v6e", "topology": "2x4", "hosts": 1}
FEW_AT_ONCE = {"max_model_len": 2048, "max_num_seqs": 4}


@contextmanager
def load(running: Service, clients: int) -> Iterator[None]:
    """So many clients that ask again as soon as they are answered, until the block ends."""
    ended = threading.Event()

    def ask() -> None:
        with httpx.Client(timeout=60) as client:
            while not ended.is_set():
                fields = {"model": MODEL, "prompt": "hello", "max_tokens": 200, "ignore_eos": True}
                with contextlib.suppress(httpx.TransportError):
                    client.post(f"{running.address}/v1/completions", json=fields)

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


@contextmanager
def stream(running: Service) -> Iterator[None]:
    """A long answer of slow engines, under way while the block lasts."""
    for one in running.serving():
        running.fault(one, slow=10)
    fields = {"model": MODEL, "prompt": "hello", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{running.address}/v1/completions", json=fields, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        yield


def test_load_orders_what_the_budget_allows_and_idleness_gives_it_back(leases: Leases) -> None:
    with service(
        leases,
        slices=2,
        engine="simulated",
        slice=ONE_HOST,
        options=FEW_AT_ONCE,
        replicas={"min": 1, "max": 2},
        cool_down_s=5,
        drain_s=1,
        budget={"dollars_per_hour": 30},  # a slice is 21.60
    ) as running:
        (alone,) = running.serving()
        with load(running, clients=16):
            running.until(
                lambda: "the budget allows 1 of 2 slices" in running.records().decisions[-1].reason,
                "the budget",
            )
            assert running.serving()[0].slice == alone.slice
            running.deploy(budget={"slices": 2})
            first, second = running.until_serving(2)
            assert first.slice != second.slice
            assert alone.replica in (first.replica, second.replica)  # a budget restarts no engine
            running.until(lambda: all(one.running for one in running.serving()), "work for both slices")
        running.until(lambda: not any(one.running for one in running.serving()), "quiet")
        with stream(running):
            (busy,) = running.until(
                lambda: [one for one in running.serving() if one.running], "a stream on one of them"
            )
            (left,) = running.until_serving(1)
            assert left.replica == busy.replica  # the other costs nothing to drain
        counts = [one.wanted for one in running.records().decisions]
        assert [count for count, _ in itertools.groupby(counts)] == [1, 2, 1]
        for one in running.records().decisions:
            print(one)


def test_a_request_wakes_a_model_that_holds_no_slice_and_is_answered(leases: Leases) -> None:
    with service(
        leases,
        slices=1,
        wait=False,
        engine="simulated",
        slice=ONE_HOST,
        options=FEW_AT_ONCE,
        replicas={"min": 0, "max": 1},
        queue={"wait_s": 120},
        cool_down_s=5,
        drain_s=1,
    ) as running:
        running.until(lambda: httpx.get(f"{running.address}/v1/models", timeout=5).is_success, "the router")
        assert running.entries() == []
        asked = time.monotonic()
        answer = running.post("/v1/completions", timeout_s=150, prompt="hello", max_tokens=4)
        print(f"from zero to an answer in {time.monotonic() - asked:.1f} s")
        assert answer.is_success, answer.text
        running.until(lambda: not running.entries(), "the slice to be given back")
        assert [one.wanted for one in running.records().decisions] == [0, 1, 0]
