"""The desk with a clock of the test's, real SQLite and real files: who gets which line, and what ends a batch."""

import asyncio
import json
import threading
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import func, insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection
from support.batches import KEY, folder, line
from support.desk import brought, lines, table
from support.servers import PATIENCE_S
from support.simulated_engine import MODEL

from serving.batches.desk import Desk
from serving.batches.files import Reading, Writing
from serving.batches.ledger import Ledger, NewLine
from serving.batches.lifecycle import Event, State
from serving.batches.service import Batches
from serving.config import BatchSpec
from serving.database.database import Database
from serving.database.tables import BATCHES, FILES, LINES
from serving.errors import BadRequestError, StorageError
from serving.secret import KEY_HEADER

pytestmark = pytest.mark.unit
OTHER = "1" * 64
FILE = {"key": KEY, "filename": "in", "purpose": "batch", "bytes": 1}
WANTS = [{"names": [MODEL], "most": 4}]
NEW_BATCH = {
    "key": KEY,
    "endpoint": "/v1/completions",
    "input_file_id": "f",
    "completion_window": "1h",
    "state": State.IN_PROGRESS,
    "times": {},
    "created_s": 0.0,
    "expires_s": 3600.0,
    "read_bytes": 0,
    "total": 1,
    "completed": 0,
    "failed": 0,
    "owned_until_s": 0.0,
}


async def test_a_line_is_at_one_router_until_that_router_is_silent(tmp_path: Path) -> None:
    async with table(tmp_path) as desk:
        await desk.add("one", lines(6))
        first = await desk.take("a")
        assert first == [("one", at) for at in range(1, 5)]
        second = await desk.take("b")
        assert second == [("one", 5), ("one", 6)]
        for _ in range(8):  # both go on saying what they have
            desk.now_s += 3
            assert await desk.take("a", first) == []
            assert await desk.take("b", second) == []
            await desk.desk.tick()
        for _ in range(6):
            desk.now_s += 3
            assert await desk.take("b", second) in ([], first)
            await desk.desk.tick()
        assert ("one", 1) not in await desk.take("c")


async def test_lines_of_a_silent_router_go_to_another_and_its_late_results_change_nothing(
    tmp_path: Path,
) -> None:
    async with table(tmp_path) as desk:
        await desk.add("one", lines(2))
        first = await desk.take("a")
        desk.now_s += 16
        await desk.desk.tick()
        assert await desk.take("b") == first
        await desk.bring(first)
        await desk.bring(first, status=400)  # the first result stays
        batch = await desk.batch("one")
        assert (batch.completed, batch.failed) == (2, 0)


async def test_a_router_that_no_longer_speaks_of_a_line_has_given_it_back(tmp_path: Path) -> None:
    async with table(tmp_path) as desk:
        await desk.add("one", lines(2))
        first = await desk.take("a")
        assert await desk.take("a", first[:1]) == first[1:]
        assert (await desk.desk.take("a", [], []))["drop"] == []
        assert await desk.take("b") == first


async def test_a_new_desk_hears_first_what_routers_have(tmp_path: Path) -> None:
    async with table(tmp_path) as desk:
        await desk.add("one", lines(6))
        held = await desk.take("a")
        await desk.desk.close()
        later = Desk(
            desk.ledger,
            desk.folder,
            BatchSpec(),
            [MODEL],
            1 << 20,
            clock=lambda: desk.now_s,
            calendar=lambda: desk.now_s,
        )
        await later.tick()
        assert await later.take("b", WANTS, []) == {"lines": [], "drop": [], "rates": {}}
        assert await later.take("a", WANTS, held) == {"lines": [], "drop": [], "rates": {}}
        desk.now_s += 3
        taken = (await later.take("b", WANTS, []))["lines"]
        assert [row["line"] for row in taken] == [5, 6]
        await later.close()


async def test_tokens_of_a_line_count_once_and_those_of_no_line_are_none(tmp_path: Path) -> None:
    answer = {
        "usage": {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}
    }
    async with table(tmp_path) as desk:
        await desk.add("one", lines(3))
        taken = await desk.take("a")
        for held in (taken[0], taken[0], taken[1]):
            await desk.desk.commit([{**brought(held, 200), "body": json.dumps(answer)}])
        await desk.bring(taken[2:], status=400)
        batch = await desk.batch("one")
        tokens = {"input_tokens": 10, "cached_tokens": 6, "output_tokens": 4, "reasoning_tokens": 0}
        assert (batch.model, batch.usage) == (MODEL, tokens)


async def test_a_batch_of_several_models_has_none_and_one_of_an_older_version_no_usage(
    tmp_path: Path,
) -> None:
    async with table(tmp_path, models=(MODEL, "other")) as desk:
        await desk.add("one", [line("a"), line("b", model="other"), "malformed"])
        assert (await desk.batch("one")).model is None
        await desk.add("old", lines(2))
        async with desk.ledger._database.write() as connection:
            await connection.execute(update(BATCHES).where(BATCHES.c.id == "old").values(usage=None))
        await desk.bring(await desk.take("a"))
        assert (await desk.batch("old")).usage is None


