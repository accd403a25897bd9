"""Usage and budgets as clients see them: routers, the database's owner and a simulated engine, by OpenAI's own client."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from support.batches import filling_router, folder, line, owner
from support.servers import asgi_server, until
from support.simulated_engine import MODEL, serving

from serving.batches import desk
from serving.errors import ConfigError
from serving.router.http.auth import KeyFile, new

pytestmark = pytest.mark.http
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def upstream() -> Iterator[str]:
    with serving() as (address, _):
        yield address


def client(address: str, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)


def ask(address: str, key: str, **fields: Any) -> Any:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, **fields}
    return httpx.post(f"{address}{CHAT}", json=body, headers={"authorization": f"Bearer {key}"})


def usage(address: str, key: str, query: str = "") -> Any:
    answer = httpx.get(f"{address}/v1/usage{query}", headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    return answer.json()


def requests(address: str, key: str) -> int:
    return sum(row["requests"] for row in usage(address, key)["data"])


def key_file(path: Path, *limits: dict[str, float]) -> tuple[KeyFile, list[str]]:
    made = [new(f"key-{at}", **of) for at, of in enumerate(limits)]
    path.write_text("\n".join(entry for _, entry in made))
    return KeyFile(path), [key for key, _ in made]


def test_a_key_sees_what_it_has_used_and_no_other_keys(tmp_path: Path, upstream: str) -> None:
    keys, (first, second) = key_file(tmp_path / "keys.yaml", {}, {})
    with (
        owner(folder(tmp_path)) as keeper,
        filling_router(keeper.place, upstream, keys=keys) as (address, core),
    ):
        answer = ask(address, first).json()
        list(
            client(address, first).chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "hello"}],
                max_tokens=4,
                stream=True,
            )
        )
        ask(address, second)
        until(lambda: requests(address, first) == 2, "both are in the store")
        (row,) = usage(address, first)["data"]
        assert (row["model"], row["pool"], row["object"]) == (MODEL, core.plans[0].pool, "usage")
        assert row["prompt_tokens"] == 2 * answer["usage"]["prompt_tokens"]
        assert row["output_tokens"] == 2 * answer["usage"]["completion_tokens"] == 8
        assert row["slice_seconds"] > 0
        # A v6e 2x4 of the table's prices, on demand: 8 chips.
        assert row["dollars"] == pytest.approx(row["slice_seconds"] * 8 * 2.7 / 3600)
        assert usage(address, first)["budgets"] == {}
        until(lambda: requests(address, second) == 1, "the other's is in the store")


@pytest.mark.parametrize("path", ["/v1/chat/completions/derender", CHAT])
def test_no_key_keeps_another_s_usage_from_the_store(tmp_path: Path, path: str) -> None:
    """A derender's usage is its client's own: more digits than a row takes made each flush of its router fail from then on."""

    async def boast(_: Request) -> JSONResponse:
        return JSONResponse({"choices": [], "usage": {"prompt_tokens": 10**30, "completion_tokens": 10**30}})

    keys, (evil, good) = key_file(tmp_path / "keys.yaml", {}, {})
    with (
        owner(folder(tmp_path)) as keeper,
        asgi_server(Starlette(routes=[Route("/{path:path}", boast, methods=["POST"])])) as upstream,
        filling_router(keeper.place, upstream, keys=keys) as (address, _),
    ):
        body = {"model": MODEL, "messages": [], "generate_response": {}, "prompt_tokens": 10**30}
        shown = {"authorization": f"Bearer {evil}"}
        assert httpx.post(address + path, json=body, headers=shown).status_code == 200
        ask(address, good)
        until(lambda: requests(address, good) == 1, "it is in the store")
        assert usage(address, evil)["data"][0]["prompt_tokens"] < 100


def test_days_that_are_asked_for(tmp_path: Path, upstream: str) -> None:
    keys, (key,) = key_file(tmp_path / "keys.yaml", {})
    with (
        owner(folder(tmp_path)) as keeper,
        filling_router(keeper.place, upstream, keys=keys) as (address, _),
    ):
        ask(address, key)
        until(lambda: requests(address, key) == 1, "it is in the store")
        assert usage(address, key, "?start=2026-01-01&end=2026-01-31")["data"] == []
        for query, says in (
            ("start=yesterday", "start has to be a day"),
            ("end=2026-13-01", "end has to be a day"),
            ("start=2026-02-01&end=2026-01-01", "start has to come first"),
            ("start=2024-01-01&end=2026-01-01", "366 days"),
            ("from=2026-01-01", "'from' is neither"),  # it was this month's
        ):
            answer = httpx.get(f"{address}/v1/usage?{query}", headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 400
            assert says in answer.json()["error"]["message"]
        assert httpx.get(f"{address}/v1/usage").status_code == 401
        assert (
            httpx.post(f"{address}/v1/usage", headers={"authorization": f"Bearer {key}"}).headers["allow"]
            == "GET"
        )


def test_a_budget_that_is_used_up_is_a_429_that_says_when_it_is_new(tmp_path: Path, upstream: str) -> None:
    keys, (key, other) = key_file(tmp_path / "keys.yaml", {"tokens_per_day": 60}, {})
    with (
        owner(folder(tmp_path)) as keeper,
        filling_router(keeper.place, upstream, keys=keys) as (address, _),
    ):
        while (answer := ask(address, key)).status_code == 200:
            pass
        error = answer.json()["error"]
        assert answer.status_code == 429
        assert (error["code"], error["type"]) == ("insufficient_quota", "insufficient_quota")
        assert "of its 60 tokens a day (tokens_per_day); the budget is new at 20" in error["message"]
        assert 0 < int(answer.headers["retry-after"]) <= 86400
        with pytest.raises(openai.RateLimitError, match="tokens a day"):
            client(address, key).completions.create(model=MODEL, prompt="hello")
        state = usage(address, key)["budgets"]["tokens_per_day"]
        assert state["budget"] == 60
        assert 60 <= state["used"] <= 60 + 50
        assert ask(address, other).status_code == 200
        anthropic = httpx.post(
            f"{address}/v1/messages",
            json={"model": MODEL, "messages": [], "max_tokens": 1},
            headers={"x-api-key": key},
        )
        assert anthropic.status_code == 429
        assert anthropic.json()["error"]["type"] == "rate_limit_error"


def test_a_burst_of_long_answers_after_short_ones_passes_a_budget_by_one_request(tmp_path: Path) -> None:
    """Nothing in a request says how long its answer becomes, and a key's answers of late say little of the next ones."""
    most, length, burst = 4000, 1000, 20
    all_are_there = threading.Event()

    async def answer(request: Request) -> JSONResponse:
        tokens = (await request.json())["max_tokens"] or length
        if tokens == length:
            await asyncio.to_thread(all_are_there.wait, 60)
        used = {"prompt_tokens": 10, "completion_tokens": tokens, "total_tokens": 10 + tokens}
        return JSONResponse({"choices": [], "usage": used})

    keys, (key,) = key_file(tmp_path / "keys.yaml", {"tokens_per_day": most})
    with (
        owner(folder(tmp_path)) as keeper,
        asgi_server(Starlette(routes=[Route("/{path:path}", answer, methods=["POST"])])) as upstream,
        filling_router(keeper.place, upstream, keys=keys) as (address, core),
    ):
        passed = most // core.plans[0].fit.max_model_len + 1
        assert ask(address, key, max_tokens=1).status_code == 200
        with ThreadPoolExecutor(burst) as pool:
            asked = [pool.submit(ask, address, key, max_tokens=None) for _ in range(burst)]
            try:
                until(
                    lambda: sum(request.done() for request in asked) >= burst - passed, "others are refused"
                )
            finally:
                all_are_there.set()
        answers = [request.result() for request in asked]
        assert [answer.status_code for answer in answers].count(200) == passed
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert "set max_tokens" in refused.json()["error"]["message"]


