import asyncio
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import ray
from support.servers import PATIENCE_S

from serving.slices.held_slice import HeldSlice, SliceHost
from serving.slices.host_watch import HostWatch, _Sentinel, actor_died, silent
from serving.state.gcs import show_token


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


HOST = SliceHost(worker_id=1, bundle=0, node_id="n", ip="127.77.1.2")


@pytest.mark.unit
async def test_a_sentinel_that_takes_long_to_start_is_no_host_that_hangs_but_once_it_answered_it_has_to_answer_soon() -> (
    None
):
    sentinel = Sentinel(answer_s=0.3)
    # However late this process itself is, it does not ask again.
    reason = await asyncio.wait_for(silent(HOST, sentinel, first_s=60, later_s=0.1, late_s=math.inf), 60)
    assert sentinel.asked == 2
    assert reason.startswith("host 1 (127.77.1.2) has not answered for ")


class Pausing(Sentinel):
    """Answers at once, while the watcher's own event loop stands still; then never again."""

    def future(self) -> "Future[None]":
        if not self.asked:
            asyncio.get_running_loop().call_soon(time.sleep, 0.6)
        return super().future()


@pytest.mark.unit
async def test_a_watcher_that_stood_still_itself_asks_again() -> None:
    """As on a VM that was paused: the slice was given up for the silence of a host that had answered."""
    sentinel = Pausing(answer_s=0.1)
    watching = asyncio.create_task(silent(HOST, sentinel, first_s=0.2, later_s=60, late_s=0.2))
    async with asyncio.timeout(PATIENCE_S):
        while sentinel.asked < 2 and not watching.done():  # noqa: ASYNC110  nobody tells
            await asyncio.sleep(0.01)
    assert not watching.done()
    watching.cancel()


class Answering(Sentinel):
    """Its answers are given by the test."""

    def __init__(self) -> None:
        super().__init__(answer_s=0)
        self.answers: list[Future[None]] = []

    def future(self) -> "Future[None]":
        self.answers.append(Future())
        return self.answers[-1]


@pytest.mark.unit
@pytest.mark.parametrize("turns", range(5))
async def test_a_watch_that_is_ended_as_its_answer_comes_ends(turns: int) -> None:
    """A start waited for ever for such a watch."""
    sentinel = Answering()
    watching = asyncio.create_task(silent(HOST, sentinel))
    while not sentinel.answers:  # noqa: ASYNC110
        await asyncio.sleep(0)
    sentinel.answers[0].set_result(None)
    for _ in range(turns):  # of the event loop, between the answer and the end
        await asyncio.sleep(0)
    watching.cancel()
    assert await asyncio.wait([watching], timeout=60) == ({watching}, set())
    assert watching.cancelled()


@pytest.fixture
def node(short_directory: Path) -> Iterator[None]:
    """A Ray node that is no TPU host; to a sentinel they are alike."""
    show_token({})  # of a cluster of another test, which may be gone
    ray.init(
        "local", num_cpus=1, include_dashboard=False, _temp_dir=str(short_directory), log_to_driver=False
    )
    yield
    ray.shutdown()


@pytest.mark.cluster
@pytest.mark.usefixtures("node")
@pytest.mark.slow
async def test_a_sentinel_answers_however_often_its_host_was_watched_before() -> None:
    """A start is watched, and then the slice that serves."""
    group = ray.util.placement_group([{"CPU": 1}])
    ray.get(group.ready(), timeout=60)
    watch = HostWatch(HeldSlice("slice-0", (HOST,)), group, own_node="another")
    ((_, actor),) = watch._hosts
    ray.get(actor.ping.remote(), timeout=60)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(watch.lost(), 0.3)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(silent(HOST, actor, first_s=4, later_s=4), 6)
    watch.close()


@pytest.mark.cluster
@pytest.mark.usefixtures("node")
@pytest.mark.slow
async def test_a_dead_actor_is_told_apart_from_those_that_died_before() -> None:
    def made(name: str) -> Any:
        return ray.remote(num_cpus=0)(_Sentinel).options(name=name).remote()

    before = made("worker-0")
    ray.get(before.ping.remote(), timeout=60)
    ray.kill(before)
    ours = [made("worker-1-a"), made("worker-1-b")]
    ray.get([actor.ping.remote() for actor in ours], timeout=60)
    waiting = asyncio.create_task(actor_died("worker-1"))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(waiting), 3)
    ray.kill(ours[1])
    assert "_Sentinel" in await asyncio.wait_for(waiting, 30)
