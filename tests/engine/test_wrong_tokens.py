"""When a slice goes for wrong tokens, and when it serves on; store and record are stand-ins."""

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.memory_store import MemoryStore, MemoryTable

from serving.engine.answer_check import Wrong
from serving.engine.wrong_tokens import WrongTokens
from serving.errors import WrongTokensError
from serving.slices.quarantine import WRONG_TOKENS
from serving.state.records import Peer, SliceFailures, SliceRecord, SliceState

pytestmark = pytest.mark.unit


def wrong_tokens(store: Any, own: SliceRecord) -> WrongTokens:
    """Of a slice without Ray."""
    record: Any = SimpleNamespace(record=own)
    return WrongTokens(store, record)


def fleet_of(slices: int) -> tuple[MemoryStore, list[SliceRecord]]:
    store = MemoryStore(MemoryTable())
    records = [
        SliceRecord(
            f"r{at}", "llama", SliceState.SERVING, "", "", slice=f"s{at}", pod_type="v6e-8", application="app"
        )
        for at in range(slices)
    ]
    for record in records:
        store.put_slice(record)
    return store, records


def out(store: MemoryStore, name: str) -> None:
    """A slice has gone for wrong tokens."""
    store.put_slice_failures(
        SliceFailures(
            name, "h", "v6e-8", WRONG_TOKENS, time.time(), "other tokens", "", name, "app", wrong=True
        )
    )


def test_a_slice_found_wrong_serves_on_where_too_many_are_out_for_that(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, records = fleet_of(9)
    store.put_verdict("r0", "it gave other tokens")
    out(store, "a")
    made = wrong_tokens(store, records[0])
    assert made.verdict() == "it gave other tokens"
    store.delete_slice(records[8])
    out(store, "b")
    for _ in range(3):
        assert made.verdict() == ""
    assert caplog.text.count("serves on though it gave other tokens: too many slices are out") == 1


def test_of_slices_that_are_found_wrong_at_once_one_goes_and_the_next_once_that_counts() -> None:
    """Twenty routers of a fleet in two halves found a slice each: all looked for room before the first had taken it."""
    store, records = fleet_of(20)
    for record in records[:10]:
        store.put_verdict(record.replica, "it gave other tokens")
    slices = [wrong_tokens(MemoryStore(store._client), record) for record in records[:10]]
    assert [bool(slice_.verdict()) for slice_ in slices] == [True] + 9 * [False]
    out(store, "s0")
    assert [bool(slice_.verdict()) for slice_ in slices[1:]] == 9 * [False]  # still in its time
    store.unclaim("app", "wrong tokens/v6e-8", "r0")  # as once that is over
    assert [bool(slice_.verdict()) for slice_ in slices[1:]] == [True] + 8 * [False]


async def test_a_slice_that_starts_serves_where_too_many_are_out_for_wrong_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """New hosts that round otherwise: each start failed and took another slice for an hour, until none was left."""

    async def wrong(_model: str, own: str, _others: Any) -> Wrong:
        return Wrong(own, ("r0", "r1"))

    monkeypatch.setattr("serving.engine.wrong_tokens.wrong_at_start", wrong)
    store, records = fleet_of(2)
    starts = [
        replace(records[0], replica=f"new{at}", state=SliceState.STARTING, slice=f"n{at}") for at in range(3)
    ]
    with pytest.raises(WrongTokensError, match="s0 and s1"):
        await wrong_tokens(store, starts[0]).compare_first_answer(Peer("http://own"))
    # It has not said so yet, and others start at the same time.
    await wrong_tokens(store, starts[1]).compare_first_answer(Peer("http://own"))
    store.unclaim("app", "wrong tokens/v6e-8", "new0")
    out(store, "n0")
    await wrong_tokens(store, starts[2]).compare_first_answer(Peer("http://own"))


async def test_a_store_that_can_t_be_read_ends_no_start() -> None:
    """The model has been loaded for minutes by then."""

    def away(_: str) -> Any:
        raise ConnectionError("the head restarts")

    own = SliceRecord("r", "llama", SliceState.STARTING, "", "")
    await wrong_tokens(SimpleNamespace(read=away), own).compare_first_answer(Peer("http://own"))
