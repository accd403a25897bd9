"""A replica goes on watching its slice whatever fails beside it; engine, hosts and store are stand-ins."""

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from support.memory_store import MemoryStore, MemoryTable
from support.servers import PATIENCE_S

from serving.engine.lifecycle import Event, Life
from serving.engine.replica import SliceReplica
from serving.slices.quarantine import EARLY_S, until
from serving.state.records import Peer, SliceRecord, SliceState

pytestmark = pytest.mark.unit


class Replica(SliceReplica):
    def __del__(self) -> None:  # type: ignore[override]
        """Serve alone awaits it."""


def replica(**parts: Any) -> Any:
    """A replica without Ray, which notes what happens to it in `events`."""
    made: Any = Replica.__new__(Replica)
    made.events = []
    made._on = lambda event, reason="": made.events.append((event, reason))
    made._plan = SimpleNamespace(model=SimpleNamespace(name="llama"))
    made._spec = SimpleNamespace(start_s=60.0)
    made._record = SimpleNamespace(record=SimpleNamespace(application="app", model="llama"))
    vars(made).update(parts)
    return made


async def never(*_: Any) -> Any:
    await asyncio.Event().wait()


async def test_a_host_that_goes_while_a_started_engine_is_looked_at_is_noticed() -> None:
    """The workers then wait for each other, and nothing limits a start."""
    looks = asyncio.Event()

    async def lost() -> str:
        await asyncio.sleep(0.01)
        return "host 1 is gone"

    async def start() -> None:
        return

    async def look(**_: Any) -> None:
        looks.set()
        await never()

    made = replica(_hosts=SimpleNamespace(lost=lost, draining=never), _look_at_start=look)
    server: Any = SimpleNamespace(start=start, worker_died=never)
    coming = asyncio.create_task(made._bring_up(server, compares=False))
    await looks.wait()
    async with asyncio.timeout(PATIENCE_S):
        while not made.events:  # noqa: ASYNC110  another thread appends
            await asyncio.sleep(0.01)
    assert made.events == [(Event.LOST, "host 1 is gone")]
    coming.cancel()


async def test_a_host_that_goes_after_the_watch_over_a_start_has_failed_is_noticed() -> None:
    """The thread that watches ended with its first error, as where the head restarts, and nobody watched any more."""
    looks = 0

    async def lost() -> str:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise ConnectionError("the head restarts")
        return "host 1 is gone"

    made = replica(_hosts=SimpleNamespace(lost=lost, draining=never))
    server: Any = SimpleNamespace(start=never, worker_died=never)
    coming = asyncio.create_task(made._bring_up(server, compares=False))
    async with asyncio.timeout(PATIENCE_S):
        while not made.events:  # noqa: ASYNC110  another thread appends
            await asyncio.sleep(0.01)
    assert made.events == [(Event.LOST, "host 1 is gone")]
    coming.cancel()


async def test_a_start_on_a_host_that_is_to_go_is_given_up_and_no_failure() -> None:
    """It went on until the host ended, which counted as a failure of the slice."""

    async def draining() -> tuple[str, float]:
        return "host 1 is to go", 30.0

    made = replica(_hosts=SimpleNamespace(lost=never, draining=draining))
    server: Any = SimpleNamespace(start=never, worker_died=never)
    coming = asyncio.create_task(made._bring_up(server, compares=False))
    async with asyncio.timeout(PATIENCE_S):
        while not made.events:  # noqa: ASYNC110  another thread appends
            await asyncio.sleep(0.01)
    assert made.events == [(Event.NOTICE, "host 1 is to go")]
    coming.cancel()


async def test_a_host_that_is_to_go_while_the_hosts_are_looked_over_is_no_failure() -> None:
    async def draining() -> tuple[str, float]:
        return "host 1 is to go", 30.0

    made = replica(_hosts=SimpleNamespace(unfit=never, draining=draining), _enter=lambda _: None)
    server: Any = SimpleNamespace(needs=lambda: None)
    looking = asyncio.create_task(made._look_over_hosts(server))
    async with asyncio.timeout(PATIENCE_S):
        while not made.events:  # noqa: ASYNC110  nobody tells
            await asyncio.sleep(0.01)
    assert made.events == [(Event.NOTICE, "host 1 is to go")]
    looking.cancel()


async def test_a_watch_that_fails_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def processes() -> dict[str, dict[int, str]]:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise ConnectionError("the head restarts")
        return {}

    async def died() -> str:
        return "the engine reports itself dead"

    monkeypatch.setattr("serving.engine.replica.TIMINGS", SimpleNamespace(engine_probe_s=0.0))
    hosts = SimpleNamespace(lost=never, process_ended=never)
    server = SimpleNamespace(processes=processes, died=died)
    made = replica(_hosts=hosts, _server=server, _engine_is_silent=never)
    await made._watch()
    assert made.events == [(Event.LOST, "the engine reports itself dead")]


