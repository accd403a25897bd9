from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.config import QueueSpec
from serving.errors import NoSliceError, OverloadedError, RateLimitError
from serving.router.admission.queue import AdmissionQueue, Backlog, Outlook, Ticket, Where, capacity, seats
from serving.router.admission.rate_limit import Account
from serving.router.http.auth import Key
from serving.state.records import SliceRecord, SliceState

pytestmark = pytest.mark.unit

LLAMA = "llama"
WHY = "No slice of 'llama' is ready: it waits for a free v6e 2x4 slice."


def account(name: str = "batch", **limits: Any) -> Account:
    key = Key.model_validate({"name": name, "sha256": "0" * 64, **limits})
    made = Account(key)
    made.set(key, 0.0)
    return made


def ticket(who: Account, since_s: float = 0.0, *, tokens: float = 1, seats: int = 1) -> Ticket:
    return Ticket(LLAMA, who, tokens, seats, size_bytes=100, since_s=since_s)


def outlook(seats: int, *, coming: bool = True) -> Outlook:
    return Outlook(seats, coming, WHY)


def admission(seats: int, *, coming: bool = True, requests: int = 10, wait_s: float = 30) -> AdmissionQueue:
    made = AdmissionQueue({LLAMA: QueueSpec(requests=requests, wait_s=wait_s)})
    made.update(LLAMA, outlook(seats, coming=coming), 0.0)
    return made


def asked(on: AdmissionQueue, *tickets: Ticket) -> list[Where]:
    for one in tickets:
        on.enter(one, one.since_s)
    return [one.where for one in tickets]


def test_a_request_goes_straight_through_while_there_is_a_seat() -> None:
    on, who = admission(2), account()
    first, second, third = (ticket(who) for _ in range(3))
    assert asked(on, first, second, third) == [Where.ADMITTED, Where.ADMITTED, Where.HELD]
    assert on.counts(LLAMA) == {
        "held": 1,
        "in_flight": 2,
        "arrived": 3,
        "refused": 0,
        "abandoned": 0,
        "prompt_bytes": 300,
    }
    assert on.leave(first, 1.0) == [third]
    assert third.where is Where.ADMITTED


def filling(who: Account, seats: int = 1, spare: float = 0.0) -> Ticket:
    made = ticket(who, seats=seats)
    made.fills, made.spare = True, spare
    return made


def test_what_fills_takes_a_free_seat_or_none_and_is_no_demand() -> None:
    on, who = admission(3), account()
    first, two, second = filling(who), filling(who, seats=2), filling(who)
    assert asked(on, ticket(who), two) == [Where.ADMITTED, Where.ADMITTED]
    assert asked(on, first) == [Where.REFUSED]
    assert on.filling(LLAMA) == 1
    assert on.counts(LLAMA) == {
        "held": 0,
        "in_flight": 1,
        "arrived": 1,
        "refused": 0,
        "abandoned": 0,
        "prompt_bytes": 100,
    }
    held = ticket(who)
    assert asked(on, held) == [Where.HELD]
    assert on.leave(two, 1.0) == [held]
    assert asked(on, second) == [Where.ADMITTED]
    assert on.leave(second, 1.0) == []
    assert on.filling(LLAMA) == 0


def test_nothing_fills_while_a_request_waits() -> None:
    on, who = admission(2), account()
    assert asked(on, ticket(who, seats=2), ticket(who)) == [Where.ADMITTED, Where.HELD]
    assert on.room(LLAMA, 0.0) == 0
    assert asked(on, filling(who)) == [Where.REFUSED]


@pytest.mark.parametrize(
    ("seats", "spare", "room"), [(20, 0.1, 18), (10, 0.0, 10), (1, 0.5, 1), (2, 0.9, 1), (0, 0.1, 0)]
)
def test_a_share_of_the_seats_stays_free_of_what_fills(seats: int, spare: float, room: int) -> None:
    assert admission(seats).room(LLAMA, spare) == room