async def test_what_another_try_may_mend_is_tried_five_times(tmp_path: Path) -> None:
    async with table(tmp_path) as desk:
        await desk.add("one", lines(1))
        for _ in range(4):
            taken = await desk.take("a")
            assert taken == [("one", 1)]
            await desk.bring(taken, status=500, again=True)
            assert (await desk.batch("one")).failed == 0
        await desk.bring(await desk.take("a"), status=500, again=True)
        await desk.settle()
        batch = await desk.batch("one")
        assert (batch.state, batch.failed) == (State.COMPLETED, 1)
        assert desk.results(batch.error_file_id)[0]["response"]["status_code"] == 500


async def test_a_batch_whose_window_is_over_keeps_its_results_and_names_the_lines_without(
    tmp_path: Path,
) -> None:
    async with table(tmp_path) as desk:
        await desk.add("one", lines(6), window_s=100)
        await desk.bring((await desk.take("a"))[:2])
        desk.now_s += 200
        await desk.settle()
        batch = await desk.batch("one")
        assert (batch.state, batch.completed, batch.failed) == (State.EXPIRED, 2, 4)
        assert [row["custom_id"] for row in desk.results(batch.output_file_id)] == ["r0", "r1"]
        undone = desk.results(batch.error_file_id)
        assert [(row["custom_id"], row["error"]["code"]) for row in undone] == [
            (f"r{at}", "batch_expired") for at in range(2, 6)
        ]
        # A result that comes now is too late.
        await desk.bring([("one", 3)])
        assert (await desk.batch("one")).completed == 2


async def test_a_router_is_told_to_drop_lines_of_a_cancelled_batch(tmp_path: Path) -> None:
    async with table(tmp_path) as desk:
        await desk.add("one", lines(6))
        held = await desk.take("a")
        await desk.ledger.happen("one", Event.CANCEL, desk.now_s, key=KEY)
        await desk.bring(held[:1])
        await desk.settle()
        assert (await desk.desk.take("a", WANTS, held))["drop"] == held
        batch = await desk.batch("one")
        assert (batch.state, batch.completed, batch.failed) == (State.CANCELLED, 0, 6)


async def test_where_batches_may_scale_routers_hear_at_which_rate_lines_are_due(tmp_path: Path) -> None:
    async with table(tmp_path, may_scale=True, deadline_s=1000) as desk:
        await desk.add("one", lines(500), window_s=3600)
        assert (await desk.desk.take("a", [], []))["rates"] == {MODEL: pytest.approx(0.5, rel=0.01)}
        half = (await desk.desk.take("b", [], []))["rates"]  # two routers, a half each
        assert half == {MODEL: pytest.approx(0.25, rel=0.01)}
        desk.now_s = 990.0
        await desk.desk.tick()
        late = (await desk.desk.take("a", [], []))["rates"]
        assert late == {MODEL: pytest.approx(500 / 60)}
    async with table(tmp_path / "other") as desk:
        await desk.add("one", lines(5))
        assert (await desk.desk.take("a", [], []))["rates"] == {}


async def test_keys_share_seats_however_many_lines_one_of_them_has(tmp_path: Path) -> None:
    async with table(tmp_path) as desk:
        await desk.add("large", lines(50))
        await desk.add("small", lines(50), key=OTHER)
        taken = await desk.take("a", most=20)
        assert sum(name == "small" for name, _ in taken) == 10
        assert sum(name == "large" for name, _ in taken) == 10


@pytest.mark.parametrize(
    "hostile",
    [
        line("r0", temperature=float("nan")),
        line("r0").replace("hello", "\\ud800"),
        line("\ud800"),
        line("r0").replace('"hello"', f"[{'[],' * 70_000}0]"),
        line("r0").replace('"hello"', "[" * 5000 + "]" * 5000),
        line("r0").replace('"max_tokens"', '"model": "x", "max_tokens"'),
    ],
    ids=["NaN", "surrogate", "surrogate in the id", "wide", "deep", "twice"],
)
async def test_a_hostile_line_fails_alone(tmp_path: Path, hostile: str) -> None:
    async with table(tmp_path) as desk:
        await desk.add("one", [hostile, line("r1")])
        await desk.add("two", lines(1), key=OTHER)
        taken = await desk.take("a")
        assert sorted(taken) == [("one", 2), ("two", 1)]
        await desk.bring(taken)
        await desk.settle()
        batch = await desk.batch("one")
        assert (batch.state, batch.completed, batch.failed) == (State.COMPLETED, 1, 1)
        assert desk.results(batch.error_file_id)[0]["error"]["code"] == "invalid_json_line"


async def test_a_line_that_an_older_version_let_in_stops_no_other(tmp_path: Path) -> None:
    class Older(Ledger):
        async def add_lines(self, name: str, lines: Sequence[NewLine], read_bytes: int) -> bool:
            let_in = [replace(row, custom_id=f"r{row.line}", model=MODEL, result=None) for row in lines]
            return await super().add_lines(name, let_in, read_bytes)

    async with table(tmp_path, Older) as desk:
        await desk.add("one", [line("r1", temperature=float("nan")), line("r2")])
        await desk.add("two", lines(1), key=OTHER)
        assert sorted(await desk.take("a")) == [("one", 2), ("two", 1)]
        await desk.desk.tick()
        batch = await desk.batch("one")
        assert (batch.completed, batch.failed) == (0, 1)


