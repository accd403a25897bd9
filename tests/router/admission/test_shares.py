"""Routers as a group: what they share, from beat to beat, with records up to two beats old. Twenty real controllers, faked time."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.router_group import MODEL, RouterGroup, flood, router_group

from serving.router.admission.controller import AdmissionController
from serving.router.admission.queue import Ticket, Where
from serving.router.admission.rate_limit import Account
from serving.router.admission.shares import Book, Lease, lease, share
from serving.router.http.auth import Key

pytestmark = pytest.mark.unit

BOOKS = st.dictionaries(
    st.sampled_from("abcdefgh"),
    st.builds(Book, st.integers(0, 40), st.integers(0, 40), st.integers(0, 40)),
    min_size=1,
)


@given(total=st.integers(0, 100), books=BOOKS)
def test_routers_that_read_the_same_lease_no_more_than_there_is_beyond_what_is_held(
    total: int, books: Mapping[str, Book]
) -> None:
    leases = {name: lease(total, name, books) for name in books}
    held = sum(max(book.leased, book.taken) for book in books.values())
    assert sum(max(leases[name], min(book.leased, leases[name])) for name, book in books.items()) <= max(
        total, held
    )
    grown = sum(max(0, leases[name] - max(book.leased, book.taken)) for name, book in books.items())
    assert grown <= max(0, total - held)


@given(total=st.integers(0, 100), books=BOOKS)
def test_leases_settle_on_all_there_is_and_on_fair_parts(total: int, books: Mapping[str, Book]) -> None:
    """Everybody wants as much as before, and lets go what is not his."""
    for _ in range(6):
        leases = {name: lease(total, name, books) for name in books}
        books = {
            name: Book(
                min(book.taken, leases[name]), book.wanting + max(0, book.taken - leases[name]), leases[name]
            )
            for name, book in books.items()
        }
    assert sum(leases.values()) == total
    short = [name for name, book in books.items() if book.taken + book.wanting > leases[name]]
    if short:
        assert max(leases.values()) <= max(leases[name] for name in short) + 1
        assert max(leases[name] for name in short) - min(leases[name] for name in short) <= 1


def test_a_lease_that_has_grown_waits_until_all_have_seen_it() -> None:
    one = Lease()
    others = {"b": Book(), "c": Book(leased=1)}
    assert one.beat(10, "a", 0, 10, others) == 9
    one = Lease()
    others = {"b": Book(leased=4)}
    assert [one.beat(10, "a", 0, 10, others) for _ in range(2)] == [6, 6]
    others = {"b": Book()}
    assert [one.beat(10, "a", 0, 10, others) for _ in range(3)] == [6, 10, 10]


def test_routers_agree_on_whose_turn_it_is_and_each_has_one() -> None:
    asked = {f"r{number}": 1.0 + number % 3 for number in range(5)}
    turns = []
    for at_s in range(2, 2000, 4):
        holders = [own for own in asked if share(own, asked, "batch", at_s).turn]
        assert len(holders) == 1
        turns += holders
    assert set(turns) == set(asked)
    assert turns.count("r2") > turns.count("r0")
    parts = [share(own, asked, "batch", 2.0).part for own in asked]
    assert sum(parts) == pytest.approx(1)
    assert not any(
        share(own, asked, "batch", 4.5).turn for own in asked
    )  # the last one's takings are on their way


@pytest.mark.parametrize(
    ("limit", "busy"),
    [(30, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((30, 20), (600, 1), (600, 20)))],
)
def test_twenty_routers_let_a_minute_s_limit_through_and_no_more_than_a_twentieth_beyond(
    tmp_path: Path, limit: int, busy: int
) -> None:
    some = router_group(tmp_path, 20, requests_per_minute=limit)
    flood(some, 2 * limit / 60 + 2, 240, routers=busy)
    steady = some.admitted_within(120, 240)
    print(f"limit {limit}, {busy} busy: {steady / 2:.0f} a minute; first {some.admitted_within(0, 60)}")
    assert 0.85 * 2 * limit <= steady <= 1.05 * 2 * limit


def test_a_router_that_joins_freezes_nobody_and_brings_nothing_with_it(tmp_path: Path) -> None:
    some = router_group(tmp_path, 1, requests_per_minute=600)
    for _ in range(540):
        some.over("r0", some.arrive("r0"))
    some.join(19)
    some.run(some.now_s + 2)
    before, since_s = len(some.admitted_s), some.now_s
    flood(some, 40, since_s + 60)
    assert any(when_s - since_s < 2 for when_s in some.admitted_s[before:])
    assert 500 <= len(some.admitted_s) - before <= 1.05 * (600 + 60 + 20)


@pytest.mark.parametrize(("concurrency", "busy"), [(5, 20), (5, 1), (64, 20)])
def test_twenty_routers_keep_to_requests_at_once(tmp_path: Path, concurrency: int, busy: int) -> None:
    some = router_group(tmp_path, 20, concurrency=concurrency)
    flood(some, 3 * concurrency, 20, lasts_s=2.0, routers=busy)
    some.most = 0
    flood(some, 3 * concurrency, 40, lasts_s=2.0, routers=busy)
    print(f"{concurrency} at once, {busy} busy: {some.most} at most")
    assert some.most <= 1.05 * concurrency
    assert some.admitted_within(20, 40) >= 0.4 * concurrency * 20 / 2.0


def ticket(router: AdmissionController, some: RouterGroup) -> Ticket:
    visit = router.arrive([(b"authorization", b"Bearer " + some.key.encode())])
    return Ticket(MODEL, visit.account, 1, 1, 100, some.now_s)


def in_seats(tickets: list[tuple[str, Ticket]]) -> int:
    return sum(one.where is Where.ADMITTED for _, one in tickets)


def test_a_burst_on_twenty_routers_takes_the_seats_that_there_are(tmp_path: Path) -> None:
    some = router_group(tmp_path, 20)
    waiting: list[tuple[str, Ticket]] = []
    for _ in range(256):
        for name, router in some.routers.items():
            waiting.append((name, ticket(router, some)))
            router.enter(waiting[-1][1])
    assert in_seats(waiting) <= 256
    for _ in range(40):
        some.run(some.now_s + 0.25)
        assert 0.9 * 256 <= in_seats(waiting) <= 1.05 * 256
        for name, one in [pair for pair in waiting if pair[1].where is Where.ADMITTED][::10]:
            some.routers[name]._wake(some.routers[name]._queue.leave(one, some.now_s))
            waiting.remove((name, one))


def test_seats_move_to_the_router_that_is_asked(tmp_path: Path) -> None:
    some = router_group(tmp_path, 20)
    router = some.routers["r3"]
    waiting = [("r3", ticket(router, some)) for _ in range(300)]
    for _, one in waiting:
        router.enter(one)
    some.run(some.now_s + 5)
    assert in_seats(waiting) == 256
    late = ticket(some.routers["r5"], some)
    some.routers["r5"].enter(late)
    for _, one in waiting[:40]:
        router._wake(router._queue.leave(one, some.now_s))
        some.run(some.now_s + 0.2)
    assert late.where is Where.ADMITTED


def test_what_fills_one_router_s_seats_makes_room_for_another_router_s_requests(tmp_path: Path) -> None:
    """Lines of batches end and are not followed by others while requests wait elsewhere; the slices never have too many."""
    some = router_group(tmp_path, 2)
    filler = some.routers["r0"]
    account = filler.fill(filler._keys.ring.keys[0].sha256).account
    lines: list[Ticket] = []

    def fill() -> None:
        while filler.room(MODEL, 0.0):
            lines.append(Ticket(MODEL, account, 1, 1, 100, some.now_s, fills=True))
            filler.enter(lines[-1])

    fill()
    assert len(lines) == 128  # an even part
    waiting = [("r1", ticket(some.routers["r1"], some)) for _ in range(200)]
    for name, one in waiting:
        some.routers[name].enter(one)
    for _ in range(60):
        some.run(some.now_s + 0.25)
        for line in lines[:8]:  # they end, and the filler looks for room
            filler._queue.leave(line, some.now_s)
        del lines[:8]
        fill()
        assert len(lines) + in_seats(waiting) <= 256
    assert in_seats(waiting) == 200
    assert 0 < len(lines) <= 56  # what is left over


class Stream:
    """A running stream of a router, which pauses as soon as it is told to make room."""

    movable, work = True, 1.0

    def __init__(self, router: AdmissionController, one: Ticket) -> None:
        self.router, self.ticket = router, one

    def preempt(self) -> None:
        self.router.pause(self.ticket)


def of(priority: int) -> Account:
    return Account(Key(name=f"priority {priority}", sha256=f"{priority:064}", priority=priority))


def full_of_streams(some: RouterGroup, name: str) -> list[Ticket]:
    """A router that has every seat, with a stream of priority 0 on each."""
    router, low = some.routers[name], of(0)
    streams = [Ticket(MODEL, low, 1, 1, 100, some.now_s) for _ in range(256)]
    for one in streams:
        router.enter(one)
    some.run(some.now_s + 10)
    assert all(one.where is Where.ADMITTED for one in streams)
    for one in streams:
        router.runs(one, Stream(router, one))
    return streams


@pytest.mark.parametrize(("priority", "paused"), [(10, 3), (0, 0)])
def test_streams_of_one_router_make_room_for_better_requests_of_another(
    tmp_path: Path, priority: int, paused: int
) -> None:
    some = router_group(tmp_path, 3)
    streams = full_of_streams(some, "r0")
    better = [Ticket(MODEL, of(priority), 1, 1, 100, some.now_s) for _ in range(3)]
    for one in better:
        some.routers["r1"].enter(one)
    for _ in range(24):
        some.run(some.now_s + 0.25)
        admitted = sum(one.where is Where.ADMITTED for one in (*streams, *better))
        assert admitted <= 256
    assert sum(one.paused for one in streams) == paused
    assert sum(one.where is Where.ADMITTED for one in better) == paused
    for one in better:
        some.routers["r1"]._wake(some.routers["r1"]._queue.leave(one, some.now_s))
    some.run(some.now_s + 10)
    assert all(one.where is Where.ADMITTED for one in streams)  # they go on
    assert sum(one.times for one in streams) == paused


def test_a_stream_that_makes_room_for_another_router_leaves_its_seat_to_none_of_its_own(
    tmp_path: Path,
) -> None:
    some = router_group(tmp_path, 2)
    streams = full_of_streams(some, "r0")
    own = Ticket(MODEL, of(0), 1, 1, 100, some.now_s)
    some.routers["r0"].enter(own)
    better = Ticket(MODEL, of(10), 1, 1, 100, some.now_s)
    some.routers["r1"].enter(better)
    some.run(some.now_s + 6)
    assert better.where is Where.ADMITTED
    assert own.where is Where.HELD
    assert sum(one.paused for one in streams) == 1


@pytest.mark.parametrize("begins_s", [3.0, 3.3, 3.6, 4.5, 5.2, 6.0, 9.0, 11.9])
@pytest.mark.parametrize("lasts_s", [0.0, 0.4, 0.8, 1.5])
def test_a_burst_gets_no_more_than_the_limit_whatever_routers_have_heard_meanwhile(
    tmp_path: Path, begins_s: float, lasts_s: float
) -> None:
    """Whoever's turn it is, and whether what is left is dealt in its midst."""
    some = router_group(tmp_path, 2, requests_per_minute=60)
    for number in range(120):
        some.run(begins_s + lasts_s * number / 120)
        some.arrive(f"r{number % 2}")
    assert 45 <= len(some.admitted_s) <= 61 + lasts_s