def test_several_answers_to_one_line_leave_the_spare_seats_free_too() -> None:
    on, who = admission(10), account()
    assert asked(on, *(filling(who, seats, 0.2) for seats in (4, 5, 4, 1))) == [
        Where.ADMITTED,
        Where.REFUSED,
        Where.ADMITTED,
        Where.REFUSED,
    ]
    assert on.free_seats(LLAMA) == 2


def test_a_line_of_more_answers_than_may_be_filled_comes_when_nothing_else_runs() -> None:
    on, who = admission(10), account()
    first = filling(who, 1, 0.2)
    assert asked(on, first, filling(who, 128, 0.2)) == [Where.ADMITTED, Where.REFUSED]
    on.leave(first, 1.0)
    assert asked(on, filling(who, 128, 0.2)) == [Where.ADMITTED]
    assert on.free_seats(LLAMA) == 0


def test_a_request_with_several_sequences_takes_several_seats() -> None:
    on, who = admission(4), account()
    four, one = ticket(who, seats=4), ticket(who)
    assert asked(on, ticket(who), four, one) == [Where.ADMITTED, Where.ADMITTED, Where.HELD]
    assert on.leave(four, 1.0) == [one]


def test_what_needs_no_engine_waits_for_no_seat_but_for_a_slice() -> None:
    on, who = admission(1), account()
    assert asked(on, ticket(who), ticket(who), ticket(who, seats=0))[2] is Where.ADMITTED
    assert asked(admission(0), ticket(who, seats=0)) == [Where.HELD]


def test_requests_wait_for_a_slice_that_is_on_its_way() -> None:
    on, who = admission(0), account()
    waiting = [ticket(who) for _ in range(3)]
    assert asked(on, *waiting) == [Where.HELD] * 3
    assert on.update(LLAMA, outlook(0), 29.0) == []
    assert on.update(LLAMA, outlook(2), 29.5) == waiting[:2]


def test_nobody_waits_for_a_slice_that_is_not() -> None:
    on, held, late = admission(0), ticket(account()), ticket(account(), 1.0)
    asked(on, held)
    assert on.update(LLAMA, outlook(0, coming=False), 1.0) == [held]
    on.enter(late, 1.0)
    for one in (held, late):
        assert one.where is Where.REFUSED
        assert one.refusal is not None
        assert isinstance(one.refusal.error, NoSliceError)
        assert one.refusal.error.message.startswith(WHY)
    assert on.counts(LLAMA)["refused"] == 2


def test_whoever_waits_too_long_is_refused_and_told_when_to_come_back() -> None:
    """Two a second end, three wait before the next: two seconds."""
    on, who = admission(4), account()
    busy = [ticket(who) for _ in range(4)]
    asked(on, *busy)
    for second in range(1, 30):
        for done in busy[:2]:
            on.leave(done, second)
        busy = [*busy[2:], ticket(who, second), ticket(who, second)]
        asked(on, *busy[2:])
        on.update(LLAMA, outlook(4), second)
    waiting = [ticket(who, 30.0) for _ in range(4)]
    asked(on, *waiting)
    assert on.update(LLAMA, outlook(4), 59.9) == []
    assert on.update(LLAMA, outlook(4), 60.0) == waiting
    refusal = waiting[0].refusal
    assert refusal is not None
    assert isinstance(refusal.error, OverloadedError)
    assert refusal.error.message == (
        "Every slice of 'llama' is busy: 4 requests are under way and 3 wait in this router. This request waited 30 s."
    )
    assert refusal.retry_after_s is not None
    assert refusal.retry_after_s >= 1


