"""A replica goes on watching its slice whatever fails beside it; engine, hosts and store are stand-ins."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from serving.engine.lifecycle import Event
from serving.engine.replica import SliceReplica
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
    async with asyncio.timeout(5):
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
    async with asyncio.timeout(5):
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
    async with asyncio.timeout(5):
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
