"""What shows only with many slices and many routers, in faked time."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from support.many_routers import MODEL, Fleet, prompt

from serving.router.forwarding.stalls import Stream, stalled
from serving.router.scheduling import prefix_index
from serving.timings import TIMINGS

pytestmark = pytest.mark.unit


def beats(seconds: float) -> int:
    return round(seconds / TIMINGS.beat_s)


def test_a_store_that_takes_no_puts_costs_no_slice_that_answers() -> None:
    """Every record stands still for ten seconds, as where a put takes so long."""
    fleet = Fleet(slices=100, routers=4)
    fleet.run(beats(10), written=False)
    assert all(router.serving() == set(fleet.slices) for router in fleet.routers)


def test_a_slice_that_dies_meanwhile_is_still_found_by_every_router() -> None:
    fleet = Fleet(slices=100, routers=4)
    fleet.run(beats(3), written=False)
    fleet.dead.add("slice-7")
    fleet.run(beats(TIMINGS.stale_s + TIMINGS.silent_s), written=False)
    assert all(router.serving() == set(fleet.slices) - {"slice-7"} for router in fleet.routers)


def test_where_the_store_is_well_a_dead_slice_is_lost_as_soon_as_its_record_is_stale() -> None:
    fleet = Fleet(slices=20, routers=3)
    fleet.dead.add("slice-7")
    fleet.run(beats(TIMINGS.stale_s))
    assert all(router.serving() == set(fleet.slices) for router in fleet.routers)
    fleet.run(1)
    assert all(router.serving() == set(fleet.slices) - {"slice-7"} for router in fleet.routers)


def test_routers_that_cannot_read_go_on_with_what_they_know_and_lose_nobody_afterwards() -> None:
    fleet = Fleet(slices=50, routers=4)
    fleet.run(beats(60), written=False, read=False)
    assert all(fleet.routers[0].send(f"prompt {number}") for number in range(20))
    fleet.run(1, written=False)  # the head is back, and no slice has come to write yet
    assert all(router.serving() == set(fleet.slices) for router in fleet.routers)
    fleet.run(beats(5))
    assert all(router.serving() == set(fleet.slices) for router in fleet.routers)


class Counted(dict[Any, Any]):
    """A dictionary that counts what is taken out of it."""

    taken = 0

    def __getitem__(self, key: Any) -> Any:
        self.taken += 1
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self.taken += 1
        return super().get(key, default)

    def values(self) -> Any:
        self.taken += len(self)
        return super().values()

    def items(self) -> Any:
        self.taken += len(self)
        return super().items()


def test_a_choice_among_a_thousand_slices_looks_at_one() -> None:
    fleet = Fleet(slices=1000, routers=1)
    (router,) = fleet.routers
    for number in range(50):
        router.send(f"talk {number} " * 400)
    table = router.table
    table._slices, table._numbered = slices, numbered = Counted(table._slices), Counted(table._numbered)
    for number in range(50):
        table.choose(MODEL, ["slice-3"], prompt(f"talk {number} " * 500))
    assert slices.taken + numbered.taken <= 50 * 3


def test_conversations_are_remembered_by_a_thousand_slices_and_find_them_again() -> None:
    """More than the index kept when each slice had a thousandth of it: 262 blocks."""
    fleet = Fleet(slices=1000, routers=2)
    router, other = fleet.routers
    first = {number: router.send(f"talk {number} " * 2000) for number in range(2000)}
    for replica in first.values():
        router.table.end(replica)
    fleet.run(3)
    again = {number: router.send(f"talk {number} " * 2100) for number in first}
    assert sum(first[number] == again[number] for number in first) > 0.95 * len(first)
    held = [prefix_index.trace(prompt(f"talk {number} " * 2000)).blocks for number in first]
    matches = [next(router.table._index.matches(names, -1), (0, 0))[0] for names in held]
    assert matches == [len(names) for names in held]
    # And through a router that has never seen them, by their homes.
    elsewhere = {number: other.send(f"talk {number} " * 2100) for number in range(300)}
    assert sum(first[number] == elsewhere[number] for number in elsewhere) > 0.5 * len(elsewhere)
    assert max(Counter(again.values()).values()) <= 10


def stream(fleet: Fleet, replica: str, *, heard_s: float) -> Stream:
    response: Any = SimpleNamespace()
    entry = fleet.slices[replica]
    return Stream(entry, prompt(""), response, heard_s, trial=False, heard_s=heard_s, watched=True)


def cut(fleet: Fleet, open_stream: Stream) -> bool:
    """Whether the first router takes its one stream off the slice now."""
    return bool(stalled([open_stream], fleet.routers[0].timing, lambda _: 1, fleet.now_s))


def known(fleet: Fleet, replica: str) -> None:
    """The first router has seen the slice's usual gaps and first tokens."""
    for _ in range(30):
        fleet.routers[0].timing.gap(replica, 0.02)
        fleet.routers[0].timing.first(replica, 0.2)


def test_a_prompt_that_another_router_sent_is_no_stall() -> None:
    fleet = Fleet(slices=2, routers=2)
    known(fleet, "slice-0")
    own = stream(fleet, "slice-0", heard_s=fleet.now_s)
    fleet.set("slice-0", running=2, reading=1)
    for _ in range(beats(9)):
        fleet.run(1)
        assert not cut(fleet, own)
    fleet.run(beats(2))
    assert cut(fleet, own)  # no prompt takes so long here


def test_a_slice_that_gives_tokens_to_other_routers_alone_has_preempted_and_not_stalled() -> None:
    fleet = Fleet(slices=2, routers=2)
    known(fleet, "slice-0")
    own = stream(fleet, "slice-0", heard_s=fleet.now_s)
    for number in range(beats(20)):
        fleet.set("slice-0", running=9, output_tokens=100 * number)
        fleet.run(1)
        assert not cut(fleet, own)
    fleet.run(beats(3))
    assert cut(fleet, own)


def test_a_slice_tried_by_a_long_answer_is_back_in_two_beats() -> None:
    fleet = Fleet(slices=2, routers=2)
    (router, _) = fleet.routers
    router.breaker.failed("slice-0", fleet.now_s, broken=True)
    fleet.run(beats(2))
    assert router.breaker.began("slice-0", fleet.now_s)
    assert router.breaker.left_out(fleet.now_s) == {"slice-0"}
    for number in range(1, 5):
        fleet.set("slice-0", running=1, output_tokens=30 * number)
        fleet.run(1)
    assert router.breaker.left_out(fleet.now_s) == set()