def test_a_full_queue_refuses_with_the_time_it_takes_to_empty() -> None:
    on, who = admission(1, requests=3), account()
    running = ticket(who)
    asked(on, running)
    for second in range(1, 20):  # one every second
        on.leave(running, second)
        running = ticket(who, second)
        asked(on, running)
        on.update(LLAMA, outlook(1), second)
    assert asked(on, *[ticket(who, 20.0) for _ in range(3)]) == [Where.HELD] * 3
    late = ticket(who, 20.0)
    assert asked(on, late) == [Where.REFUSED]
    assert late.refusal is not None
    assert late.refusal.retry_after_s == pytest.approx(4, rel=0.1)


def test_without_a_queue_a_request_is_refused_at_once() -> None:
    for spec in ({"requests": 0}, {"wait_s": 0}):
        on, who = admission(1, **spec), account()  # type: ignore[arg-type]
        assert asked(on, ticket(who), ticket(who)) == [Where.ADMITTED, Where.REFUSED]


def test_in_a_full_queue_another_key_s_request_makes_room_for_a_quiet_one() -> None:
    on, loud, quiet = admission(1, requests=3), account("loud"), account("quiet")
    flood = [ticket(loud) for _ in range(4)]
    asked(on, *flood)
    one = ticket(quiet)
    assert on.enter(one, 0.0) == [flood[3]]
    assert (one.where, flood[3].where) == (Where.HELD, Where.REFUSED)
    assert on.leave(flood[0], 1.0) == [flood[1]]
    assert on.leave(flood[1], 1.0) == [one]


def test_bodies_that_wait_have_a_limit_in_bytes_too() -> None:
    on, who = admission(0), account()
    big = [Ticket(LLAMA, who, 1, 1, 200 << 20, 0.0) for _ in range(2)]
    assert asked(on, *big) == [Where.HELD, Where.REFUSED]
    on.leave(big[0], 1.0)
    assert asked(on, Ticket(LLAMA, who, 1, 1, 200 << 20, 1.0)) == [Where.HELD]


def test_a_client_that_leaves_while_it_waits_leaves_nothing_behind() -> None:
    on, who = admission(0), account(tokens_per_minute=100)
    one = ticket(who, tokens=90)
    asked(on, one)
    assert on.leave(one, 1.0) == []
    assert (on.counts(LLAMA)["held"], on.counts(LLAMA)["abandoned"]) == (0, 1)
    assert asked(on, ticket(who, 1.0, tokens=90)) == [Where.HELD]


def test_what_a_key_s_own_limit_refuses_takes_no_place_and_is_no_demand() -> None:
    on, who = admission(0), account(tokens_per_minute=100)
    first, second = ticket(who, tokens=100), ticket(who, tokens=100)
    assert asked(on, first, second) == [Where.HELD, Where.REFUSED]
    assert second.refusal is not None
    assert isinstance(second.refusal.error, RateLimitError)
    assert on.leave(second, 0.0) == []
    assert on.counts(LLAMA) == {
        "held": 1,
        "in_flight": 0,
        "arrived": 1,
        "refused": 0,
        "abandoned": 0,
        "prompt_bytes": 100,
    }


def test_what_a_refused_request_would_have_used_is_given_back() -> None:
    on, who = admission(0, coming=False), account(tokens_per_minute=100)
    assert asked(on, ticket(who, tokens=100), ticket(who, tokens=100)) == [Where.REFUSED] * 2
    assert dict(who.headers(0.0))[b"x-ratelimit-remaining-tokens"] == b"100"