async def test_a_batch_whose_file_is_gone_stops_no_other(tmp_path: Path) -> None:
    async with table(tmp_path) as desk:
        await desk.add("one", lines(2))
        await desk.add("two", lines(2), key=OTHER)
        desk.folder.delete("file-one")
        assert await desk.take("a") == [("two", 1), ("two", 2)]


async def test_a_batch_that_can_not_be_read_fails(tmp_path: Path) -> None:
    class Refusing(Ledger):
        async def add_lines(self, *_: Any) -> bool:
            raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")

    async with table(tmp_path, Refusing) as desk:
        await desk.add("one", lines(1))
        batch = await desk.batch("one")
        assert (batch.state, batch.errors["data"][0]["code"]) == (State.FAILED, "invalid_file")


async def test_one_answer_to_a_router_has_a_bounded_number_of_bytes(tmp_path: Path) -> None:
    async with table(tmp_path) as desk:
        await desk.add("one", [line(f"r{at}", "x" * 900_000) for at in range(12)])
        first = await desk.take("a", most=12)
        assert len(first) == 10
        assert await desk.take("a", first, most=12) == [("one", 11), ("one", 12)]


async def test_an_editor_s_mark_before_the_first_line_is_no_part_of_it(tmp_path: Path) -> None:
    async with table(tmp_path) as desk:
        await desk.add("one", ["\ufeff" + line("r0")])
        assert await desk.take("a") == [("one", 1)]


async def test_many_batches_of_one_key_get_no_more_seats_than_one_of_another(tmp_path: Path) -> None:
    async with table(tmp_path) as desk:
        for at in range(6):
            await desk.add(f"many{at}", lines(3))
        await desk.add("single", lines(20), key=OTHER)
        taken = await desk.take("a", most=12)
        assert Counter(name for name, _ in taken) == {"single": 6, **{f"many{at}": 1 for at in range(6)}}
        assert len(await desk.take("b", most=50)) == 6 * 3 + 20 - 12


async def test_uploads_side_by_side_pass_a_key_s_bounds_once(tmp_path: Path) -> None:
    fields = {"key": KEY, "filename": "in", "purpose": "batch", "bytes": 1000, "created_s": 0.0}
    async with table(tmp_path) as desk:
        came = [
            desk.ledger.add_upload({**fields, "id": f"file-{at}"}, most_bytes=1500, most_files=9)
            for at in range(5)
        ]
        assert sum(await asyncio.gather(*came)) == 2
        empty = [
            await desk.ledger.add_upload(
                {**fields, "key": OTHER, "bytes": 0, "id": f"empty-{at}"}, most_bytes=1500, most_files=3
            )
            for at in range(5)
        ]
        assert sum(empty) == 3


async def test_a_full_disk_leaves_a_batch_where_it_was(tmp_path: Path) -> None:
    async with table(tmp_path) as desk:
        await desk.add("one", lines(1))
        await desk.bring(await desk.take("a"))
        place = Path(folder(tmp_path).files_at)
        place.rename(tmp_path / "away")  # noqa: ASYNC240  nothing can be written
        await desk.settle()
        assert (await desk.batch("one")).state == State.FINALIZING
        (tmp_path / "away").rename(place)
        await desk.settle()
        assert (await desk.batch("one")).state == State.COMPLETED


@pytest.mark.slow
async def test_ten_thousand_lines_pass_in_constant_memory(tmp_path: Path) -> None:
    """20 MB of input and as much of output, in a few MB."""
    async with table(tmp_path) as desk:
        text = "x" * 2000
        path = Path(folder(tmp_path).files_at)
        with (path / "file-large").open("w") as file:
            for at in range(10_000):
                file.write(line(f"r{at}", text) + "\n")
        size = (path / "file-large").stat().st_size
        tracemalloc.start()
        fields = {"id": "file-large", "key": KEY, "filename": "in", "purpose": "batch", "bytes": size}
        await desk.ledger.add_file({**fields, "created_s": 0.0, "expires_s": 10.0**9})
        await desk.ledger.store_file("file-large", size)
        await desk.ledger.add_batch(
            {
                "id": "large",
                "key": KEY,
                "endpoint": "/v1/chat/completions",
                "input_file_id": "file-large",
                "completion_window": "1h",
                "created_s": 0.0,
                "expires_s": 10.0**8,
            },
            100,
        )
        await desk.settle()
        while taken := await desk.take("a", most=500):
            body = json.dumps({"text": text})
            await desk.desk.commit(
                [
                    {
                        "batch": name,
                        "line": at,
                        "status": 200,
                        "request_id": "r",
                        "body": body,
                        "again": False,
                    }
                    for name, at in taken
                ]
            )
        await desk.settle()
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        batch = await desk.batch("large")
        assert (batch.state, batch.completed) == (State.COMPLETED, 10_000)
        ids = [json.loads(row)["custom_id"] for row in (path / batch.output_file_id).open()]
        assert ids == [f"r{at}" for at in range(10_000)]
        print(f"peak of {peak_bytes / 1e6:.1f} MB for {size / 1e6:.0f} MB of input")
        assert peak_bytes < 12e6


