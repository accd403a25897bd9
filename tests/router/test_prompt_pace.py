import asyncio
from typing import Any

import pytest
from support.servers import PATIENCE_S
from support.simulated_engine import MODEL, small_plan

from serving.config import BatchSpec
from serving.router.core import RouterCore, Served
from serving.router.filler import Filler
from serving.router.http.auth import KeyFile
from serving.router.prompt_pace import PromptPace, Reading
from serving.router.scheduling.slice_table import SliceTable
from serving.router.scheduling.unread_prompts import read_s
from serving.router.telemetry.record import RequestRecord
from serving.state.records import SliceRecord, SliceState

pytestmark = pytest.mark.unit


def test_a_line_starts_once_the_prompts_before_it_are_read() -> None:
    pace = PromptPace({"llama": Reading(1000.0, longest=8192)})
    pace.serve("llama", slices=1, unread=1.0)
    assert pace.wait_s("llama", 10.0) == 0.0
    pace.started("llama", 500, 10.0)
    pace.started("llama", 500, 10.0)
    assert pace.wait_s("llama", 10.25) == 0.75
    assert pace.wait_s("llama", 12.0) == 0.0
    pace.started("llama", 500, 12.0)
    assert pace.wait_s("llama", 12.0) == 0.5


def test_more_slices_read_sooner_and_what_caches_have_is_not_read() -> None:
    pace = PromptPace({"llama": Reading(1000.0, longest=8192)})
    pace.serve("llama", slices=2, unread=0.25)
    pace.started("llama", 4000, 0.0)
    assert pace.wait_s("llama", 0.0) == 0.5


def test_beside_requests_half_of_the_slices_read_lines() -> None:
    waits_s = []
    for slices in (1, 2, 3, 8):
        pace = PromptPace({"llama": Reading(1000.0, longest=8192)})
        pace.serve("llama", slices, unread=1.0, asked=True)
        pace.started("llama", 1000, 0.0)
        waits_s.append(pace.wait_s("llama", 0.0))
    assert waits_s == [alone_s := read_s(1000, 1000.0), alone_s, alone_s / 2, alone_s / 4]


def test_a_picture_is_no_longer_than_the_model_s_context() -> None:
    pace = PromptPace({"llama": Reading(1000.0, longest=2000)})
    pace.serve("llama", slices=1, unread=1.0)
    pace.started("llama", 5e6, 0.0)
    assert pace.wait_s("llama", 0.0) == 2.0


def _waited_s(pace: PromptPace) -> float:
    """What the next line waits for one of 1,000 tokens that starts now."""
    pace.started("llama", 1000, 0.0)
    waited_s = pace.wait_s("llama", 0.0)
    pace._read_s.clear()
    return waited_s


def test_requests_that_miss_their_target_slow_lines_down_and_those_in_time_bring_the_pace_back() -> None:
    pace = PromptPace({"llama": Reading(1000.0, longest=8192)}, first_s=0.1)
    pace.serve("llama", slices=1, unread=1.0, asked=True)
    first_s = _waited_s(pace)
    pace.answered("llama", 10.0, 0.11, 12.0)
    assert _waited_s(pace) == pytest.approx(2 * first_s)
    pace.answered("llama", 11.0, 0.11, 13.0)  # it came at the pace before
    assert _waited_s(pace) == pytest.approx(2 * first_s)
    for _ in range(200):
        pace.answered("llama", 13.0, 0.1, 14.0)
    assert _waited_s(pace) == pytest.approx(first_s)
    for _ in range(2000):
        pace.answered("llama", 13.0, 0.1, 14.0)
    assert _waited_s(pace) == pytest.approx(read_s(1000, 1000.0))
    for at_s in range(20, 60):
        pace.answered("llama", at_s, 1.0, at_s + 0.5)
    assert _waited_s(pace) == pytest.approx(500 * read_s(1000, 1000.0))