def test_dollars_of_a_month_are_a_budget_too(tmp_path: Path, upstream: str) -> None:
    keys, (key,) = key_file(tmp_path / "keys.yaml", {"dollars_per_month": 1e-9})
    with (
        owner(folder(tmp_path)) as keeper,
        filling_router(keeper.place, upstream, keys=keys) as (address, _),
    ):
        assert ask(address, key).status_code == 200
        answer = ask(address, key)
        assert answer.status_code == 429
        assert "a month (dollars_per_month); the budget is new at" in answer.json()["error"]["message"]


def test_a_budget_holds_over_routers_and_over_their_restarts(tmp_path: Path, upstream: str) -> None:
    """One that is used up within seconds, by short requests: it holds but for what is used between two flushes."""
    most = 900
    keys, (key,) = key_file(tmp_path / "keys.yaml", {"tokens_per_day": most})

    def ask_briefly(address: str) -> Any:
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 4}
        return httpx.post(
            f"{address}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}
        ).json()

    with owner(folder(tmp_path)) as keeper:
        with (
            filling_router(keeper.place, upstream, name="one", keys=keys, flush_s=0.05) as (first, _),
            filling_router(
                keeper.place, upstream, name="two", keys=KeyFile(tmp_path / "keys.yaml"), flush_s=0.05
            ) as (
                second,
                _,
            ),
        ):
            over: set[str] = set()
            answered = 0
            while len(over) < 2:
                for address in (first, second, second):
                    answer = ask_briefly(address)
                    answered += "usage" in answer
                    if "error" in answer and answer["error"]["code"] == "insufficient_quota":
                        over.add(address)
                # However slow its disk is: both routers have told the store, which tells them.
                until(lambda: requests(first, key) == answered, "all is told")  # noqa: B023
        with filling_router(keeper.place, upstream, keys=KeyFile(tmp_path / "keys.yaml")) as (third, _):
            assert ask_briefly(third)["error"]["code"] == "insufficient_quota"
            rows = usage(third, key)["data"]
    assert sum(row["requests"] for row in rows) == answered
    used = sum(row["prompt_tokens"] + row["output_tokens"] for row in rows)
    assert most <= used <= 1.1 * most