async def test_a_slice_that_gives_wrong_tokens_says_that_it_leaves_before_it_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Routers would suspect the requests there of having ended it, and try them one at a time."""
    happened: list[Any] = []
    record = SliceRecord("r", "llama", SliceState.SERVING, "", "")
    made = replica(
        _wrong_tokens=SimpleNamespace(verdict=lambda: "other tokens"),
        _record=SimpleNamespace(record=record, update=lambda **changes: happened.append(changes["state"])),
        _judged=True,
    )
    made._on = lambda event, _: happened.append(event)
    monkeypatch.setattr("serving.engine.replica.TIMINGS", SimpleNamespace(verdict_look_s=0.0, beat_s=0.0))
    await made._verdict()
    assert happened == [SliceState.DRAINING, Event.WRONG]


async def test_a_slice_that_goes_over_to_tls_says_so_before_it_leaves_the_port_that_routers_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happened: list[Any] = []

    class Http:
        peer = Peer("http://slice:1")

        async def speak(self, *, tls: bool) -> Any:
            if tls is bool(self.peer.certificate):
                return None
            self.peer = Peer("https://slice:2", "its certificate") if tls else Peer("http://slice:3")
            return lambda: happened.append("the former port is closed")

    monkeypatch.setattr("serving.engine.replica.TIMINGS", SimpleNamespace(former_port_s=0.0))
    record = SliceRecord("r", "llama", SliceState.SERVING, "", "")
    made = replica(
        _record=SimpleNamespace(record=record, update=lambda **changes: happened.append(changes)),
        _server=SimpleNamespace(http=Http()),
    )
    for tls in (False, True, True, False):
        await made._speak(tls=tls)
        await asyncio.sleep(0.01)
    assert happened == [
        {"address": "https://slice:2", "certificate": "its certificate"},
        "the former port is closed",
        {"address": "http://slice:3", "certificate": ""},
        "the former port is closed",
    ]


def serving_replica(store: MemoryStore, served_s: float, name: str = "r") -> Any:
    """A replica that has served for so long, whose table's steps are real; the engine is a stand-in."""
    record = SliceRecord(
        name, "llama", SliceState.SERVING, "", "", slice="slice-1", hosts=("10.0.0.1",), application="app"
    )
    made = replica(
        _acting=threading.RLock(),
        _life=Life.SERVING,
        _store=store,
        _served_s=time.monotonic() - served_s,
        _record=SimpleNamespace(record=record, update=lambda **_: None),
        _engine=SimpleNamespace(kill=lambda: None),
        _error=None,
        _wrong=False,
        _reason="",
        _over=asyncio.Event(),
        _watching=[],
        _ending=[],
    )
    made._last_words = never  # would end the process
    del made._on
    return made


@pytest.mark.parametrize(("served_s", "failures"), [(30.0, 1), (EARLY_S + 1, 0)])
async def test_an_engine_that_dies_soon_after_it_began_to_serve_is_a_failure_of_its_slice(
    served_s: float, failures: int
) -> None:
    """It was restarted there for ever: the next start cleared what was known of the slice."""
    store = MemoryStore(MemoryTable())
    made = serving_replica(store, served_s)
    made._on(Event.LOST, "EngineCore has ended")
    assert [failed.failures for failed in store.read().slice_failures] == [1] * failures
    made._ending[0].cancel()


async def test_a_slice_that_leaves_early_as_planned_is_no_failure() -> None:
    store = MemoryStore(MemoryTable())
    made = serving_replica(store, 30.0)
    made._finish = never
    made._spec = SimpleNamespace(drain_s=0.0)
    made._until_s = made._notice_s = 0.0
    made._hosts = SimpleNamespace(close=lambda: None)
    made._record.close = lambda: None
    made._on(Event.NOTICE, "host 0 is to go")
    made._on(Event.LOST, "EngineCore has ended")
    assert store.read().slice_failures == ()
    for ending in made._ending:
        ending.cancel()


async def test_beginning_to_serve_after_an_early_death_forgets_it_only_after_ten_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = MemoryStore(MemoryTable())
    for number in (1, 2):
        died = serving_replica(store, 30.0, f"r{number}")
        died._on(Event.LOST, "EngineCore has ended")
        died._ending[0].cancel()
        serving_replica(store, 0.0, "next")._forget_slice_failures(early=False)
    (known,) = store.read().slice_failures
    assert known.failures == 2
    assert until(known) > known.at
    monkeypatch.setattr("serving.slices.quarantine.EARLY_S", 0.0)
    await serving_replica(store, 0.0, "next")._outlive()
    assert store.read().slice_failures == ()
