"""What a router does with lines of batches: what it is told of those that are due, and how long an answer may be."""

import asyncio
from typing import Any

import pytest
from support.servers import PATIENCE_S

from serving.config import BatchSpec
from serving.router.filler import Filler, Line
from serving.router.line_answers import LineAnswer, LineAnswers
from serving.router.scheduling.slice_table import SliceTable

pytestmark = pytest.mark.unit


class Keeper:
    """The store's process: lines of batches wait for two models, of which the YAML has one, and for its adapter."""

    async def call(self, path: str, body: Any) -> dict[str, Any]:
        assert (path, body["router"]) == ("/lines/take", "router")
        line = {
            "batch": "b",
            "line": 0,
            "key": "k",
            "path": "/v1/completions",
            "body": "{}",
            "model": "llama",
        }
        return {"lines": [line], "drop": [], "rates": {"gone": 9.0, "llama": 1.0, "sql": 2.0}}


class NoSeats:
    """Admission without a free seat, which keeps the rates that it is told."""

    def __init__(self) -> None:
        self.rates: dict[str, float] = {}

    def room(self, model: str, spare: float) -> int:
        del model, spare
        return 0

    def filling(self, model: str) -> int:
        del model
        return 0

    def expect(self, rates: dict[str, float]) -> None:
        self.rates = rates


async def test_a_batch_of_a_model_that_the_yaml_no_longer_has_keeps_no_other_from_its_seats() -> None:
    admission: Any = NoSeats()
    keeper: Any = Keeper()
    table = SliceTable({"llama": 1}, {"llama": "v6e"}, adapters={"sql": "llama"})
    api: Any = None
    filler = Filler(api, admission, table, keeper, BatchSpec(may_scale=True), "router")
    await filler.step()
    assert admission.rates == {"llama": 3.0}
    assert [line.batch for line in filler._waiting["llama"]] == ["b"]


class Floods:
    """An engine whose answer has no end."""

    pieces = 0

    async def fill(self, _request: Any, _key: str, client: LineAnswer, _times: int) -> None:
        client.start(200, [])
        while True:
            client.write(bytes(1 << 20))
            self.pieces += 1
            await asyncio.sleep(0)


async def test_the_answer_to_a_line_is_no_longer_than_a_router_can_hold_and_fails_the_line_alone() -> None:
    admission: Any = NoSeats()
    keeper: Any = Keeper()
    api: Any = Floods()
    filler = Filler(api, admission, SliceTable({"llama": 1}, {"llama": "v6e"}), keeper, BatchSpec(), "router")
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.create_task(filler._answer(Line("b", 1, "k", "/v1/embeddings", b"{}"), "llama"))
    assert api.pieces < 40
    result = filler._results["b", 1]
    assert (result["status"], result["again"]) == (413, False)
    assert "more than 32 MiB" in result["body"]


async def test_a_line_that_is_dropped_is_not_answered() -> None:
    admission: Any = NoSeats()
    keeper: Any = Keeper()
    api: Any = Floods()
    filler = Filler(api, admission, SliceTable({"llama": 1}, {"llama": "v6e"}), keeper, BatchSpec(), "router")
    answering = asyncio.create_task(filler._answer(Line("b", 1, "k", "/v1/embeddings", b"{}"), "llama"))
    await asyncio.sleep(0)
    answering.cancel()
    await asyncio.wait([answering], timeout=PATIENCE_S)
    assert answering.cancelled()
    assert not filler._results


class Answers:
    """An engine that gives lines answers of so many megabytes, piece by piece and side by side."""

    def __init__(self, megabytes: dict[str, int]) -> None:
        self.megabytes = megabytes
        self.asked: list[str] = []

    async def fill(self, request: Any, key: str, client: LineAnswer, _times: int) -> None:
        del request
        self.asked.append(key)
        client.start(200, [])
        for _ in range(self.megabytes[key]):
            client.write(bytes(1 << 20))
            await asyncio.sleep(0)
        client.end()


async def test_the_answers_of_all_lines_have_a_bound_and_the_longest_is_given_back() -> None:
    """256 lines of 32 MiB each were 8 GiB of one router."""
    admission: Any = NoSeats()
    keeper: Any = Keeper()
    api: Any = Answers({f"long{at}": 4 for at in range(9)} | {"short": 1})
    filler = Filler(api, admission, SliceTable({"llama": 1}, {"llama": "v6e"}), keeper, BatchSpec(), "router")
    filler._answers = LineAnswers(34 << 20)
    lines = [Line("b", at, key, "/v1/embeddings", b"{}") for at, key in enumerate(api.megabytes)]
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(
            *(asyncio.create_task(filler._answer(line, "llama"), name="llama") for line in lines)
        )
    assert [line.key[:4] for _, line in filler._back] == ["long"]
    assert len(filler._results) == len(lines) - 1
    assert filler._answers.size_bytes == (8 * 4 + 1) << 20


async def test_no_line_is_started_while_answers_fill_half_of_their_room() -> None:
    admission: Any = NoSeats()
    admission.room = lambda *_: 1
    keeper: Any = Keeper()
    api: Any = Answers({"k": 0})
    filler = Filler(api, admission, SliceTable({"llama": 1}, {"llama": "v6e"}), keeper, BatchSpec(), "router")
    filler._answers = LineAnswers(2000)
    result = {"batch": "b", "line": 7, "body": "a" * 1001}
    filler._results["b", 7] = result
    filler._answers.kept(result)
    filler._waiting["llama"].append(Line("b", 0, "k", "/v1/embeddings", b"{}"))
    filler._start()
    assert not filler._running
    filler._drop({("b", 7)})
    assert filler._answers.size_bytes == 0
    filler._start()
    await asyncio.gather(*filler._running.values())
    assert api.asked == ["k"]
