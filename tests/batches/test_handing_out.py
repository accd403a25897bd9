"""Which router gets which line where lines come back, and results come late, while the desk looks lines up."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.batches import line
from support.desk import Table, lines, table
from support.simulated_engine import MODEL

from serving.batches import desk
from serving.batches.ledger import Ledger, ToDo

pytestmark = pytest.mark.unit


class OvertakenLedger(Ledger):
    """`meanwhile` happens once, between what it has looked up and its answer."""

    meanwhile: Callable[[], Awaitable[None]] | None = None

    async def to_do(self, *asked: Any) -> list[ToDo]:
        page = await super().to_do(*asked)
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile:
            await meanwhile()
        return page


def overtake(some: Table, meanwhile: Callable[[], Awaitable[None]]) -> None:
    assert isinstance(some.ledger, OvertakenLedger)
    some.ledger.meanwhile = meanwhile


async def taken_before_silence(some: Table) -> list[tuple[str, int]]:
    """The lines of a router `a` that has been silent since; `b` has the first of them now."""
    await some.add("one", lines(6))
    first = await some.take("a")
    some.now_s += 16
    await some.desk.tick()
    assert await some.take("b", most=1) == first[:1]
    return first


async def test_a_line_that_comes_back_while_others_are_looked_up_is_handed_out(tmp_path: Path) -> None:
    """It was taken for one that is out, and its batch stood still until its window was over."""
    async with table(tmp_path, OvertakenLedger) as some:
        await some.add("one", lines(2))
        first = await some.take("a", most=2)
        overtake(some, lambda: some.bring(first[:1], 500, again=True))
        assert await some.take("b", first[1:]) == first[:1]


async def test_a_line_that_is_answered_while_others_are_looked_up_is_not_handed_out_again(
    tmp_path: Path,
) -> None:
    async with table(tmp_path, OvertakenLedger) as some:
        await some.add("one", lines(2))
        first = await some.take("a", most=2)
        await some.bring(first[:1], 500, again=True)
        overtake(some, lambda: some.bring(first[1:]))
        assert await some.take("b") == first[:1]


async def test_a_router_that_was_silent_keeps_the_lines_that_it_goes_on_with(tmp_path: Path) -> None:
    async with table(tmp_path) as some:
        first = await taken_before_silence(some)
        assert await some.take("a", first, most=0) == []  # it is back
        assert await some.take("b", first[:1]) == [("one", 5), ("one", 6)]


async def test_late_results_of_a_router_that_was_silent_leave_nobody_their_lines(tmp_path: Path) -> None:
    async with table(tmp_path) as some:
        first = await taken_before_silence(some)
        await some.bring(first)
        assert await some.take("b") == [("one", 5), ("one", 6)]


async def test_routers_that_could_say_nothing_while_a_slow_store_answered_another_keep_their_lines(
    tmp_path: Path,
) -> None:
    async with table(tmp_path, OvertakenLedger) as some:
        await some.add("one", lines(4))
        first = await some.take("a", most=2)
        await some.bring(first[:1], 500, again=True)

        async def slow() -> None:
            some.now_s += 60

        overtake(some, slow)
        assert await some.take("b") == [first[0], ("one", 3), ("one", 4)]
        await some.desk.tick()
        assert await some.take("c") == []
        some.now_s += 16  # now it is silent
        await some.desk.tick()
        assert first[1] in await some.take("c")


async def test_few_inputs_stay_open_however_many_batches_are_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a file and a buffer of a MiB: two hundred batches took 200 MiB."""
    monkeypatch.setattr(desk, "_MOST_OPEN", 2)
    async with table(tmp_path) as some:
        for name in "abcd":
            await some.add(name, lines(3))
        for line_of_each in (1, 2, 3):
            taken = await some.take("router", [], most=4)
            assert sorted(taken) == [(name, line_of_each) for name in "abcd"]
            assert sum(work.file is not None for work in some.desk._works.values()) == 2
            await some.bring(taken)


async def test_the_body_of_a_line_is_no_longer_than_the_line(tmp_path: Path) -> None:
    """A line may be as long as a request: escaped, a Chinese text is twice as long, and a request of that is refused."""
    asked = json.dumps(
        json.loads(line("a", content="你好" * 1000)), ensure_ascii=False, separators=(",", ":")
    )
    ids = json.dumps(json.loads(line("b", prompt=list(range(1000)))), separators=(",", ":"))
    async with table(tmp_path) as some:
        await some.add("one", [asked, ids])
        taken = await some.desk.take("a", [{"names": [MODEL], "most": 2}], [])
        for text, handed in zip((asked, ids), taken["lines"], strict=True):
            assert json.loads(handed["body"]) == json.loads(text)["body"]
            assert len(handed["body"].encode()) < len(text.encode())
