"""When a slice goes for wrong tokens, and when it serves on; store and record are stand-ins."""

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from serving.engine.answer_check import Wrong
from serving.engine.wrong_tokens import WrongTokens
from serving.errors import WrongTokensError
from serving.slices.quarantine import WRONG_TOKENS
from serving.state.records import Peer, SliceFailures, SliceRecord, SliceState, Snapshot

pytestmark = pytest.mark.unit


def wrong_tokens(store: Any, own: SliceRecord) -> WrongTokens:
    """Of a slice without Ray."""
    record: Any = SimpleNamespace(record=own)
    return WrongTokens(store, record)


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
    made = wrong_tokens(store, fleet[0])
    assert made.verdict() == "it gave other tokens"
    snapshot = Snapshot(slices=fleet[:8], slice_failures=(out("a"), out("b")))
    for _ in range(3):
        assert made.verdict() == ""
    assert caplog.text.count("serves on though it gave other tokens: too many slices are out") == 1


async def test_a_slice_that_starts_serves_where_too_many_are_out_for_wrong_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """New hosts that round otherwise: each start failed and took another slice for an hour, until none was left."""

    async def wrong(_model: str, own: str, _others: Any) -> Wrong:
        return Wrong(own, ("r0", "r1"))

    monkeypatch.setattr("serving.engine.wrong_tokens.wrong_at_start", wrong)
    fleet = [
        SliceRecord(f"r{at}", "llama", SliceState.SERVING, "", "", slice=f"s{at}", pod_type="v6e-8")
        for at in range(3)
    ]
    own = replace(fleet[2], state=SliceState.STARTING)
    made = wrong_tokens(
        SimpleNamespace(read=lambda _: Snapshot(slices=(*fleet[:2], own)), now=time.time), own
    )
    with pytest.raises(WrongTokensError, match="s0 and s1"):
        await made.compare_first_answer(Peer("http://own"))
    out = SliceFailures("a", "h", "v6e-8", WRONG_TOKENS, time.time(), "other tokens", "", "a", wrong=True)
    snapshot = Snapshot(slices=(*fleet[:2], own), slice_failures=(out,))
    store = SimpleNamespace(read=lambda _: snapshot, now=time.time)
    await wrong_tokens(store, own).compare_first_answer(Peer("http://own"))


async def test_a_store_that_can_t_be_read_ends_no_start() -> None:
    """The model has been loaded for minutes by then."""

    def away(_: str) -> Any:
        raise ConnectionError("the head restarts")

    own = SliceRecord("r", "llama", SliceState.STARTING, "", "")
    await wrong_tokens(SimpleNamespace(read=away), own).compare_first_answer(Peer("http://own"))