def test_a_key_that_nobody_uses_is_not_told_of_and_its_limits_hold_once_it_is_used_again(
    tmp_path: Path,
) -> None:
    """With 10,000 limited keys at rest, twenty routers spent 1.3 s of every beat on them."""
    some = router_group(tmp_path, 20, requests_per_minute=600, concurrency=5)
    flood(some, 4, 20)
    some.run(120)
    assert all(router.key_uses() == {} for router in some.routers.values())
    some.join(1)
    some.run(125)
    some.most = some.running = 0
    flood(some, 15, 145, lasts_s=2.0)
    some.most = 0
    flood(some, 15, 165, lasts_s=2.0)
    assert some.most <= 5
    assert some.admitted_within(145, 165) >= 0.4 * 5 * 20 / 2.0
    assert all(router.key_uses() for router in some.routers.values())


def test_a_burst_on_one_router_after_a_rest_gets_the_whole_limit_soon_and_no_more(tmp_path: Path) -> None:
    some = router_group(tmp_path, 4, requests_per_minute=600, concurrency=8)
    some.run(60)
    assert all(router.key_uses() == {} for router in some.routers.values())
    visits = []
    for _ in range(20):
        some.run(some.now_s + 0.25)
        visits += [visit for _ in range(4) if not (visit := some.arrive("r2")).refusal]
    assert some.running == len(visits) == 8


def test_a_token_s_first_request_in_a_router_knows_what_others_let_through(tmp_path: Path) -> None:
    some = router_group(tmp_path, 2, requests_per_minute=60)
    user = Key.model_construct(name="user", sha256="f" * 64, requests_per_minute=60.0)
    first, second = some.routers.values()
    for _ in range(60):
        assert first._accounts.of(user, some.now_s, 1e9 + some.now_s).arrive(some.now_s) is None
    some.run(some.now_s + 2)
    refused = [
        second._accounts.of(user, some.now_s, 1e9 + some.now_s).arrive(some.now_s) is not None
        for _ in range(20)
    ]
    assert sum(refused) >= 18  # what has come back since
