"""Which slice a suspect is tried on, where several requests ask at once and some are cleared meanwhile."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from serving.config import FailoverSpec
from serving.errors import NoSliceError
from serving.router.forwarding.dispatch import Dispatcher
from serving.router.forwarding.suspects import Flight, fingerprint
from serving.router.http.protocol import InferenceRequest
from serving.router.scheduling.slice_table import SliceTable
from serving.state.records import SliceRecord, SliceState

pytestmark = pytest.mark.unit

MODEL = "llama"


def request(text: str) -> InferenceRequest:
    return InferenceRequest(MODEL, "/v1/completions", text.encode(), {})


@pytest.fixture
async def dispatcher() -> AsyncIterator[Dispatcher]:
    """Slices b and c; a died a second ago under two requests, and not every router has heard of it."""
    table = SliceTable({MODEL: 2}, {MODEL: "v6e 2x4"})
    table.update(
        [
            SliceRecord(replica, MODEL, SliceState.SERVING, "serving", "v6e 2x4", address=f"http://{replica}")
            for replica in "bc"
        ],
        0.0,
    )
    made = Dispatcher(table, FailoverSpec(retries=2, wait_s=0.0), routers=2)
    made.suspects._heard_s = 0.05
    now = time.time()
    there = [Flight(fingerprint(request(text)), MODEL, now - 1) for text in ("first", "second")]
    made.suspects.died("a", there, now, now - 5)
    yield made
    await made.close()


async def chosen(dispatcher: Dispatcher, text: str) -> str:
    entry = await dispatcher._choose_among_suspects(request(text), set())
    return entry.replica


async def test_a_request_that_is_cleared_while_it_waits_for_its_trial_is_on_none(
    dispatcher: Dispatcher,
) -> None:
    """Its slice may die at any time later, and it would be found guilty."""
    waiting = [asyncio.create_task(chosen(dispatcher, "first")) for _ in range(3)]
    await asyncio.sleep(0)
    dispatcher.suspects.cleared(fingerprint(request("first")))
    assert set(await asyncio.gather(*waiting)) <= {"b", "c"}
    assert not dispatcher.suspects.closed()


async def test_suspects_that_ask_at_once_are_tried_apart_and_the_same_one_once(
    dispatcher: Dispatcher,
) -> None:
    class SlowClaims:
        async def take(self, replica: str) -> bool:  # noqa: ARG002
            await asyncio.sleep(0.02)
            return True

        async def give_back(self, replica: str) -> None: ...

    dispatcher.claims = SlowClaims()
    asked = ["first", "first", "second", "second"]
    found = await asyncio.gather(*(chosen(dispatcher, text) for text in asked), return_exceptions=True)
    assert sorted(one for one in found if isinstance(one, str)) == ["b", "c"]
    assert sum(isinstance(one, NoSliceError) for one in found) == 2


async def test_a_claim_that_is_not_given_leaves_no_trial(dispatcher: Dispatcher) -> None:
    class NoneFree:
        async def take(self, replica: str) -> bool:  # noqa: ARG002
            return False

        async def give_back(self, replica: str) -> None: ...

    dispatcher.claims = NoneFree()
    with pytest.raises(NoSliceError):
        await chosen(dispatcher, "first")
    assert not dispatcher.suspects.closed()


async def test_a_suspect_is_not_tried_on_the_slice_that_died(dispatcher: Dispatcher) -> None:
    dead = SliceRecord("a", MODEL, SliceState.SERVING, "serving", "v6e 2x4", address="http://a")
    dispatcher._table.update([dead], 0.0)
    with pytest.raises(NoSliceError):
        await chosen(dispatcher, "first")