def test_usage_waits_in_the_router_while_the_store_is_away(tmp_path: Path, upstream: str) -> None:
    keys, (key,) = key_file(tmp_path / "keys.yaml", {"tokens_per_day": 10**6})
    places: list[tuple[str, str]] = []

    def place() -> tuple[str, str]:
        if not places:
            raise ConnectionError("the store is gone")
        return places[-1]

    with filling_router(place, upstream, keys=keys, graceful=False) as (address, _):
        for _ in range(3):
            assert ask(address, key).status_code == 200
        away = httpx.get(f"{address}/v1/usage", headers={"authorization": f"Bearer {key}"})
        assert away.status_code == 503
        with owner(folder(tmp_path)) as keeper:
            places.append(keeper.place())
            until(lambda: requests(address, key) == 3, "what was used meanwhile is told")
            assert ask(address, key).status_code == 200
            until(lambda: requests(address, key) == 4, "and what came since")


def test_lines_of_batches_count_and_wait_while_their_key_is_over_its_budget(
    tmp_path: Path, upstream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk, "_LONGEST_WAIT_S", 0.2)
    file = tmp_path / "keys.yaml"
    keys, (key,) = key_file(file, {"tokens_per_day": 200})
    with (
        owner(folder(tmp_path)) as keeper,
        filling_router(keeper.place, upstream, keys=keys) as (address, _),
    ):
        api = client(address, key)
        text = "\n".join(line(f"r{at}") for at in range(60)).encode()
        name = api.files.create(file=("in.jsonl", text), purpose="batch").id
        made = api.batches.create(input_file_id=name, endpoint=CHAT, completion_window="24h")

        def used() -> float:
            return float(usage(address, key)["budgets"]["tokens_per_day"]["used"])

        until(lambda: used() >= 200, "the budget is used up")
        time.sleep(1)  # lines that are asked all the same would fail
        counts = api.batches.retrieve(made.id).request_counts
        assert counts
        assert counts.completed < 60
        assert counts.failed == 0
        file.write_text(file.read_text().replace("tokens_per_day: 200", "tokens_per_day: 1000000"))
        until(lambda: api.batches.retrieve(made.id).status == "completed", "the batch is over")
        counts = api.batches.retrieve(made.id).request_counts
        assert counts
        assert (counts.completed, counts.failed) == (60, 0)
        until(lambda: requests(address, key) == 60, "each is counted once")


def test_without_a_store_there_is_no_usage_and_there_are_no_budgets(tmp_path: Path, upstream: str) -> None:
    with filling_router(None, upstream) as (address, _):
        answer = httpx.get(f"{address}/v1/usage")
        assert (answer.status_code, answer.json()["error"]["code"]) == (501, "no_store")
    path = tmp_path / "keys.yaml"
    _, line_ = new("limited", dollars_per_month=5)
    path.write_text(line_)
    with pytest.raises(ConfigError, match=r"'limited' has a budget, and nothing adds up.*set `store`"):
        KeyFile(path, adds_up=False)


def test_a_request_waits_for_the_store_where_its_router_knows_nothing_of_its_budget(
    tmp_path: Path, upstream: str
) -> None:
    """A budget that comes while the service runs counts what was used before, from its first request on."""
    file = tmp_path / "keys.yaml"
    keys, (key,) = key_file(file, {})
    with (
        owner(folder(tmp_path)) as keeper,
        filling_router(keeper.place, upstream, keys=keys, flush_s=1000) as (address, _),
    ):
        assert ask(address, key).status_code == 200
        file.write_text(file.read_text().replace("}", ", tokens_per_day: 10}"))
        until(lambda: usage(address, key)["budgets"], "the budget is in force")
        answer = ask(address, key)
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "insufficient_quota"