KEYS = st.sampled_from("abc")


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("ask"), KEYS, st.integers(0, 4)),
            st.tuples(st.just("leave"), st.integers(0, 99)),
            st.tuples(st.just("beat"), st.integers(0, 6), st.booleans()),
        ),
        max_size=60,
    )
)
def test_whatever_happens_every_request_is_in_one_place_and_is_told_of_when_it_moves(
    steps: list[tuple[Any, ...]],
) -> None:
    on = admission(2, requests=4, wait_s=5)
    who = {name: account(name, tokens_per_minute=1000) for name in "abc"}
    now_s, places = 0.0, {}
    alive: list[Ticket] = []
    for step in steps:
        now_s += 1
        changed: list[Ticket] = []
        match step:
            case ("ask", name, size):
                one = ticket(who[name], now_s, tokens=size * 20, seats=size)
                changed = on.enter(one, now_s)
                places[one] = one.where
                alive.append(one)
            case ("leave", which) if alive:
                changed = on.leave(alive.pop(which % len(alive)), now_s)
            case ("beat", free, coming):
                changed = on.update(LLAMA, outlook(free, coming=coming), now_s)
                assert not (
                    free and any(one.where is Where.HELD for one in alive) and on.seats_taken(LLAMA) < free
                )
        for one in changed:
            assert places[one] is Where.HELD
            assert one.where is not Where.HELD
            places[one] = one.where
        assert all(places[one] is one.where for one in alive)
        running = [one for one in alive if one.where is Where.ADMITTED]
        held = [one for one in alive if one.where is Where.HELD]
        counts = on.counts(LLAMA)
        assert (counts["held"], counts["in_flight"]) == (len(held), len(running))
        assert on.seats_taken(LLAMA) == sum(one.seats for one in running)
        assert on._models[LLAMA].held_bytes == 100 * len(held)


def entry(replica: str, state: SliceState = SliceState.SERVING, **more: Any) -> SliceRecord:
    return SliceRecord(replica, LLAMA, state, state.value, "v6e 2x4", **more)


def test_a_model_has_as_many_seats_as_its_serving_slices_run_at_once() -> None:
    entries = [
        entry("a"),
        entry("b", pool="second"),
        entry("c", SliceState.STARTING),
        entry("d", SliceState.DRAINING),
    ]
    assert capacity(entries, {"": 8, "second": 16}) == 24


def test_requests_wait_for_a_seat_that_other_routers_have_now() -> None:
    on, who = admission(0, coming=False), account()
    on.update(LLAMA, Outlook(0, coming=False, why_none=WHY, serves=True), 0.0)
    one = ticket(who)
    assert asked(on, one) == [Where.HELD]
    assert on.seats_wanted(LLAMA) == 1
    assert on.update(LLAMA, outlook(1), 1.0) == [one]
    assert on.seats_wanted(LLAMA) == 0


def test_a_key_whose_answers_turn_out_long_waits_for_those_whose_were_short() -> None:
    """Both keys' requests looked alike when they came; only the end tells."""
    on, long, short = admission(1, requests=100), account("long"), account("short")
    running, order = ticket(long), []
    asked(on, running, *(ticket(who) for _ in range(20) for who in (long, short)))
    for _ in range(20):
        running.used_tokens = 100 if running.account is long else 1
        (running,) = on.leave(running, 1.0)
        order.append(running.account.key.name)
    assert order.count("long") <= 2


def test_engines_that_have_a_queue_get_less_until_it_has_gone() -> None:
    """A cache that is full before the seats are: what can't run had better wait here."""
    entries = [entry("a", running=60, waiting=40)]
    backlog = Backlog()
    reports = [replace(entries[0], beat=beat) for beat in range(4)]
    assert [bool(backlog.observe([report])) for report in reports[:3]] == [False, False, True]
    queued = backlog.observe(reports[3:])
    assert seats(entries, 256, queued, taken=100) == 80
    assert seats([*entries, entry("b")], 512, queued, taken=100) == 512  # the other one has room
    assert not backlog.observe([entry("a", running=60)])


def test_a_queue_of_which_nothing_is_heard_any_more_takes_no_seats() -> None:
    """While the head restarted, the last reports took a part of the seats at every beat, until one was left."""
    backlog = Backlog()
    for beat in range(5):
        queued = backlog.observe([entry("a", running=60, waiting=40, beat=beat)])
    assert queued
    taken = 100
    for _ in range(120):
        queued = backlog.observe([entry("a", running=60, waiting=40, beat=4)])
        taken = min(100, seats([entry("a", running=60, waiting=40)], 256, queued, taken=taken))
    assert taken >= 60
