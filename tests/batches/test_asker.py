"""Lines of a corpus asked of a router with a simulated engine behind it, into free seats."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from aiohttp import web
from support.batches import filling_router, line
from support.servers import until
from support.simulated_engine import MODEL, serving, small_plan
from support.two_engines import STEPS_OF_3_MS

from serving.batches import asker
from serving.batches.asker import Asked, Asker
from serving.batches.lines import FREE_SEATS
from serving.router.core import RouterCore
from serving.router.http.auth import KeyFile, new
from serving.router.telemetry.record import RequestRecord
from serving.simulation.ports import free_port

pytestmark = pytest.mark.http
FREE = {FREE_SEATS: "1"}


@pytest.fixture
def router() -> Iterator[tuple[str, RouterCore]]:
    one = small_plan(max_num_seqs=2)
    with serving(max_num_seqs=2) as (upstream, _), filling_router(None, upstream, plans=[one]) as made:
        yield made


async def asked(url: str, texts: list[str], key: str | None = None, most: int = 64) -> list[Asked]:
    made = Asker(url, MODEL, most, key)
    try:
        return await made.ask(range(1, len(texts) + 1), [text.encode() for text in texts])
    finally:
        await made.close()


async def test_every_line_is_answered_by_few_seats_and_a_refused_one_fails_alone(
    router: tuple[str, RouterCore],
) -> None:
    texts = [line(f"r{at}") for at in range(60)]
    texts[7] = line("r7", n=1000)
    found = await asked(router[0], texts)
    rows = [json.loads(row.result) for row in found]
    assert [row["custom_id"] for row in rows] == [f"r{at}" for at in range(60)]
    assert [row["custom_id"] for row in rows if row["response"]["status_code"] != 200] == ["r7"]
    assert rows[0]["response"]["body"]["choices"][0]["message"]["content"]
    assert rows[0]["id"] == "batch_req_run_1"


async def test_what_asks_for_free_seats_only_gives_way_to_a_request_and_scaling_leaves_it_out() -> None:
    one = small_plan(max_num_seqs=1)
    with (
        serving(STEPS_OF_3_MS, max_num_seqs=1) as (upstream, _),
        filling_router(None, upstream, plans=[one]) as (url, core),
    ):
        records: list[RequestRecord] = []
        core.journal._writers = (*core.journal._writers, records.append)
        core.journal._together = 1
        running = asyncio.create_task(asked(url, [line("long", max_tokens=500, ignore_eos=True)]))
        await asyncio.to_thread(until, lambda: core.admission.filling(MODEL) == 1, "the line has the seat")
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            body = {"model": MODEL, "prompt": "now", "max_tokens": 3}
            answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200

        def outcomes() -> list[tuple[str, str]]:
            """Without those of the line that found no free seat yet."""
            return [(record.path, record.outcome) for record in records if record.outcome != "overloaded"]

        await asyncio.to_thread(until, lambda: len(outcomes()) > 1, "both are written down")
        assert outcomes()[:2] == [("/v1/chat/completions", "cancelled"), ("/v1/completions", "ok")]
        (row,) = await running
        assert json.loads(row.result)["response"]["status_code"] == 200
        assert core.admission.counts(MODEL)["arrived"] == 1


async def test_without_a_free_seat_the_answer_is_a_refusal_at_once() -> None:
    one = small_plan(max_num_seqs=1)
    with (
        serving(STEPS_OF_3_MS, max_num_seqs=1) as (upstream, _),
        filling_router(None, upstream, plans=[one]) as (url, core),
    ):
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            body = {"model": MODEL, "prompt": "now", "max_tokens": 300, "ignore_eos": True}
            busy = asyncio.create_task(client.post("/v1/completions", json=body))
            await asyncio.to_thread(until, lambda: not core.admission.free_seats(MODEL), "the seat is taken")
            refused = await client.post("/v1/completions", json=body, headers=FREE)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
            assert (await busy).status_code == 200
            streamed = await client.post("/v1/completions", json={**body, "stream": True}, headers=FREE)
            assert streamed.status_code == 400
            assert "has no stream" in streamed.json()["error"]["message"]


async def test_free_seats_cost_what_a_key_s_limits_say_and_give_back_what_they_did_not_use(
    tmp_path: Path,
) -> None:
    key, text = new("some", tokens_per_minute=1000)
    (tmp_path / "keys.yaml").write_text(text)
    one = small_plan(max_num_seqs=1)
    keys = KeyFile(tmp_path / "keys.yaml")
    with (
        serving(STEPS_OF_3_MS, max_num_seqs=1) as (upstream, _),
        filling_router(None, upstream, plans=[one], keys=keys) as (url, core),
    ):
        headers = {"authorization": f"Bearer {key}"}
        body = {"model": MODEL, "prompt": "now", "max_tokens": 250, "ignore_eos": True}
        async with httpx.AsyncClient(base_url=url, timeout=60, headers=headers) as client:
            busy = asyncio.create_task(client.post("/v1/completions", json=body))
            await asyncio.to_thread(until, lambda: not core.admission.free_seats(MODEL), "the seat is taken")
            for _ in range(10):  # each may have a quarter of the minute's tokens
                refused = await client.post("/v1/completions", json=body, headers=FREE)
                assert refused.json()["error"]["code"] == "overloaded"
            assert (await busy).status_code == 200


class Scripted:
    """A service that answers a line with what comes next, the last again and again."""

    def __init__(self, *answers: tuple[int, dict[str, object] | str], seats: int = 1000) -> None:
        self.answers = list(answers)
        self.seats = seats
        self.asked = self.under_way = self.refused = 0

    async def answer(self, _: web.Request) -> web.Response:
        self.asked += 1
        status, body = self.answers[min(self.asked, len(self.answers)) - 1]
        if self.under_way >= self.seats:
            self.refused += 1
            return web.json_response({}, status=503)
        self.under_way += 1
        await asyncio.sleep(0.002)
        self.under_way -= 1
        if isinstance(body, str):
            return web.Response(text=body, status=status)
        return web.json_response(body, status=status)

    async def ask(self, count: int) -> list[Asked]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            return await asked(f"http://127.0.0.1:{port}", [line(f"r{at}") for at in range(count)])
        finally:
            await runner.cleanup()


@pytest.fixture(autouse=True)
def again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asker, "_AGAIN_S", 0.01)


def statuses(found: list[Asked]) -> list[int]:
    return [json.loads(row.result)["response"]["status_code"] for row in found]


async def test_a_line_on_which_engines_fail_is_tried_five_times() -> None:
    service = Scripted((500, {"error": "no"}))
    assert statuses(await service.ask(1)) == [500]
    assert service.asked == 5


async def test_a_line_waits_for_a_slice_for_as_long_as_it_takes() -> None:
    service = Scripted(*[(503, {})] * 20, (200, {}))
    assert statuses(await service.ask(1)) == [200]


async def test_a_line_waits_while_a_proxy_has_no_service_behind_it() -> None:
    """A service that is deployed anew has none for a while; lines failed for it."""
    nobody = "Path '/v1/chat/completions' not found. Ping http://.../-/routes for available routes."
    service = Scripted(*[(404, nobody)] * 20, (200, {}))
    assert statuses(await service.ask(1)) == [200]


async def test_a_line_waits_for_minutes_while_a_load_balancer_has_no_service_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lines failed for good within five seconds of a service's deployment."""
    page = "<html><h1>502 Bad Gateway</h1></html>"
    service = Scripted(*[(502, page), (504, page)] * 10, (200, {}))
    assert statuses(await service.ask(1)) == [200]
    monkeypatch.setattr(asker, "_GONE_S", 0.1)  # then it is this line, which takes the balancer too long
    assert statuses(await Scripted((504, page)).ask(1)) == [504]


