"""Lines of batches give their seats up for requests, and are asked again; on one seat."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.batches import filling_router, folder, line, owner
from support.servers import PATIENCE_S, until
from support.simulated_engine import MODEL, serving, small_plan
from support.two_engines import STEPS_OF_3_MS

from serving.router.core import RouterCore, Served
from serving.router.http.auth import KeyFile
from serving.router.telemetry.record import RequestRecord

pytestmark = pytest.mark.http

LONG = 500  # tokens of each line


class Batch:
    """A router with one seat, which a batch's lines fill."""

    def __init__(self, address: str, core: RouterCore, records: list[RequestRecord]) -> None:
        self.core = core
        self.records = records
        self.client = httpx.Client(base_url=address, timeout=60)

    def start(self, lines: int) -> str:
        text = "\n".join(line(f"r{at}", max_tokens=LONG, ignore_eos=True) for at in range(lines))
        file = self.client.post("/v1/files", files={"file": ("in.jsonl", text)}, data={"purpose": "batch"})
        fields = {
            "input_file_id": file.json()["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        made = str(self.client.post("/v1/batches", json=fields).json()["id"])
        self.fills()
        return made

    def fills(self) -> None:
        until(lambda: self.core.admission.filling(MODEL) == 1, "a line has the seat")

    def results(self, name: str) -> dict[str, str]:
        until(lambda: self._of(name)["status"] == "completed", "the batch is done")
        rows = self.client.get(f"/v1/files/{self._of(name)['output_file_id']}/content").text.splitlines()
        found = [json.loads(row) for row in rows]
        answers = {
            row["custom_id"]: row["response"]["body"]["choices"][0]["message"]["content"] for row in found
        }
        assert len(answers) == len(found)
        return answers

    def _of(self, name: str) -> dict[str, str]:
        return dict(self.client.get(f"/v1/batches/{name}").json())

    def ask(self) -> None:
        answer = self.client.post(
            "/v1/completions", json={"model": MODEL, "prompt": "now", "max_tokens": 3, "ignore_eos": True}
        )
        assert answer.is_success, answer.text


@pytest.fixture
def batch(tmp_path: Path) -> Iterator[Batch]:
    with (
        serving(STEPS_OF_3_MS, max_num_seqs=1) as (upstream, _),
        owner(folder(tmp_path)) as keeper,
        filling_router(keeper.place, upstream, plans=[small_plan(max_num_seqs=1)]) as (address, core),
    ):
        records: list[RequestRecord] = []
        core.journal._writers = (*core.journal._writers, records.append)
        core.journal._together = 1
        made = Batch(address, core, records)
        with made.client:
            yield made


def lines_of(records: list[RequestRecord]) -> list[RequestRecord]:
    return [record for record in records if record.path == "/v1/chat/completions"]


def test_a_line_gives_its_seat_up_for_a_request_and_is_answered_later(batch: Batch) -> None:
    name = batch.start(2)
    batch.ask()
    assert not any(record.outcome == "ok" for record in lines_of(batch.records))  # it waited for no line
    answers = batch.results(name)
    assert sorted(answers) == ["r0", "r1"]
    assert all(answers.values())
    given_up = [record for record in batch.records if record.preemptions]
    assert [record.outcome for record in given_up] == ["cancelled"]
    assert batch.core.filler
    assert not batch.core.filler._given_up


def test_a_line_gives_its_seat_up_twice_at_most(batch: Batch) -> None:
    name = batch.start(1)
    for _ in range(2):
        batch.ask()
        batch.fills()
    batch.ask()
    ended = [record.outcome for record in lines_of(batch.records)]
    assert ended == ["cancelled", "cancelled", "ok"]
    assert list(batch.results(name)) == ["r0"]


def test_a_router_that_ends_starts_none_of_the_lines_that_wait(tmp_path: Path) -> None:
    with (
        serving(STEPS_OF_3_MS, max_num_seqs=1) as (upstream, _),
        owner(folder(tmp_path)) as keeper,
    ):
        with filling_router(keeper.place, upstream, plans=[small_plan(max_num_seqs=1)]) as (address, core):
            batch = Batch(address, core, [])
            with batch.client:
                batch.start(3)
        assert core.filler
        assert any(core.filler._waiting.values())
        assert not core.filler._running


async def test_a_router_ends_within_seconds_where_nobody_finds_the_store() -> None:
    async def find() -> tuple[str, str]:
        await asyncio.Event().wait()
        raise AssertionError

    core = RouterCore(Served([small_plan()]), KeyFile(None), dict, store=find)
    assert core.filler
    async with asyncio.timeout(PATIENCE_S):
        await core.filler.close(last_s=0.05)
    await core.close()
