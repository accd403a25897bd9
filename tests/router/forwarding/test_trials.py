"""Which slice a suspect is tried on, where several requests ask at once and some are cleared meanwhile."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from support.servers import free_address

from serving.config import FailoverSpec
from serving.router.forwarding.dispatch import Dispatcher, _TrialAwaitedError
from serving.router.forwarding.suspects import Flight, Suspects, fingerprint
from serving.router.forwarding.trials import Trials
from serving.router.http.protocol import InferenceRequest
from serving.router.scheduling.slice_table import SliceTable
from serving.state.records import SliceRecord, SliceState
from serving.timings import Timings

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
        async def take(self, replica: str, name: str, for_s: float) -> bool:  # noqa: ARG002
            await asyncio.sleep(0.02)
            return True

        async def give_back(self, replica: str, name: str) -> None: ...

    dispatcher.trials.claims = SlowClaims()
    asked = ["first", "first", "second", "second"]
    found = await asyncio.gather(*(chosen(dispatcher, text) for text in asked), return_exceptions=True)
    assert sorted(one for one in found if isinstance(one, str)) == ["b", "c"]
    assert sum(isinstance(one, _TrialAwaitedError) for one in found) == 2


async def test_a_claim_that_is_not_given_leaves_no_trial(dispatcher: Dispatcher) -> None:
    class NoneFree:
        async def take(self, replica: str, name: str, for_s: float) -> bool:  # noqa: ARG002
            return False

        async def give_back(self, replica: str, name: str) -> None: ...

    dispatcher.trials.claims = NoneFree()
    with pytest.raises(_TrialAwaitedError):
        await chosen(dispatcher, "first")
    assert not dispatcher.suspects.closed()


async def test_a_store_that_can_t_be_asked_for_a_claim_fails_no_request(dispatcher: Dispatcher) -> None:
    class Away:
        async def take(self, replica: str, name: str, for_s: float) -> bool:  # noqa: ARG002
            raise RuntimeError("no store")

        async def give_back(self, replica: str, name: str) -> None:  # noqa: ARG002
            raise RuntimeError("no store")

    dispatcher.trials.claims = Away()
    with pytest.raises(_TrialAwaitedError):
        await chosen(dispatcher, "first")
    assert not dispatcher.suspects.closed()
    dispatcher.trials.end("first", "b")
    await asyncio.sleep(0)


async def test_the_wait_for_a_trial_is_not_that_for_a_slice(dispatcher: Dispatcher) -> None:
    """`failover.wait_s` is 0: where suspects waited for each other, most were refused though slices served."""
    for replica in "bc":
        dispatcher.suspects.tried(f"others on {replica}", replica, time.time())
    waiting = asyncio.create_task(dispatcher._choose(request("first"), dispatcher.tries()))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    dispatcher.suspects.cleared("others on c")
    assert (await waiting).replica == "c"


async def test_a_slice_that_goes_as_planned_dies_of_no_request(dispatcher: Dispatcher) -> None:
    draining = SliceRecord("b", MODEL, SliceState.DRAINING, "draining", "v6e 2x4", address="http://b")
    dispatcher.settle([draining])
    dispatcher._table.update([], 1.0)
    assert not await dispatcher._is_dead(draining)
    assert await dispatcher._is_dead(SliceRecord("c", MODEL, SliceState.SERVING, "", ""))


async def test_a_slice_that_was_late_once_and_serves_on_is_judged_anew(dispatcher: Dispatcher) -> None:
    entry = SliceRecord("b", MODEL, SliceState.SERVING, "serving", "v6e 2x4", address="http://127.0.0.1:1")
    await dispatcher.judge(entry, request("third"))
    assert set(dispatcher._verdicts) == {"b"}
    dispatcher.settle([entry])
    assert set(dispatcher._verdicts) == {"b"}
    dispatcher._dead["b"] -= 11
    dispatcher.settle([entry])
    assert not dispatcher._verdicts


async def test_a_suspect_is_not_tried_on_the_slice_that_died(dispatcher: Dispatcher) -> None:
    dead = SliceRecord("a", MODEL, SliceState.SERVING, "serving", "v6e 2x4", address="http://a")
    dispatcher._table.update([dead], 0.0)
    with pytest.raises(_TrialAwaitedError):
        await chosen(dispatcher, "first")


class SharedClaims:
    """What two routers in one process agree on, as the store has it."""

    held: dict[str, str]

    def __init__(self, by: str, held: dict[str, str]) -> None:
        self.by, self.held = by, held

    async def take(self, replica: str, name: str, for_s: float) -> bool:  # noqa: ARG002
        await asyncio.sleep(0)
        if any(self.held.get(what, self.by) != self.by for what in (replica, name)):
            return False
        self.held |= {replica: self.by, name: self.by}
        return True

    async def give_back(self, replica: str, name: str) -> None:
        await asyncio.sleep(0)
        for what in (replica, name):
            self.held.pop(what, None)


async def test_two_routers_with_the_same_request_try_it_on_one_slice(dispatcher: Dispatcher) -> None:
    """Both heard of it at the same time: its second death would be two."""
    held: dict[str, str] = {}
    dispatcher.trials.claims = SharedClaims("first", held)
    other = Suspects(heard_s=0.05)
    other.take([dispatcher.suspects.ours], time.time())
    others = Trials(other)
    others.claims = SharedClaims("second", held)
    name = fingerprint(request("first"))
    assert await chosen(dispatcher, "first") == "b"
    assert not await others.begin(name, "c")
    assert not other.closed()
    dispatcher.trials.end(name, dispatcher.suspects.left(name, "b"))
    await asyncio.gather(*dispatcher.trials._givings)
    assert await others.begin(name, "c")


async def test_a_slice_is_not_taken_again_while_it_is_given_back(dispatcher: Dispatcher) -> None:
    """The store would delete the later claim, and another router would try a second suspect there."""
    giving = asyncio.Event()

    class SlowToGive:
        async def take(self, replica: str, name: str, for_s: float) -> bool:  # noqa: ARG002
            return True

        async def give_back(self, replica: str, name: str) -> None:  # noqa: ARG002
            await giving.wait()

    dispatcher.trials.claims = SlowToGive()
    dispatcher.suspects.tried("another", "c", time.time())
    assert await chosen(dispatcher, "first") == "b"
    name = fingerprint(request("first"))
    dispatcher.trials.end(name, dispatcher.suspects.left(name, "b"))
    for text in ("first", "second"):
        with pytest.raises(_TrialAwaitedError):
            await chosen(dispatcher, text)
    giving.set()
    await asyncio.gather(*dispatcher.trials._givings)
    assert await chosen(dispatcher, "second") == "b"


async def test_who_was_found_guilty_is_not_tried_elsewhere_before_all_have_heard(
    dispatcher: Dispatcher,
) -> None:
    held: dict[str, str] = {}
    dispatcher.trials.claims = SharedClaims("first", held)
    replica = await chosen(dispatcher, "first")
    name = fingerprint(request("first"))
    dispatcher._asking[asyncio.timeout(None)] = (
        dispatcher._table.entry(replica),
        request("first"),
        time.monotonic(),
    )  # type: ignore[assignment]
    dispatcher._table.update([], 1.0)
    await dispatcher.judge(SliceRecord(replica, MODEL, SliceState.LOST, "", ""), request("x"), waits=False)
    await dispatcher._verdicts[replica]
    assert dispatcher.suspects.is_guilty(name)
    await asyncio.sleep(0.05)
    assert name in held


async def test_a_slice_that_is_lost_where_every_client_has_hung_up_is_judged(dispatcher: Dispatcher) -> None:
    """A client that hangs up each time would take slice after slice, and nobody would ask why."""
    entry = dispatcher._table.entry("b")
    assert entry
    dispatcher._hung_up(entry, request("poison"), time.monotonic())
    dispatcher.settle([entry])
    assert not dispatcher._verdicts
    lost = replace(entry, state=SliceState.LOST)
    dispatcher._table.update([lost], 1.0)
    dispatcher.settle([lost])
    await dispatcher._verdicts["b"]
    assert dispatcher.suspects.died_under(fingerprint(request("poison"))) == {"b"}


@pytest.mark.parametrize("jumped_s", [-3600.0, 3600.0])
async def test_a_clock_that_jumps_and_a_router_that_stood_still_end_no_trial(jumped_s: float) -> None:
    """A deadly request passed for one that its slice had outlived, and ended a third."""
    table = SliceTable({MODEL: 1}, {MODEL: "v6e 2x4"})
    dispatcher = Dispatcher(table, timings=Timings(stall_look_s=0.01))
    began, looks, looked_often = time.time(), 0, asyncio.Event()

    def now() -> float:
        nonlocal looks
        looks += 1
        if looks == 20:
            looked_often.set()
        return began + (jumped_s if looks > 5 else 0.0)

    dispatcher.now = now
    dispatcher.suspects.tried("suspect", "b", began)
    await looked_often.wait()
    assert dispatcher.suspects.closed() == {"b"}
    assert dispatcher.suspects.survivors(began + jumped_s + 2) == ["suspect"]
    await dispatcher.close()


@pytest.mark.parametrize("state", [SliceState.DRAINING, SliceState.SERVING])
async def test_of_a_slice_that_is_gone_where_clients_have_hung_up_nothing_is_kept(
    dispatcher: Dispatcher, state: SliceState
) -> None:
    """Each planned stop wrote a KeyError to the log, and a slice that was lost counted among the dead for ever."""
    (entry,) = (
        replace(each, state=state) for each in dispatcher._table.entries(MODEL) if each.replica == "b"
    )
    dispatcher._hung_up(entry, request("poison"), time.monotonic())
    dispatcher.settle([entry])
    dispatcher._table.update([], 1.0)
    before = asyncio.all_tasks()
    dispatcher.settle([])
    await asyncio.gather(*(asyncio.all_tasks() - before))
    dispatcher.settle([])
    assert not dispatcher._verdicts
    assert not dispatcher._dead
    lost = state is not SliceState.DRAINING
    assert dispatcher.suspects.died_under(fingerprint(request("poison"))) == ({"b"} if lost else set())


async def test_what_hung_up_is_forgotten_once_its_slice_has_worked_on(dispatcher: Dispatcher) -> None:
    entry = dispatcher._table.entry("b")
    assert entry
    dispatcher._hung_up(entry, request("harmless"), time.monotonic())
    for beat in range(1, 30):
        dispatcher.settle([replace(entry, beat=beat, output_tokens=beat)])
    assert not dispatcher._hung


async def test_a_request_of_the_only_slice_is_sent_there_again_once_the_slice_was_only_late() -> None:
    """It waited for another slice for as long as it was suspected."""
    table = SliceTable({MODEL: 1}, {MODEL: "v6e 2x4"})
    alone = SliceRecord("a", MODEL, SliceState.SERVING, "serving", "v6e 2x4", address=free_address())
    table.update([alone], 0.0)
    dispatcher = Dispatcher(table, FailoverSpec(retries=2, wait_s=0.0), timings=Timings(late_s=0.0))
    dispatcher._hung_up(alone, request("first"), time.monotonic())
    await dispatcher._verdict(alone)
    with pytest.raises(_TrialAwaitedError):
        await chosen(dispatcher, "first")
    dispatcher.settle([alone])
    assert await chosen(dispatcher, "first") == "a"
    await dispatcher.close()


async def test_no_request_is_sent_to_a_slice_that_was_found_dead_while_another_serves(
    dispatcher: Dispatcher,
) -> None:
    """Where several died at once, their 500s used up the tries of requests that had ended none: 11 of 128 failed."""
    dispatcher._dead["b"] = time.monotonic()
    asked = [await dispatcher._choose(request(f"{number}"), dispatcher.tries()) for number in range(8)]
    assert {entry.replica for entry in asked} == {"c"}
    dispatcher._dead["c"] = time.monotonic()
    assert (await dispatcher._choose(request("late"), dispatcher.tries())).replica in ("b", "c")