async def test_lines_of_a_key_over_its_budget_wait_and_hold_up_no_other_key(tmp_path: Path) -> None:
    async with table(tmp_path) as some:
        await some.add("a", [line(f"a{at}") for at in range(8)])
        await some.add("b", [line(f"b{at}") for at in range(8)], key=OTHER)
        taken = await some.take("r", most=4)
        over = [held for held in taken if held[0] == "a"]
        for _ in range(9):  # more often than a line is tried on which engines fail
            await some.bring(over, 429, wait_s=5.0)
            assert {name for name, _ in await some.take("r", most=2)} == {"b"}
            some.now_s += 6
            over = [held for held in await some.take("r", most=4) if held[0] == "a"]
            assert over
        await some.bring(over, 429, wait_s=86400.0)
        some.now_s += 61  # the operator may have raised it
        assert {name for name, _ in await some.take("r", most=16)} == {"a", "b"}
        batch = await some.batch("a")
        assert (batch.failed, batch.state) == (0, State.IN_PROGRESS)


async def test_the_next_process_of_a_store_that_was_killed_takes_what_routers_have(tmp_path: Path) -> None:
    """It does not wait until the dead one has been silent for long, and has routers give nothing up."""
    store = folder(tmp_path)
    async with table(tmp_path) as some:
        await some.add("a", lines(8))
        held = await some.take("r")
        database = await Database.open(store.database_at)
        after = Batches(database, store, BatchSpec(), [MODEL], 1 << 20, lambda: some.now_s, owner="here").desk
        await after.tick()
        assert (await after.take("r", [], held))["drop"] == []
        result = {"status": 200, "request_id": "r", "body": "{}", "again": False}
        await after.commit([{"batch": name, "line": number, **result} for name, number in held])
        assert (await some.batch("a")).completed == 4
        await after.close()
        await database.close()


