import asyncio
import threading
from concurrent.futures import Future

import pytest

from serving.slices.group import Host
from serving.slices.watch import silent

pytestmark = pytest.mark.unit


class Sentinel:
    """Answers its first ping after this time, and no other; asked as a Ray actor is."""

    def __init__(self, answer_s: float) -> None:
        self.ping = self
        self.asked = 0
        self._answer_s = answer_s

    def remote(self) -> "Sentinel":
        return self

    def future(self) -> "Future[None]":
        self.asked += 1
        answer: Future[None] = Future()
        if self.asked == 1:
            threading.Timer(self._answer_s, answer.set_result, [None]).start()
        return answer


HOST = Host(worker_id=1, bundle=1, node_id="n", ip="127.77.1.2")


async def test_a_sentinel_that_takes_long_to_start_is_no_host_that_hangs_but_once_it_answered_it_has_to_answer_soon() -> (
    None
):
    sentinel = Sentinel(answer_s=0.3)
    reason = await asyncio.wait_for(silent(HOST, sentinel, first_s=20, later_s=0.1), 10)
    assert sentinel.asked == 2
    assert reason == "host 1 (127.77.1.2) has not answered for 0 s"
