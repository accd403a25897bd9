"""What routers tell each other, and what their tables make of it: held against what slices were sent and what they dropped."""

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.many_routers import MODEL, SHAPE, prompt

from serving.router.scheduling import prefix_index, sharing
from serving.router.scheduling.sharing import RENEWED_S, Batch, Outbox, Sends, Sent
from serving.router.scheduling.slice_table import SliceTable
from serving.state.records import SliceRecord, SliceState

pytestmark = pytest.mark.unit

KEY = b"shared"
STEP_S = 2 * RENEWED_S
TEXTS = ["a " * 600, "a " * 600 + "b " * 900, "c " * 2000, "d " * 300, "a " * 600 + "e " * 300]
names64 = st.integers(0, (1 << 64) - 1)


class Service:
    """Routers of one service in faked time, and the truth: when each slice was last sent each name that it still has."""

    def __init__(self, routers: int, slices: int = 3) -> None:
        self.now_s = 1000.0
        self.truth: defaultdict[str, dict[int, float]] = defaultdict(dict)
        self._records = {
            name: SliceRecord(name, MODEL, SliceState.SERVING, "serving", SHAPE, address="http://x")
            for name in "abcdef"[:slices]
        }
        self.routers = [self.started() for _ in range(routers)]

    def started(self) -> SliceTable:
        table = SliceTable({MODEL: 1}, {MODEL: SHAPE}, routers=2, shared_key=KEY)
        table.update(self._records.values(), self.now_s)
        return table

    def ask(self, router: int, text: str) -> None:
        table = self.routers[router % len(self.routers)]
        replica = table.choose(MODEL, (), prompt(text)).replica
        for name in prefix_index.trace(prompt(text), None, KEY).blocks:
            self.truth[replica][name] = self.now_s

    def deliver(self) -> None:
        for router in self.routers:
            raw = Batch("x", router.news.take()).encoded()
            for other in self.routers:
                if other is not router:
                    other.take_news(Batch.decoded(raw).sent)

    def beat(self) -> None:
        self.now_s += STEP_S
        for name, record in self._records.items():
            age_s = record.cache_age_s + STEP_S if record.cache_age_s else 0.0
            self._records[name] = replace(record, beat=record.beat + 1, cache_age_s=age_s)
        self._look()

    def silence(self) -> None:
        """Time goes on, and the store says nothing."""
        self.now_s += STEP_S
        for router in self.routers:
            router.at(self.now_s)

    def drop(self, replica: str, age_s: float) -> None:
        """A slice's cache loses what it was last asked for longer ago, but for what is told within RENEWED_S of it."""
        record = self._records.get(replica)
        if record is None:
            return
        if record.cache_age_s:
            age_s = min(age_s, record.cache_age_s)  # what is dropped stays dropped
        self._records[replica] = replace(record, beat=record.beat + 1, cache_age_s=age_s)
        before_s = self.now_s - age_s - RENEWED_S
        self.truth[replica] = {name: at for name, at in self.truth[replica].items() if at >= before_s}
        self._look()

    def end(self, replica: str) -> None:
        self._records.pop(replica, None)
        self.truth.pop(replica, None)
        self._look()

    def _look(self) -> None:
        for router in self.routers:
            router.update(self._records.values(), self.now_s)

    def told(self) -> set[tuple[str, int]]:
        return {(replica, name) for replica, names in self.truth.items() for name in names}


def known(table: SliceTable) -> set[tuple[str, int]]:
    return {(one.replica, name) for one in table.everything() for name in one.names}


def indexed(table: SliceTable, names: set[int]) -> set[tuple[str, int]]:
    return {
        (replica, name)
        for replica, slice_ in table._slices.items()
        for name in names
        if table._index.holders(name) >> slice_.number & 1
    }


steps = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 2), st.sampled_from(TEXTS)),
        st.tuples(st.just("beat")),
        st.tuples(st.just("drop"), st.sampled_from("abc"), st.sampled_from([1.0, STEP_S, 3 * STEP_S])),
        st.tuples(st.just("end"), st.sampled_from("ab")),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), steps)