async def test_a_slow_client_s_file_is_as_old_as_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep took a file whose upload had lasted for an hour for one that never became whole, and its client got a 404."""
    store, now_s = folder(tmp_path), [1000.0]
    database = await Database.open(store.database_at)
    batches = Batches(database, store, BatchSpec(), [MODEL], 1 << 20, calendar=lambda: now_s[0])
    app, loop, close = FastAPI(), asyncio.get_running_loop(), Writing.close
    app.include_router(batches.routes())

    def swept_meanwhile(writing: Writing) -> None:
        asyncio.run_coroutine_threadsafe(batches.desk.content.sweep(), loop).result()
        close(writing)

    async def slow() -> AsyncIterator[bytes]:
        yield b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        now_s[0] += 2 * 3600
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nx\r\n--b--\r\n'

    monkeypatch.setattr(Writing, "close", swept_meanwhile)
    headers = {KEY_HEADER: KEY, "content-type": "multipart/form-data; boundary=b"}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://x", headers=headers
    ) as http:
        made = (await http.post("/v1/files", content=slow())).json()
        assert made["created_at"] == now_s[0]
        assert (await http.get(f"/v1/files/{made['id']}/content")).content == b"x"
    await database.close()


async def test_a_result_that_is_not_kept_leaves_its_line_to_do(tmp_path: Path) -> None:
    async with table(tmp_path) as some:
        await some.add("a", lines(4))
        held = await some.take("r")
        assert await some.take("r", held) == []
        await some.ledger.disown()
        await Ledger(some.ledger._database, "there").own(some.now_s, 1, some.now_s)
        await some.bring(held)
        assert (await some.batch("a")).completed == 0
        await some.desk.tick()
        some.now_s += 15
        await some.settle()
        assert await some.take("r") == held


async def test_results_of_a_batch_that_nobody_owns_are_kept(tmp_path: Path) -> None:
    """The process before has ended and left the batches of both to others: four lines were asked again."""
    async with table(tmp_path) as some:
        await some.add("a", lines(4))
        held = await some.take("r")
        await some.ledger.disown()
        await some.bring(held)
        found = await some.batch("a")
    assert (found.state, found.completed) == (State.FINALIZING, 4)


async def test_results_are_read_few_at_a_time_for_one_may_have_megabytes(tmp_path: Path) -> None:
    async with table(tmp_path) as some:
        await some.add("a", lines(40))
        for _ in range(10):
            await some.bring(await some.take("r"))
        assert [len(page) async for page in some.ledger.results("a")] == [16, 16, 8]


async def test_of_long_results_fewer_are_read_at_once(tmp_path: Path) -> None:
    """An answer may have 32 MiB, and sixteen batches are written at once."""
    longest = json.dumps("x" * (5 << 20))
    async with table(tmp_path) as some:
        await some.add("a", lines(40))
        for _ in range(10):
            held = await some.take("r")
            bodies = {line: longest if line in (3, 4, 20, 40) else "{}" for _, line in held}
            await some.desk.commit(
                [brought((batch, line), 200) | {"body": bodies[line]} for batch, line in held]
            )
        pages = [[row.line for row in page] async for page in some.ledger.results("a")]
        assert [line for page in pages for line in page] == list(range(1, 41))
        assert [len(page) for page in pages] == [2, 1, 1, 15, 1, 16, 3, 1]


async def test_a_batch_whose_input_is_gone_from_the_disk_fails_and_says_so(tmp_path: Path) -> None:
    async with table(tmp_path) as some:
        await some.add("a", lines(1))
        (tmp_path / "store" / "files" / "file-b").unlink(missing_ok=True)
        written = some.folder.write
        some.folder.write = lambda _: written("elsewhere")  # type: ignore[method-assign]
        await some.add("b", lines(1))
        batch = await some.batch("b")
        assert batch.state == State.FAILED
        assert "no longer there" in batch.errors["data"][0]["message"]


async def test_a_file_that_is_deleted_meanwhile_is_no_batch_s_input(tmp_path: Path) -> None:
    async with table(tmp_path) as some:
        await some.add("a", lines(1))
        await some.bring(await some.take("r"))
        await some.settle()
        assert await some.ledger.delete_file("file-a")
        fields = {"id": "late", "key": KEY, "endpoint": "/v1/chat/completions", "input_file_id": "file-a"}
        fields |= {"completion_window": "1h", "created_s": 0.0, "expires_s": 10.0}
        assert await some.ledger.add_batch(fields, 100) is None


async def test_results_that_find_no_room_leave_nothing_behind_and_are_written_once_there_is_some(
    tmp_path: Path,
) -> None:
    async with table(tmp_path) as some:
        await some.add("a", lines(3))
        await some.bring(await some.take("r"))
        write = some.folder.write

        def full(name: str) -> Writing:
            writing = write(name)
            writing.write(b"half")
            writing.close()
            raise StorageError("A file can't be written (No space left on device).")

        some.folder.write = full  # type: ignore[method-assign]
        await some.settle()
        await some.desk.idle()  # its last beat began one more try
        some.folder.write = write  # type: ignore[method-assign]
        assert [path.name for path in (tmp_path / "store" / "files").iterdir()] == ["file-a"]
        files = select(FILES.c.id)
        async with some.ledger._database.read() as connection:
            assert list(await connection.scalars(files)) == ["file-a"]
        await some.settle()
        batch = await some.batch("a")
        assert (batch.state, len(some.results(batch.output_file_id))) == (State.COMPLETED, 3)


async def test_a_batch_stays_from_its_end_on_however_long_it_took(tmp_path: Path) -> None:
    async with table(tmp_path, max_age_s=3600) as some:
        await some.add("a", lines(1), window_s=86400)
        some.now_s += 7200
        await some.bring(await some.take("r"))
        for _ in range(2):
            await some.settle()
            some.now_s += 100
        assert (await some.batch("a")).state == State.COMPLETED
        some.now_s += 3600
        await some.settle()
        assert await some.batch("a") is None


async def test_a_file_that_can_not_be_deleted_keeps_no_other_on_the_disk(tmp_path: Path) -> None:
    async with table(tmp_path) as some:
        delete = some.folder.delete

        def held(name: str) -> None:
            if name == "file-b":
                raise StorageError("A file can't be deleted (retention).")
            delete(name)

        some.folder.delete = held  # type: ignore[method-assign]
        for name in "abc":
            await some.add(name, lines(1))
            await some.ledger.happen(name, Event.CANCEL, some.now_s)
        await some.settle()
        some.now_s += 10**8
        await some.settle()
        files = tmp_path / "store" / "files"
        assert [path.name for path in files.iterdir()] == ["file-b"]
        some.folder.delete = delete  # type: ignore[method-assign]
        some.now_s += 100
        await some.settle()
        assert not list(files.iterdir())


async def test_a_file_is_deleted_for_its_key_though_its_content_can_not_be_yet(tmp_path: Path) -> None:
    """The client was told of an error, tried again, and got a 404."""
    store = folder(tmp_path)
    database = await Database.open(store.database_at)
    batches = Batches(database, store, BatchSpec(), [MODEL], 1 << 20)
    app, delete = FastAPI(), batches._folder.delete

    def fails(_: str) -> None:
        raise StorageError("A file can't be deleted (503).")

    app.include_router(batches.routes())
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x", headers={KEY_HEADER: KEY}) as http:
        form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": ("in", b"x")}}
        name = (await http.post("/v1/files", **form)).json()["id"]
        batches._folder.delete = fails  # type: ignore[method-assign]
        assert (await http.delete(f"/v1/files/{name}")).json()["deleted"]
        assert (await http.get("/v1/files")).json()["data"] == []
        batches._folder.delete = delete  # type: ignore[method-assign]
        await batches.desk.content.sweep()
    assert not list((tmp_path / "store" / "files").iterdir())
    await database.close()


async def test_a_read_that_hangs_holds_up_no_other_batch_and_its_lines_come_once(tmp_path: Path) -> None:
    """It held the desk: every router waited for lines of all batches, and a batch that was over could not be left."""
    async with table(tmp_path) as some, asyncio.timeout(PATIENCE_S):
        for name, key in (("a", KEY), ("b", OTHER), ("c", KEY)):
            await some.add(name, lines(2), key=key)
        read, answered = some.folder.read, threading.Event()

        def hanging(name: str, start: int = 0) -> Reading:
            if name in ("file-a", "file-c"):
                assert answered.wait(60)
            return read(name, start)

        some.folder.read = hanging  # type: ignore[method-assign]
        some.desk._read_s = 0.01
        taken: list[tuple[str, int]] = []

        async def take(count: int) -> None:
            while len(taken) < count:
                taken.extend(await some.take("r", taken, most=9))
                await asyncio.sleep(0.01)

        try:
            await take(2)
            assert sorted(taken) == [("b", 1), ("b", 2)]
            assert "storage of files" in some.desk.why("a")
            await some.bring(taken)
            await some.ledger.happen("c", Event.CANCEL, some.now_s)
            await some.desk.tick()
            assert (await some.batch("b", OTHER)).state == State.FINALIZING
        finally:
            answered.set()
        await some.settle()
        assert (await some.batch("c")).state == State.CANCELLED
        taken.clear()
        await take(2)
        assert sorted(taken) == [("a", 1), ("a", 2)]
        assert some.desk.why("a") == ""


async def test_lines_that_were_brought_while_they_were_read_are_not_handed_out(tmp_path: Path) -> None:
    async with table(tmp_path) as some, asyncio.timeout(PATIENCE_S):
        await some.add("a", lines(3))
        read, answered = some.folder.read, threading.Event()

        def hanging(name: str, start: int = 0) -> Reading:
            assert answered.wait(60)
            return read(name, start)

        some.folder.read = hanging  # type: ignore[method-assign]
        some.desk._read_s = 0.01
        try:
            assert await some.take("r") == []
            await some.bring([("a", 1)])  # of a router that was silent
            assert await some.take("other", [("a", 2)]) == []  # as this one was
        finally:
            answered.set()
        taken: list[tuple[str, int]] = []
        while True:
            taken += await some.take("r")
            if taken:
                break
        assert taken == [("a", 3)]


async def test_a_sweep_of_a_slow_bucket_holds_up_no_batch(tmp_path: Path) -> None:
    async with table(tmp_path) as some:
        await some.add("a", lines(1))
        delete, swept = some.folder.delete, threading.Event()

        def slow(name: str) -> None:
            assert swept.wait(30)
            delete(name)

        some.folder.delete = slow  # type: ignore[method-assign]
        await some.ledger.add_file({**FILE, "id": "old", "created_s": 0.0, "expires_s": 0.0})
        some.now_s += 100
        try:
            await asyncio.wait_for(some.desk.tick(), 10)
            await some.bring(await some.take("r"))
            assert (await some.batch("a")).state == State.FINALIZING
        finally:
            swept.set()
        await some.settle()
        assert (await some.batch("a")).state == State.COMPLETED


async def test_lines_are_forgotten_few_at_a_time_so_that_others_write_in_between(tmp_path: Path) -> None:
    async with table(tmp_path) as some:
        await some.add("a", lines(450))
        await some.ledger.happen("a", Event.CANCEL, some.now_s)
        await some.settle()
        changed: list[int] = []
        where = some.ledger._database
        write = where.write

        @asynccontextmanager
        async def counted() -> AsyncIterator[AsyncConnection]:
            async with write() as connection:
                before = await connection.scalar(text("SELECT total_changes()"))
                yield connection
                changed.append(
                    int(await connection.scalar(text("SELECT total_changes()")) or 0) - (before or 0)
                )

        where.write = counted  # type: ignore[method-assign]
        await some.ledger.sweep_lines()
        assert changed == [200, 200, 50]


async def test_results_whose_files_were_swept_meanwhile_are_written_anew(tmp_path: Path) -> None:
    """A calendar that jumps by hours makes files that are being written look as if nobody wrote them."""
    async with table(tmp_path) as some:
        await some.add("a", lines(3))
        await some.bring(await some.take("r"))
        assembled = some.ledger.assembled

        async def late(*arguments: Any) -> bool:
            some.ledger.assembled = assembled  # type: ignore[method-assign]
            some.now_s += 7200
            await some.desk.content.sweep()
            return await assembled(*arguments)

        some.ledger.assembled = late  # type: ignore[method-assign]
        await some.settle()
        await some.settle()
        batch = await some.batch("a")
        assert batch.state == State.COMPLETED
        assert len(some.results(batch.output_file_id)) == 3


async def test_a_full_disk_is_told_in_a_line_a_beat(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with table(tmp_path) as some:

        async def full() -> None:
            told.set()
            raise StorageError("The database can't be written (database or disk is full).")

        told = asyncio.Event()
        some.desk.tick = full  # type: ignore[method-assign]
        running = asyncio.create_task(some.desk.run())
        await told.wait()
        await asyncio.sleep(0)
        running.cancel()
        (record,) = caplog.records
        assert "disk is full" in record.getMessage()
        assert record.exc_info is None


async def test_a_desk_whose_database_can_not_be_written_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The store's other parts and its database were left open."""
    async with table(tmp_path) as some:
        async with some.ledger._database.write() as connection:
            await connection.execute(text("DROP TABLE batches"))
        await some.desk.close()
    assert "others take this process's batches" in caplog.text


