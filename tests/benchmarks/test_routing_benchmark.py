import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from support.servers import asgi_server

from benchmarks.routing import simulated
from benchmarks.routing.load import CHAT, LOADS, Seen, play
from benchmarks.routing.picture import svg
from benchmarks.routing.policies import MODEL, OURS, POLICIES, Policy
from benchmarks.routing.processes import entry

pytestmark = pytest.mark.http

ASKED: list[dict[str, Any]] = []


async def words() -> AsyncIterator[bytes]:
    for word in ("one", " two"):
        await asyncio.sleep(0.025)  # uvloop's sleep may be a millisecond shorter
        yield b"data: " + json.dumps({"choices": [{"delta": {"content": word}}]}).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


async def chat(request: Request) -> Response:
    ASKED.append(await request.json())
    refused = len(ASKED[-1]["messages"]) > 3
    return JSONResponse({}, 503) if refused else StreamingResponse(words())


async def metrics(_: Request) -> Response:
    lines = [
        f"vllm:prefix_cache_queries_total {100 * len(ASKED)}",
        f"vllm:prefix_cache_hits_total {25 * len(ASKED)}",
    ]
    names = ("prefix_cache_queries", "prefix_cache_hits")
    return Response(
        "".join(f"# TYPE vllm:{name} counter\n{line}\n" for name, line in zip(names, lines, strict=True))
    )


def test_conversations_grow_and_refusals_hits_and_times_are_counted() -> None:
    ASKED.clear()
    app = Starlette(routes=[Route(CHAT, chat, methods=["POST"]), Route("/metrics", metrics)])
    load = replace(LOADS[0], per_s=20, turns=(3, 3), asked=(5, 9), answered=(2, 2), think_s=0.001)
    with asgi_server(app) as address:
        seen = asyncio.run(play(Policy("round robin"), [address], [address], load, 0.3))
    assert seen.refused > 0  # the third turn of each, with which it ends
    assert seen.requests == 3 * seen.refused
    assert len(seen.first_s) == seen.good == 2 * seen.refused
    assert all(first_s >= 0.02 for first_s in seen.first_s)
    assert seen.cached_tokens / seen.prompt_tokens == 0.25
    second = next(asked["messages"] for asked in ASKED if len(asked["messages"]) == 3)
    assert second[1] == {"role": "assistant", "content": "one two"}


def test_every_router_gets_the_same_conversations_with_a_first_word_of_its_own() -> None:
    app = Starlette(routes=[Route(CHAT, chat, methods=["POST"]), Route("/metrics", metrics)])
    load = replace(LOADS[2], per_s=30, asked=(5, 9), answered=(2, 2))
    said = []
    with asgi_server(app) as address:
        for policy in POLICIES[:2]:
            ASKED.clear()
            asyncio.run(play(policy, [address], [address], load, 0.2))
            said.append(sorted(asked["messages"][0]["content"].split(": ") for asked in ASKED))
    first, second = said
    assert first
    assert [rest for _, rest in first] == [rest for _, rest in second]
    assert not {own for own, _ in first} & {own for own, _ in second}


def test_the_plot_and_the_table_show_every_policy_under_every_load() -> None:
    rows = [
        Seen(policy.name, load.name, 1, requests=10, good=9, refused=1, first_s=[0.1, 0.2, 0.3])
        for load in LOADS
        for policy in POLICIES
    ]
    drawn = svg(rows)
    for row in rows:
        assert f">{row.policy}</text>" in drawn
        assert row.row().endswith("| 90.0% | 1 of 10 |")
    assert drawn.count("<rect") == 1 + 2 * len(rows)


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if not policy.peer])
def test_our_policies_choose_what_they_are_named_for(policy: Policy) -> None:
    table = policy.table(MODEL)
    figures = dict.fromkeys(
        (
            "num_requests_running",
            "num_requests_waiting",
            "kv_cache_usage_perc",
            "prompt_tokens_total",
            "prefix_cache_hits_total",
            "generation_tokens_total",
            "cache_age_s",
        ),
        0.0,
    )
    table.update([entry(name, figures, 1) for name in "ab"], 0.0)
    chosen = []
    for _ in range(6):
        chosen.append(table.choose(MODEL).replica)
        table.begin(chosen[-1])
    assert chosen.count("a") == 3, OURS


def test_in_simulated_time_routers_that_share_find_more_than_those_that_do_not() -> None:
    found = simulated.plan(simulated.ModelSpec.model_validate(simulated._SPEC))
    load = replace(next(load for load in simulated.LOADS if load.adapters), per_s=10.0)
    one, three, apart = (
        simulated.play(found, load, routers, 8.0, 1, shares=shares)
        for routers, shares in ((1, False), (3, True), (3, False))
    )
    assert len(one.rows) == len(three.rows) == len(apart.rows) > 50
    assert three.hits > 0.95 * one.hits
    assert three.hits > apart.hits
    assert simulated.row("load", "who", three).count("|") == simulated.HEAD.splitlines()[0].count("|")