def test_a_target_holds_no_lines_up_while_nobody_asks() -> None:
    pace = PromptPace({"llama": Reading(1000.0, longest=8192)}, first_s=0.1)
    pace.serve("llama", slices=1, unread=1.0, asked=False)
    pace.answered("llama", 10.0, 0.11, 12.0)
    assert _waited_s(pace) == 1.0


async def test_a_router_s_requests_set_the_pace_of_its_lines_where_the_yaml_has_a_target() -> None:
    def waited_s(batch: BatchSpec, **record: Any) -> float:
        core = RouterCore(Served([small_plan()], batch=batch), KeyFile(None), dict, store=_nowhere)
        assert core.filler
        pace = core.filler._pace
        pace.serve(MODEL, slices=1, unread=1.0, asked=True)
        first = {"model": MODEL, "streamed": True, "outcome": "ok", "arrived_s": 1.0, "first_s": 1.5}
        core.journal.take(RequestRecord("/v1/completions", **(first | record)))
        core.journal.settle()
        pace.started(MODEL, 1000, 0.0)
        return pace.wait_s(MODEL, 0.0)

    target = BatchSpec(ttft_p99_s=0.4)
    late_s = waited_s(target)
    assert late_s == pytest.approx(waited_s(target, streamed=False) * 2)
    assert late_s == pytest.approx(waited_s(target, outcome="cancelled") * 2)
    assert late_s > 2 * waited_s(target, first_s=1.3) > 2 * waited_s(BatchSpec())


async def _nowhere() -> tuple[str, str]:
    raise AssertionError


def test_without_a_speed_or_a_slice_nothing_waits() -> None:
    pace = PromptPace({"llama": Reading(1000.0, longest=2000)})
    pace.serve("llama", slices=0, unread=1.0)
    pace.started("llama", 1000, 0.0)
    pace.serve("other", slices=1, unread=1.0)
    pace.started("other", 1000, 0.0)
    assert (pace.wait_s("llama", 0.0), pace.wait_s("other", 0.0)) == (0.0, 0.0)


class Seats:
    """Admission with a hundred free seats."""

    def room(self, model: str, spare: float) -> int:
        del model, spare
        return 100

    def filling(self, model: str) -> int:
        del model
        return 100

    def expect(self, rates: Any) -> None:
        del rates


class Engine:
    """Never answers."""

    async def fill(self, *_: Any) -> None:
        await asyncio.Event().wait()


class Store:
    """Has five lines."""

    def __init__(self) -> None:
        fields = {"batch": "b", "key": "k", "path": "/v1/completions", "model": "llama", "body": "x" * 4000}
        self.lines = [{**fields, "line": at} for at in range(5)]

    async def call(self, path: str, fields: Any) -> Any:
        del path, fields
        lines, self.lines = self.lines, []
        return {"lines": lines, "drop": [], "rates": {}}


class Slices(SliceTable):
    looks = 0

    def entries(self, model: str) -> list[SliceRecord]:
        self.looks += 1
        return super().entries(model)


async def test_lines_take_free_seats_as_quickly_as_their_prompts_are_read_by_one_look_at_slices() -> None:
    table = Slices({"llama": 1}, {"llama": "v6e"})
    table.update([SliceRecord("a", "llama", SliceState.SERVING, "", "v6e")], 0.0)
    admission: Any = Seats()
    api: Any = Engine()
    kept: Any = Store()
    pace = PromptPace({"llama": Reading(100_000.0, longest=8192)})
    filler = Filler(api, admission, table, kept, BatchSpec(), "router", pace)
    await filler.step()
    assert len(filler._running) == 1
    async with asyncio.timeout(PATIENCE_S):
        while filler._waiting["llama"]:  # noqa: ASYNC110  a timer of the filler's starts them
            await asyncio.sleep(0.005)
    assert len(filler._running) == 5
    assert table.looks == 1
    for task in filler._running.values():
        task.cancel()