async def test_a_result_that_is_brought_again_and_again_is_one_try(tmp_path: Path) -> None:
    """As on a full disk, and where the store's answer was lost."""
    async with table(tmp_path) as some:
        await some.add("a", lines(2))
        failed, good = await some.take("r")
        commit = some.ledger.commit

        async def full(*_: Any) -> None:
            raise StorageError("The database can't be written (database or disk is full).")

        results = [brought(failed, 500, again=True), brought(good, 200)]
        some.ledger.commit = full  # type: ignore[method-assign]
        for _ in range(10):
            with pytest.raises(StorageError):
                await some.desk.commit(results)
        some.ledger.commit = commit  # type: ignore[method-assign]
        for _ in range(10):
            await some.desk.commit(results)
        batch = await some.batch("a")
        assert (batch.completed, batch.failed) == (1, 0)
        assert await some.take("r") == [failed]


async def test_a_batch_whose_input_is_gone_while_it_runs_is_told_of_now_and_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with table(tmp_path) as some:
        await some.add("a", lines(2))
        file = tmp_path / "store" / "files" / "file-a"
        kept = file.rename(tmp_path / "elsewhere")
        for _ in range(20):
            assert await some.take("r") == []
        assert [record.getMessage() for record in caplog.records if "waits" in record.getMessage()] == [
            "batch a waits: A file can't be read (No such file or directory)."
        ]
        kept.rename(file)
        some.now_s += 15
        assert await some.take("r") == [("a", 1), ("a", 2)]


