"""A replica goes on watching its slice whatever fails beside it; engine, hosts and store are stand-ins."""

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from serving.engine.answer_check import Wrong
from serving.engine.lifecycle import Event
from serving.engine.replica import SliceReplica
from serving.errors import WrongTokensError
from serving.slices.quarantine import WRONG_TOKENS
from serving.state.records import SliceFailures, SliceRecord, SliceState, Snapshot

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
    server: Any = SimpleNamespace(start=start, worker_died=never, port=1)
    coming = asyncio.create_task(made._bring_up(server, "127.0.0.1", compares=False))
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
    server: Any = SimpleNamespace(start=never, worker_died=never, port=1)
    coming = asyncio.create_task(made._bring_up(server, "127.0.0.1", compares=False))
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
        _store=SimpleNamespace(verdict=lambda _: "other tokens", read=lambda _: Snapshot(), now=time.time),
        _record=SimpleNamespace(record=record, update=lambda **changes: happened.append(changes["state"])),
        _judged=True,
    )
    made._on = lambda event, _: happened.append(event)
    monkeypatch.setattr("serving.engine.replica.TIMINGS", SimpleNamespace(verdict_look_s=0.0, beat_s=0.0))
    await made._verdict()
    assert happened == [SliceState.DRAINING, Event.WRONG]


def test_a_slice_found_wrong_serves_on_where_too_many_are_out_for_that(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def out(name: str) -> SliceFailures:
        return SliceFailures(
            name, "h", "v6e-8", WRONG_TOKENS, time.time(), "other tokens", "", name, wrong=True
        )

    fleet = tuple(
        SliceRecord(f"r{at}", "llama", SliceState.SERVING, "", "", pod_type="v6e-8") for at in range(9)
    )
    snapshot = Snapshot(slices=fleet, slice_failures=(out("a"),))
    store = SimpleNamespace(verdict=lambda _: "it gave other tokens", read=lambda _: snapshot, now=time.time)
    made = replica(_store=store, _record=SimpleNamespace(record=fleet[0]))
    assert made._found_wrong() == "it gave other tokens"
    snapshot = Snapshot(slices=fleet[:8], slice_failures=(out("a"), out("b")))
    for _ in range(3):
        assert made._found_wrong() == ""
    assert caplog.text.count("serves on though it gave other tokens: too many slices are out") == 1


async def test_a_slice_that_starts_serves_where_too_many_are_out_for_wrong_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """New hosts that round otherwise: each start failed and took another slice for an hour, until none was left."""

    async def wrong(_model: str, own: str, _others: Any) -> Wrong:
        return Wrong(own, ("r0", "r1"))

    monkeypatch.setattr("serving.engine.replica.wrong_at_start", wrong)
    fleet = [
        SliceRecord(f"r{at}", "llama", SliceState.SERVING, "", "", slice=f"s{at}", pod_type="v6e-8")
        for at in range(3)
    ]
    own = replace(fleet[2], state=SliceState.STARTING)
    made = replica(_record=SimpleNamespace(record=own), _address="http://own")
    made._store = SimpleNamespace(read=lambda _: Snapshot(slices=(*fleet[:2], own)), now=time.time)
    with pytest.raises(WrongTokensError, match="s0 and s1"):
        await made._compare_first_answer()
    out = SliceFailures("a", "h", "v6e-8", WRONG_TOKENS, time.time(), "other tokens", "", "a", wrong=True)
    snapshot = Snapshot(slices=(*fleet[:2], own), slice_failures=(out,))
    made._store = SimpleNamespace(read=lambda _: snapshot, now=time.time)
    await made._compare_first_answer()


async def test_a_store_that_can_t_be_read_ends_no_start() -> None:
    """The model has been loaded for minutes by then."""

    def away(_: str) -> Any:
        raise ConnectionError("the head restarts")

    await replica(_store=SimpleNamespace(read=away))._compare_first_answer()
