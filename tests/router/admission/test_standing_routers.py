"""Routers that stand still, end, leave and join while others carry on: what all of them admit together stays within the limits."""

import random
from pathlib import Path

import pytest
from support.router_group import MODEL, RouterGroup, flood, router_group

from serving.router.admission.queue import Ticket, Where

pytestmark = pytest.mark.unit


def events(some: RouterGroup, seed: int, from_s: float, until_s: float) -> None:
    """Something happens to a router every ten seconds or so, most often to the one that is asked most."""
    draw, when_s = random.Random(seed), from_s

    def happen() -> None:
        names = list(some.routers)
        name = names[0] if draw.random() < 0.5 else draw.choice(names)
        match draw.choice(["stand", "stand", "end", "leave", "join"]):
            case "stand":
                some.stand(name, draw.choice([1, 3, 5, 20]))
            case "end" if len(names) > 16:
                some.end(name, tells=False)
                some.at(some.now_s + draw.choice([0.1, 3, 10]), lambda: some.join(1))
            case "leave" if len(names) > 16:
                some.end(name, tells=True)
            case _:
                some.join(1)

    while (when_s := when_s + draw.expovariate(0.1)) < until_s:
        some.at(when_s, happen)


@pytest.mark.parametrize(
    ("seed", "busy"),
    [(0, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((3, 2), (4, 2), (1, 99)))],
)
def test_whatever_happens_to_twenty_routers_they_overdraw_a_minute_by_a_twentieth_at_most(
    tmp_path: Path, seed: int, busy: int
) -> None:
    some = router_group(tmp_path, 20, requests_per_minute=600)
    events(some, seed, some.now_s, 115)
    flood(some, 22, 120, routers=busy)
    print(f"seed {seed}, {busy} busy: {some.overdrawn(600):.0f} of 600 overdrawn")
    assert some.overdrawn(600) <= 0.05 * 600
    assert some.admitted_within(70, 120) >= 0.85 * 500


@pytest.mark.parametrize(
    ("seed", "busy"), [(0, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 2), (1, 99)))]
)
def test_whatever_happens_to_twenty_routers_they_keep_to_requests_at_once(
    tmp_path: Path, seed: int, busy: int
) -> None:
    some = router_group(tmp_path, 20, concurrency=64)
    events(some, seed, some.now_s, 95)
    flood(some, 60, 100, lasts_s=2.0, routers=busy)
    print(f"seed {seed}, {busy} busy: {some.most} of 64 at once")
    assert some.most <= 1.05 * 64
    assert some.admitted_within(40, 100) >= 0.7 * 64 * 60 / 2.0


def test_a_router_that_stood_still_leaves_to_the_others_what_they_took_meanwhile(tmp_path: Path) -> None:
    """It was asked most, so its part was the largest: that refilled while it stood still, and others took the same."""
    some = router_group(tmp_path, 4, requests_per_minute=600)
    flood(some, 30, 80, routers=1)
    some.stand("r0", 20)
    for number in range(600):
        some.at(80 + number / 30, lambda: some.ask("r1", 0.2))
        some.at(80 + number / 30, lambda: some.ask("r0", 0.2))
    some.run(110)
    assert some.overdrawn(600) <= 0.05 * 600
    late = len(some.admitted_s)
    some.run(111)
    some.ask("r0", 0.2)
    assert len(some.admitted_s) == late + 1


def test_a_router_that_stood_still_has_no_seat_more_until_it_has_heard_who_took_its_seats(
    tmp_path: Path,
) -> None:
    some = router_group(tmp_path, 3)
    tickets: list[Ticket] = []

    def enter(name: str, number: int) -> None:
        router = some.routers[name]
        for _ in range(number):
            account = router.arrive([(b"authorization", b"Bearer " + some.key.encode())]).account
            tickets.append(Ticket(MODEL, account, 1, 1, 100, some.now_s))
            router.enter(tickets[-1])

    def in_seats() -> int:
        return sum(ticket.where is Where.ADMITTED for ticket in tickets)

    enter("r0", 256)
    some.run(10)
    assert in_seats() == 256
    first, tickets = tickets, []
    some.stand("r0", 20)
    some.run(15)
    enter("r1", 256)
    some.run(20)
    assert in_seats() == 256  # a router that is gone has no seats
    some.at(30.0, lambda: [some.routers["r0"]._queue.leave(ticket, 30.0) for ticket in first])  # type: ignore[func-returns-value]
    some.at(30.0, lambda: enter("r0", 100))
    some.run(30.0)
    assert in_seats() == 256
    for ticket in tickets[:128]:
        some.routers["r1"]._queue.leave(ticket, some.now_s)
    del tickets[:128]
    some.run(35)
    assert in_seats() == 228  # all that there are


def test_a_router_that_stood_still_while_the_store_is_away_goes_on_with_what_it_had(tmp_path: Path) -> None:
    """Nobody can have taken it for gone, and the head may be away for a minute."""
    some = router_group(tmp_path, 3, concurrency=8)
    some.ask("r0", 60.0)
    some.run(some.now_s + 3)
    some.away = True
    some.stand("r0", 3)
    some.run(some.now_s + 3.7)
    assert some.arrive("r0").refusal
    some.run(some.now_s + 4)
    visit = some.arrive("r0")
    assert not visit.refusal
    waiting = Ticket(MODEL, visit.account, 1, 1, 100, some.now_s)
    some.routers["r0"].enter(waiting)
    assert waiting.where is Where.ADMITTED