async def test_a_batch_whose_window_ends_before_it_is_read_names_every_line(tmp_path: Path) -> None:
    async with table(tmp_path) as some:
        tick = some.desk.tick

        async def nothing() -> None:
            pass

        some.desk.tick = nothing  # type: ignore[method-assign]  # the store was away
        await some.add("a", [*lines(3), "{"], window_s=1)
        some.desk.tick = tick  # type: ignore[method-assign]
        await some.settle()
        batch = await some.batch("a")
        assert (batch.state, batch.total, batch.failed) == (State.EXPIRED, 4, 4)
        codes = [row["error"]["code"] for row in some.results(batch.error_file_id)]
        assert codes == ["batch_expired"] * 3 + ["invalid_json_line"]


async def test_a_batch_that_is_cancelled_before_it_is_read_ends_though_its_file_is_gone(
    tmp_path: Path,
) -> None:
    async with table(tmp_path) as some:
        tick = some.desk.tick

        async def nothing() -> None:
            pass

        some.desk.tick = nothing  # type: ignore[method-assign]
        await some.add("a", lines(3))
        some.desk.tick = tick  # type: ignore[method-assign]
        await some.ledger.happen("a", Event.CANCEL, some.now_s)
        (tmp_path / "store" / "files" / "file-a").unlink()
        await some.settle()
        batch = await some.batch("a")
        assert (batch.state, batch.total, batch.error_file_id) == (State.CANCELLED, 0, None)


async def test_lines_of_more_batches_than_a_page_are_forgotten_in_one_sweep(tmp_path: Path) -> None:
    async with table(tmp_path) as some:
        async with some.ledger._database.write() as connection:
            for at in range(40):
                over = {**NEW_BATCH, "id": f"b{at}", "state": State.COMPLETED}
                await connection.execute(insert(BATCHES).values(over))
                row = {"batch_id": f"b{at}", "line": 1, "start": 0, "bytes": 1}
                await connection.execute(insert(LINES).values(row))
        await some.ledger.sweep_lines()
        async with some.ledger._database.read() as connection:
            assert await connection.scalar(select(func.count()).select_from(LINES)) == 0


async def test_batches_that_are_this_process_s_for_long_yet_are_not_written_each_second(
    tmp_path: Path,
) -> None:
    async with table(tmp_path) as some:
        async with some.ledger._database.write() as connection:
            await connection.execute(insert(BATCHES).values({**NEW_BATCH, "id": "a"}))

        async def until_s(now_s: float) -> float:
            (batch,) = await some.ledger.own(now_s, 15, now_s)
            return float(batch.owned_until_s)

        assert [await until_s(now_s) for now_s in (100, 101, 104, 105, 106)] == [115, 115, 115, 120, 120]
        assert await until_s(50) == 65  # the clock was put back