async def test_what_a_line_names_and_nobody_has_fails_alone() -> None:
    service = Scripted((404, {"error": {"code": "response_not_found", "message": "no"}}))
    assert statuses(await service.ask(1)) == [404]


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (401, "invalid_api_key"),
        (403, "forbidden"),
        (429, "insufficient_quota"),
        (404, "model_not_found"),
    ],
)
async def test_a_key_that_is_refused_and_a_model_that_is_gone_stop_the_run_and_no_line_fails(
    status: int, code: str
) -> None:
    ok: tuple[int, dict[str, object]] = (200, {})
    service = Scripted(ok, ok, (status, {"error": {"code": code, "message": "Not with this key."}}))
    found = await service.ask(100)
    done = [row for row in found if row.result]
    assert {row.stop for row in found if row.stop} == {"Not with this key."}
    assert statuses(done) == [200] * len(done)
    assert service.asked <= 20


async def test_few_lines_are_refused_where_seats_are_few() -> None:
    service = Scripted((200, {}), seats=20)
    assert statuses(await service.ask(600)) == [200] * 600
    assert service.refused <= 200


async def test_while_all_are_refused_few_ask() -> None:
    service = Scripted((200, {}), seats=0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await service.ask(200)
    assert service.asked <= 110  # one in 10 ms, and those that came first


async def test_a_service_that_is_gone_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asker, "_GONE_S", 0.1)
    found = await asked(f"http://127.0.0.1:{free_port()}", [line("a"), line("b")])
    assert {"has not answered for 0 s" in row.stop for row in found} == {True}