def test_every_router_knows_what_slices_were_sent_and_have_not_dropped(
    routers: int, happened: list[tuple[str, ...]]
) -> None:
    service, every = Service(routers), set[int]()
    for what, *with_ in happened:
        getattr(service, what)(*with_)
        service.deliver()
        every |= {name for _, name in service.told()}
        for router in service.routers:
            assert known(router) == service.told()
            assert indexed(router, every) == service.told()
    new = service.started()
    new.take_news(Batch.decoded(Batch("x", service.routers[0].everything()).encoded()).sent)
    assert known(new) == service.told()


@given(st.lists(st.builds(Sent, st.text(max_size=5), st.lists(names64, max_size=5).map(tuple), st.just(1.5))))
def test_a_batch_arrives_as_it_was_sent(sent: list[Sent]) -> None:
    assert Batch.decoded(Batch("router", tuple(sent)).encoded()) == Batch("router", tuple(sent))


@settings(max_examples=200)
@given(st.binary(max_size=200), st.integers(0, 200))
def test_what_is_no_batch_is_refused_or_harmless(junk: bytes, at: int) -> None:
    whole = Batch("router", (Sent("a", (1, 2, 3)), Sent("b", (4,)))).encoded()
    for raw in (junk, whole[:at] + junk, junk + b"\n" + whole):
        try:
            batch = Batch.decoded(raw)
        except ValueError:
            continue
        SliceTable({MODEL: 1}, {MODEL: SHAPE}, shared_key=KEY).take_news(batch.sent)


def test_a_lost_batch_is_told_again_when_the_prompt_comes_again() -> None:
    service = Service(2)
    service.ask(0, TEXTS[2])
    service.routers[0].news.take()
    assert not known(service.routers[1])
    service.ask(0, TEXTS[2])
    service.deliver()
    assert not known(service.routers[1])  # it was sent again too soon to be news
    service.beat()
    service.ask(0, TEXTS[2])
    service.deliver()
    assert known(service.routers[1]) == service.told()


def test_what_is_sent_while_the_store_is_away_is_as_young_as_it_is() -> None:
    service = Service(1)
    service.ask(0, TEXTS[0])
    service.silence()
    service.silence()
    service.ask(0, TEXTS[2])
    for replica in "abc":
        service.drop(replica, 1.0)
    assert service.told()
    assert known(service.routers[0]) == service.told()


def test_news_of_a_slice_that_a_router_does_not_know_are_not_kept() -> None:
    service = Service(2)
    service.routers[1].take_news([Sent("elsewhere", (1, 2))])
    assert not known(service.routers[1])


def test_what_another_router_has_just_sent_counts_as_work() -> None:
    service = Service(2, slices=2)
    replica = service.routers[0].choose(MODEL, (), prompt(TEXTS[2])).replica
    service.deliver()
    assert service.routers[1].choose(MODEL, (), prompt("another " * 400)).replica != replica