@pytest.mark.parametrize("put_back_s", [-3600, 0, 3600])
async def test_a_silent_process_loses_its_batches_whatever_time_of_day_another_s_host_has(
    tmp_path: Path, put_back_s: float
) -> None:
    """With a clock an hour back nobody took a dead head's batches for an hour, and an hour ahead a head took those of one that lives."""
    async with table(tmp_path) as some:
        async with some.ledger._database.write() as connection:
            await connection.execute(insert(BATCHES).values({**NEW_BATCH, "id": "a"}))
        other = Ledger(some.ledger._database, "there")

        async def takes(ledger: Ledger, clock_s: float, behind_s: float = 0) -> bool:
            return bool(await ledger.own(7200 + clock_s - behind_s, 15, clock_s))

        for clock_s in range(40):  # both live
            assert await takes(some.ledger, clock_s)
            assert not await takes(other, clock_s, put_back_s)
        for clock_s in range(40, 80):  # its own host's clock is put back
            assert await takes(some.ledger, clock_s, 3600)
            assert not await takes(other, clock_s, put_back_s)
        # It is silent from here on, and has written last within five seconds.
        taken = [clock_s for clock_s in range(80, 100) if await takes(other, clock_s, put_back_s)]
        assert 89 <= taken[0] <= 95
        assert not await takes(some.ledger, 101)


async def test_a_page_behind_what_is_another_key_s_is_refused_as_behind_nothing(tmp_path: Path) -> None:
    async with table(tmp_path) as some:
        await some.add("a", lines(1))
        for key, name in ((OTHER, "file-a"), (KEY, "nothing")):
            with pytest.raises(BadRequestError, match="nothing of this id"):
                await some.ledger.files(key, 0.0, purpose=None, after_id=name, limit=1, newest=True)
        with pytest.raises(BadRequestError, match="nothing of this id"):
            await some.ledger.batches(OTHER, after_id="a", limit=1)
        assert await some.ledger.batches(KEY, after_id="a", limit=1) == []


async def test_a_batch_of_a_model_that_the_yaml_no_longer_has_waits_for_it_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with table(tmp_path) as some:
        await some.add("a", lines(2))
    async with table(tmp_path, models=("another",)) as some:
        await some.settle()
        taken = await some.desk.take("r", [{"names": ["another"], "most": 4}], [])
        assert taken["lines"] == []
        said = [record.getMessage() for record in caplog.records]
        assert said == [
            f"batch a waits: this service no longer has its model {MODEL!r}; put it back, or cancel the batch"
        ]
    async with table(tmp_path) as some:
        await some.settle()
        assert await some.take("r") == [("a", 1), ("a", 2)]
        await some.ledger.happen("a", Event.CANCEL, some.now_s)
        await some.settle()
        assert (await some.batch("a")).state == State.CANCELLED


async def test_empty_lines_count_for_no_limit_of_lines(tmp_path: Path) -> None:
    async with table(tmp_path, max_lines=3) as at_work:
        await at_work.add("batch_a", [line("a"), "", line("b"), "\r", line("c"), ""])
        await at_work.add("batch_b", [line("a"), "", line("b"), line("c"), line("d")])
        fits, longer = await at_work.batch("batch_a"), await at_work.batch("batch_b")
    assert (fits.state, fits.total) == (State.IN_PROGRESS, 3)
    assert (longer.state, longer.errors["data"][0]["code"]) == (State.FAILED, "too_many_lines")


@pytest.mark.parametrize("answer", ['{"x": NaN}', '{"x": -Infinity}', '{"x": 1e999}', "[" * 100_000, ""])
async def test_an_answer_that_is_no_json_is_a_text_of_the_results(tmp_path: Path, answer: str) -> None:
    async with table(tmp_path) as at_work:
        await at_work.add("batch_a", [line("a")])
        (held,) = await at_work.take("router")
        await at_work.desk.commit([brought(held, 200) | {"body": answer}])
        await at_work.settle()
        (result,) = at_work.results((await at_work.batch("batch_a")).output_file_id)
    assert result["response"]["body"] == answer


async def test_lines_of_a_key_that_a_router_does_not_know_yet_wait_until_it_does_or_is_taken_for_revoked(
    tmp_path: Path,
) -> None:
    async with table(tmp_path) as at_work:
        await at_work.add("batch_a", [line("a"), line("b")])
        await at_work.bring(await at_work.take("late", most=2), 401)
        assert await at_work.take("late", most=2) == []
        at_work.now_s += 11
        (first, second) = await at_work.take("router", most=2)
        await at_work.bring([first])
        at_work.now_s += 600
        for _ in range(2):  # the key was known since
            await at_work.bring([second], 401)
            assert (await at_work.batch("batch_a")).failed == 0
            at_work.now_s += 100
            assert await at_work.take("late", most=2) == [second]
        await at_work.bring([second], 401)
        found = await at_work.batch("batch_a")
    assert (found.state, found.completed, found.failed) == (State.FINALIZING, 1, 1)


async def test_a_key_that_was_unknown_in_an_earlier_batch_is_not_taken_for_revoked_in_the_next(
    tmp_path: Path,
) -> None:
    async with table(tmp_path) as some:
        await some.add("one", lines(1))
        await some.bring(await some.take("late"), 401)
        await some.ledger.happen("one", Event.CANCEL, some.now_s)
        some.now_s += 3000
        await some.settle()
        await some.add("two", lines(1))
        some.now_s += 60
        await some.bring(await some.take("late"), 401)
        assert (await some.batch("two")).failed == 0
