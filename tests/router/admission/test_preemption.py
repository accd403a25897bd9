"""Who makes room for whom: the decision alone, and as the queue carries it out."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.config import PreemptionSpec, QueueSpec
from serving.errors import NoSliceError
from serving.router.admission.preemption import Running, victims
from serving.router.admission.queue import AdmissionQueue, Outlook, Ticket, Where
from serving.router.admission.rate_limit import Account
from serving.router.http.auth import Key

pytestmark = pytest.mark.unit

LLAMA = "llama"
LIMITS = PreemptionSpec(most=2, longest_s=30)
RUNNING = st.builds(
    Running,
    item=st.uuids(),
    priority=st.integers(-3, 3),
    work=st.floats(0, 1e5),
    movable=st.booleans(),
    times=st.integers(0, 3),
    paused_s=st.floats(0, 60),
)


@given(waiting=st.lists(st.integers(-3, 3), max_size=8), running=st.lists(RUNNING, max_size=12))
def test_nobody_makes_room_who_must_not_and_everybody_who_could_for_somebody(
    waiting: list[int], running: list[Running[Any]]
) -> None:
    waiting.sort(reverse=True)
    chosen = victims(waiting, running, LIMITS)
    by_item = {request.item: request for request in running}
    assert len(set(chosen)) == len(chosen) <= len(waiting)
    able = [request for request in running if request.movable and request.times < 2 and request.paused_s < 30]
    for item, priority in zip(chosen, waiting, strict=False):
        assert by_item[item] in able
        assert by_item[item].priority < priority
    left = [request for request in able if request.item not in chosen]
    for item in chosen:
        victim = by_item[item]
        assert all((victim.priority, victim.work) <= (other.priority, other.work) for other in left)
    if len(chosen) < len(waiting):  # who still waits finds nobody below him
        assert all(request.priority >= waiting[len(chosen)] for request in left)


def test_the_least_work_is_lost_within_the_lowest_priority() -> None:
    running = [
        Running("long", 0, work=900),
        Running("short", 0, work=100),
        Running("shorter, but of a better key", 1, work=10),
    ]
    assert victims([5], running, LIMITS) == ["short"]
    assert victims([5, 5, 5, 5], running, LIMITS) == ["short", "long", "shorter, but of a better key"]
    assert victims([5, 1, 1], running, LIMITS) == ["short", "long"]


@dataclass
class Stream:
    """An answer under way, for tests."""

    work: float = 0.0
    movable: bool = True
    told: int = 0

    def preempt(self) -> None:
        self.told += 1


def account(name: str, priority: int) -> Account:
    key = Key.model_validate({"name": name, "sha256": "0" * 64, "priority": priority})
    made = Account(key)
    made.set(key, 0.0)
    return made


LOW, HIGH = account("low", 0), account("high", 10)


def outlook(seats: int, *, coming: bool = True) -> Outlook:
    return Outlook(seats, coming, "none is there", serves=seats > 0)


def queue(seats: int, requests: int = 10, **limits: Any) -> AdmissionQueue:
    made = AdmissionQueue(
        {LLAMA: QueueSpec(requests=requests, wait_s=5)}, PreemptionSpec.model_validate(limits)
    )
    made.update(LLAMA, outlook(seats), 0.0)
    return made


def asks(on: AdmissionQueue, who: Account, now_s: float = 0.0, *, seats: int = 1) -> Ticket:
    one = Ticket(LLAMA, who, 1.0, seats, size_bytes=100, since_s=now_s)
    on.enter(one, now_s)
    return one


def streams(on: AdmissionQueue, who: Account, work: float = 0.0, **more: Any) -> tuple[Ticket, Stream]:
    """A request under way that could make room."""
    one, stream = asks(on, who), Stream(work, **more)
    assert one.where is Where.ADMITTED
    on.runs(one, stream)
    return one, stream


def test_a_stream_makes_room_and_goes_on_before_others_of_its_priority() -> None:
    on = queue(2)
    (long, _), (short, on_short) = streams(on, LOW, 900), streams(on, LOW, 100)
    other = asks(on, LOW)
    assert on.preempt(LLAMA) == []
    high = asks(on, HIGH)
    assert on.preempt(LLAMA) == [on_short]
    assert on.preempt(LLAMA) == []  # its seat is on the way
    assert on.pause(short, 1.0) == [high]
    assert (short.where, short.paused) == (Where.HELD, True)
    assert (on.seats_taken(LLAMA), on.seats_wanted(LLAMA)) == (2, 2)
    assert on.leave(long, 4.0) == [short]
    assert (short.paused_s, short.times, short.paused) == (3.0, 1, False)
    assert on.leave(high, 5.0) == [other]


def test_what_just_waits_longer_makes_nobody_room() -> None:
    on = queue(1, most=1)
    streams(on, HIGH)
    asks(on, HIGH)
    asks(on, LOW)
    assert on.preempt(LLAMA) == []


def test_a_stream_makes_room_a_few_times_at_most() -> None:
    on = queue(1, most=2)
    low, _ = streams(on, LOW)
    for now_s in (1.0, 2.0):
        high = asks(on, HIGH, now_s)
        assert len(on.preempt(LLAMA)) == 1
        assert on.pause(low, now_s) == [high]
        assert on.leave(high, now_s) == [low]
        on.runs(low, Stream())
    asks(on, HIGH)
    assert on.preempt(LLAMA) == []


def test_a_stream_that_was_paused_for_its_longest_is_next_before_every_priority() -> None:
    on = queue(1, longest_s=10)
    low, _ = streams(on, LOW)
    first = asks(on, HIGH, 1.0)
    on.preempt(LLAMA)
    assert on.pause(low, 1.0) == [first]
    second = asks(on, HIGH, 10.0)
    on.update(LLAMA, outlook(1), 10.9)
    assert on.leave(first, 10.9) == [second]
    on.runs(second, Stream())
    third = asks(on, HIGH, 10.9)
    on.update(LLAMA, outlook(1), 11.0)
    assert on.preempt(LLAMA) == []  # it takes no seat from its betters: it has the next that is free
    assert on.leave(second, 12.0) == [low]
    on.runs(low, Stream())
    assert on.preempt(LLAMA) == []
    assert on.leave(low, 13.0) == [third]


def test_a_paused_stream_waits_beyond_the_queues_end_and_deadline_while_a_slice_serves() -> None:
    on = queue(1, requests=1)
    low, _ = streams(on, LOW)
    high = asks(on, HIGH)
    on.preempt(LLAMA)
    on.pause(low, 0.0)
    assert asks(on, LOW).where is Where.HELD  # the paused one takes no place of the queue's
    (late,) = on.update(LLAMA, outlook(1), 5.0)
    assert (late.where, low.where) == (Where.REFUSED, Where.HELD)
    assert on.leave(high, 6.0) == [low]


@pytest.mark.parametrize("coming", [True, False])
def test_a_paused_stream_ends_where_no_slice_is_left(coming: bool) -> None:
    on = queue(1)
    low, _ = streams(on, LOW)
    high = asks(on, HIGH)
    on.preempt(LLAMA)
    on.pause(low, 10.0)
    if coming:
        assert on.update(LLAMA, outlook(0), 14.9) == []
    assert on.update(LLAMA, outlook(0, coming=coming), 15.0) == [low]
    assert low.refusal
    assert isinstance(low.refusal.error, NoSliceError)
    on.leave(low, 15.0)
    on.leave(high, 15.0)
    assert (on.seats_taken(LLAMA), on.seats_wanted(LLAMA)) == (0, 0)


def test_a_client_that_goes_while_it_is_paused_leaves_nothing_behind() -> None:
    on = queue(1)
    low, _ = streams(on, LOW)
    high = asks(on, HIGH)
    on.preempt(LLAMA)
    on.pause(low, 1.0)
    assert on.leave(low, 2.0) == []
    assert on.leave(high, 3.0) == []
    assert (on.seats_taken(LLAMA), on.seats_wanted(LLAMA), on._models[LLAMA].paused) == (0, 0, 0)


def test_a_stream_whose_better_has_gone_goes_on_at_once() -> None:
    on = queue(1)
    low, _ = streams(on, LOW)
    high = asks(on, HIGH)
    on.preempt(LLAMA)
    on.leave(high, 1.0)
    assert on.pause(low, 1.0) == [low]
    assert (low.where, on.seats_taken(LLAMA)) == (Where.ADMITTED, 1)


def test_where_too_many_seats_are_taken_one_is_handed_on_for_each_that_waits() -> None:
    """Seats were lost, or the engines have a queue: who waits need not wait until all that is too much has ended."""
    on = queue(8)
    running = [streams(on, LOW, float(number)) for number in range(8)]
    on.update(LLAMA, outlook(2), 1.0)
    high = asks(on, HIGH, 1.0)
    assert on.preempt(LLAMA) == [running[0][1]]
    assert on.pause(running[0][0], 1.0) == [high]
    assert on.seats_taken(LLAMA) == 8


def test_a_line_of_a_batch_makes_room_for_any_request() -> None:
    on = queue(1)
    line = Ticket(LLAMA, account("line", -100), 1.0, 1, size_bytes=100, since_s=0.0, fills=True)
    on.enter(line, 0.0)
    stream = Stream()
    on.runs(line, stream)
    request = asks(on, LOW)
    assert on.preempt(LLAMA) == [stream]
    assert on.leave(line, 1.0) == [request]
    assert on.filling(LLAMA) == 0


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from([-5, 0, 5]), st.integers(1, 2)),
        st.tuples(st.just("stream"), st.integers(0, 99), st.booleans()),
        st.tuples(st.just("pause"), st.integers(0, 99)),
        st.tuples(st.just("leave"), st.integers(0, 99)),
        st.tuples(st.just("beat"), st.integers(0, 4), st.booleans()),
    ),
    max_size=60,
)


class Walk:
    """A queue under any sequence of steps."""

    def __init__(self) -> None:
        self.on = queue(2, requests=4, longest_s=10)
        self.who = {priority: account(str(priority), priority) for priority in (-5, 0, 5)}
        self.now_s = 0.0
        self.alive: list[Ticket] = []
        self.owners: dict[int, Ticket] = {}
        self.streams: list[Stream] = []

    def step(self, step: tuple[Any, ...]) -> None:
        self.now_s += 1
        match step:
            case ("ask", priority, seats):
                self.alive.append(asks(self.on, self.who[priority], self.now_s, seats=seats))
            case ("beat", free, coming):
                self.on.update(LLAMA, outlook(free, coming=coming), self.now_s)
            case ("pause", which):
                if wanted := [one for one in self.alive if one.makes_room]:
                    self.on.pause(wanted[which % len(wanted)], self.now_s)
            case ("leave", which) if self.alive:
                self.on.leave(self.alive.pop(which % len(self.alive)), self.now_s)
            case ("stream", which, movable) if self.alive:
                self.stream(self.alive[which % len(self.alive)], float(which), movable=movable)

    def stream(self, one: Ticket, work: float, *, movable: bool) -> None:
        if one.where is Where.ADMITTED and not one.makes_room:
            self.streams.append(Stream(work, movable))
            self.owners[id(self.streams[-1])] = one
            self.on.runs(one, self.streams[-1])

    def preempt(self) -> None:
        waiting = [one.priority for one in self.alive if one.where is Where.HELD]
        for stream in self.on.preempt(LLAMA):
            victim = self.owners[id(stream)]
            assert isinstance(stream, Stream)
            assert stream.movable
            assert victim.where is Where.ADMITTED
            assert (victim.times <= 2, victim.paused_s < 10) == (True, True)
            assert max(waiting) > victim.priority

    def check(self) -> None:
        running = [one for one in self.alive if one.where is Where.ADMITTED]
        waiting = [one for one in self.alive if one.where is Where.HELD]
        model = self.on._models[LLAMA]
        assert self.on.seats_taken(LLAMA) == sum(one.seats for one in running)
        assert self.on.seats_wanted(LLAMA) == sum(one.seats for one in waiting)
        assert model.requests == len(running)
        assert model.paused == sum(one.paused for one in self.alive)
        assert model.held_bytes == 100 * sum(not one.begun for one in waiting)
        assert set(model.running) <= set(running)
        assert +model.priorities == Counter(one.priority for one in model.running)


@given(steps=STEPS)
def test_seats_are_taken_and_given_back_whatever_happens(steps: list[tuple[Any, ...]]) -> None:
    walk = Walk()
    for step in steps:
        walk.step(step)
        walk.preempt()
        walk.check()
    while walk.alive:
        walk.step(("leave", 0))
    walk.check()
    assert not walk.on._models[LLAMA].queue