def test_news_that_nobody_takes_do_not_grow() -> None:
    called: list[bool] = []
    outbox = Outbox()
    outbox.on_first = lambda: called.append(True)
    for number in range(sharing.MOST_NEWS // 10):
        outbox.put(Sent("a", tuple(range(number, number + 20))))
    sent = outbox.take()
    assert sum(len(one.names) for one in sent) <= sharing.MOST_NEWS
    assert sent[-1].names[-1] == sharing.MOST_NEWS // 10 + 18
    assert called == [True]
    assert outbox.take() == ()


def test_the_oldest_of_the_slice_with_most_make_room() -> None:
    service = Service(1, slices=2)
    (router,) = service.routers
    router._sends = Sends(100)
    router.take_news([Sent("a", tuple(range(100)))])
    service.now_s += STEP_S
    router.at(service.now_s)
    router.take_news([Sent("b", tuple(range(200, 272)))])  # a slice is idle, another one was just begun with
    assert {name for replica, name in known(router) if replica == "b"} == set(range(200, 272))
    router.take_news([Sent("a", tuple(range(300, 350)))])
    assert {name for replica, name in known(router) if replica == "a"} >= set(range(300, 350))
    assert len(known(router)) <= 100
    assert indexed(router, set(range(350))) == known(router)


def test_a_router_that_starts_is_told_what_few_busy_slices_were_sent() -> None:
    sends = Sends(1000)
    for number in range(100):
        sends.note(number, range(number % 3), 1.0)
    sends.note(7, range(100, 300), 1.0)
    sends.note(7, range(300, 500), 2.0)
    told = list(sends.latest(600))
    assert sum(len(names) for _, _, names in told) == 99 + 400
    assert [(at_s, names[0]) for number, at_s, names in told if number == 7] == [(1.0, 0), (2.0, 300)]
    assert sum(len(names) for _, _, names in sends.latest(300)) == 300
    assert list(sends.latest(300))[-1] == (7, 2.0, tuple(range(300, 500)))


def test_a_storm_of_evictions_is_heard_of_at_once() -> None:
    service = Service(1, slices=1)
    (router,) = service.routers
    for start in range(0, 30_000, 100):
        router.take_news([Sent("a", tuple(range(start, start + 100)))])
    service.beat()
    service.ask(0, TEXTS[2])
    service.drop("a", 1.0)
    assert known(router) == service.told()
    assert indexed(router, set(range(30_000))) == set()


def test_requests_go_on_between_the_steps_in_which_a_cleared_cache_is_forgotten() -> None:
    service = Service(1, slices=1)
    (router,) = service.routers
    router.take_news([Sent("a", tuple(range(10_000)))])
    (record,) = router.entries(MODEL)
    cleared = replace(record, beat=record.beat + 1, cache_age_s=1.0)
    held = [len(known(router)) for _ in router.update_in_steps([cleared], service.now_s + STEP_S)]
    assert len(held) >= 9
    assert not known(router)


def test_a_slice_whose_engine_counts_from_zero_again_has_an_empty_cache() -> None:
    service = Service(1, slices=1)
    (router,) = service.routers
    service.ask(0, TEXTS[2])
    (record,) = router.entries(MODEL)
    router.update([replace(record, beat=1, prompt_tokens=1000)], service.now_s + 1)
    assert known(router) == service.told()
    router.update([replace(record, beat=2, prompt_tokens=10)], service.now_s + 2)
    assert not known(router)
    assert not indexed(router, {name for _, name in service.told()})


def test_a_router_that_is_asked_nothing_forgets_what_others_had_slices_read() -> None:
    now_s = 0.0
    table = SliceTable(
        {MODEL: 1}, {MODEL: SHAPE}, shared_key=KEY, reads={(MODEL, ""): 1000.0}, clock=lambda: now_s
    )
    record = SliceRecord("a", MODEL, SliceState.SERVING, "serving", SHAPE, address="http://x")
    table.update([record], now_s)
    for beat in range(200):
        table.take_news([Sent("a", (beat,), tokens=100)])
        now_s += 1.0
        table.update([replace(record, beat=beat)], now_s)
    assert table._slices["a"].unread == 0
    assert not table._unread._ends


@given(
    st.lists(
        st.builds(
            Sent,
            st.sampled_from("ab"),
            st.integers(0, 40).map(lambda size: tuple(range(size))),
            st.just(1.5),
            st.integers(0, 9),
        )
    ),
    st.integers(1, 20),
)
def test_no_step_is_long_and_nothing_is_lost_between_steps(sent: list[Sent], most: int) -> None:
    steps = list(sharing.in_steps(sent, most))
    assert all(sum(1 + len(entry.names) for entry in step) <= 2 * most for step in steps)
    told = [entry for step in steps for entry in step]
    assert [name for entry in told for name in entry.names] == [n for entry in sent for n in entry.names]
    assert sum(entry.tokens for entry in told) == sum(entry.tokens for entry in sent)
    assert {entry.replica for entry in told} == {entry.replica for entry in sent}


def test_routers_with_the_same_key_give_a_text_the_same_names_and_others_do_not() -> None:
    asked = prompt(TEXTS[1])
    one, same, other = (prefix_index.trace(asked, "sql", key) for key in (b"k", b"k", b"l"))
    assert one == same
    assert not set(one.blocks) & set(other.blocks)
    assert one.adapter != other.adapter
    assert not set(one.blocks) & set(prefix_index.trace(asked, None, b"k").blocks)
