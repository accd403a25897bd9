from collections import Counter
from xml.etree import ElementTree as ET

import pytest
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from support.servers import asgi_server, free_address

from benchmarks import bare, plot, routers, tables
from benchmarks.__main__ import PAGE_OF, PAGES
from benchmarks.client import CHAT, Client, Load, Seen
from benchmarks.pages import put
from benchmarks.rounds import Contestant, Results, Round, compete, turns

pytestmark = pytest.mark.unit

BARE = Contestant("bare", ("http://127.0.0.1:1",), "llama")
OURS = Contestant("ours", ("http://127.0.0.1:2",), "llama", bare="bare")


def one(
    contestant: str, number: int, figure: float, *, load: str = "c=8", answers: int = 10, chunks: int = 100
) -> Round:
    times = dict.fromkeys(
        ("requests_per_s", "chunks_per_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms"), figure
    )
    front = {} if contestant == "bare" else {"router": figure / 1e4, "HAProxy": figure / 1e5}
    return Round(
        contestant,
        load,
        number,
        **times,
        answers=answers,
        chunks=chunks,
        front_cpu_s=front,
        other_cpu_s={"load client": 0.001},
        pss_bytes=dict.fromkeys(front, 2**20),
    )


def test_every_contestant_is_first_and_last_in_turn() -> None:
    sets = list(turns([BARE, OURS], 4))
    assert Counter(each[0].name for each in sets) == {"bare": 2, "ours": 2}
    assert all({contestant.name for contestant in each} == {"bare", "ours"} for each in sets)
    assert list(turns([], 2)) == [[], []]


def test_a_contestant_is_held_against_the_bare_round_of_the_same_set() -> None:
    results = Results([one("bare", 1, 10), one("ours", 1, 9), one("ours", 2, 24), one("bare", 2, 20)])
    rows = tables.times_table(results, [BARE, OURS], ["c=8"])
    assert rows[2].startswith("| c=8 | bare | 15 (10 to 20) |  | 15.0 (10.0 to 20.0) |")
    share, ttft, added = rows[3].split(" | ")[3:6]
    assert share == "1.05 (0.90 to 1.20)"
    assert ttft == "16.5 (9.0 to 24.0)"
    assert added == "1.5 (-1.0 to 4.0)"


def test_one_that_fails_is_out_of_that_load_and_the_reason_is_told() -> None:
    async def chat(_: object) -> Response:
        return StreamingResponse(iter([b'data: {"finish_reason": "length"}\n\n', b"data: [DONE]\n\n"]))

    results, said = Results(), []
    with asgi_server(Starlette(routes=[Route(CHAT, chat, methods=["POST"])])) as address, Client() as client:
        there = Contestant("there", (address,), "llama")
        gone = Contestant("gone", (free_address(),), "llama", bare="there")
        compete(client, [there, gone], {"c=2": Load(2, 1, 0.05)}, 2, dict, results, said.append)
    assert [(each.contestant, each.set) for each in results.rounds] == [("there", 1), ("there", 2)]
    assert all(each.answers and each.other_cpu_s["load client"] >= 0 for each in results.rounds)
    assert "takes no connection" in results.missing["gone, c=2"]
    assert tables.missing_lines(results)[0].startswith("- gone, c=2 was not measured: http://127.0.0.1:")
    assert len(said) == 2


def test_what_a_chunk_costs_is_told_apart_from_what_an_answer_costs() -> None:
    short = one("ours", 1, 10, load="1 token", answers=100, chunks=200)
    long = one("ours", 1, 50, load="c=8", answers=100, chunks=3400)
    assert tables.request_us(short) == pytest.approx(11)
    assert tables.request_us(short, "router") == pytest.approx(10)
    assert tables.chunk_us(long, short) == pytest.approx((55 - 11) / 32)
    rows = tables.cost_table(Results([short, long]), [BARE, OURS], "1 token", "c=8")
    assert rows[2].startswith("| ours | 11 (11 to 11) | 90,909 | 1 (1 to 1) | 2 |")
    assert rows[3].startswith("| of it HAProxy | 1 (1 to 1) |")


def test_cpu_is_spread_over_the_chunks_of_all_rounds() -> None:
    results = Results([one("bare", 1, 10), one("ours", 1, 10), one("ours", 2, 30)])
    rows = tables.cpu_table(results, [BARE, OURS], "c=8")
    assert rows[0] == "| CPU µs a chunk, c=8 | bare | ours |"
    assert "| router | 0 | 20 |" in rows
    assert "| load client | 10 | 10 |" in rows
    assert "| router |  | 1 |" not in (memory := tables.memory_table(results, [BARE, OURS]))
    assert "| router | 1 |" in memory


def test_the_report_on_routers_has_every_load_and_names_who_is_missing() -> None:
    size = routers.Size(1, 1.0, 1.0, concurrency=(1, 32))
    loads = [*routers.paced(size), *routers.flat_out(size)]
    chunks = {load: 100 if load.startswith("c=") else 20 for load in loads}
    rounds = [one(name, 1, 10, load=load, chunks=chunks[load]) for load in loads for name in ("bare", "ours")]
    results = Results(rounds, {"litellm 1.0": "pip failed"})
    report = routers.report(results, [BARE, OURS], Seen(events=1, cpu_s=1e-6), size)
    assert "| c=32 | ours |" in report
    assert "- litellm 1.0 was not measured: pip failed" in report
    titles = [panel.title for panel in routers.panels(results, [BARE, OURS], size)]
    assert titles == ["TTFT p50, ms", "CPU µs a streamed chunk", "CPU µs a 1-token answer"]
    assert plot.svg(routers.panels(results, [BARE, OURS], size)).count("<circle") == 4


def test_the_report_on_real_engines_says_who_is_missing() -> None:
    size = bare.Size(1, 1.0, concurrency=(32,))
    rounds = [one(name, 1, 10, load="c=32") for name in ("bare", "ours")]
    report = bare.report(Results(rounds, {"there": "no torch"}), [BARE, OURS], size)
    assert "| c=32 | ours |" in report
    assert "- there was not measured: no torch" in report
    assert "- there was not measured" in bare.report(Results([], {"there": "no torch"}), [], size)


def test_the_ceiling_of_the_client_is_told() -> None:
    seen = Seen(in_time=3000, events=4000, cpu_s=0.02)
    assert "takes 5.0 µs of CPU a chunk, so a core of it reads 200,000 chunks/s" in tables.ceiling_line(
        seen, 1.5
    )
    assert "2,000 chunks/s" in tables.ceiling_line(seen, 1.5)


def test_the_plot_shows_every_figure_of_every_contestant() -> None:
    lines = {"bare": [(1, 20.0), (128, 47.0)], "a & b": [(1, 22.0)]}
    drawn = plot.svg([plot.Lines("TTFT", lines), plot.Bars("CPU", {"a & b": 120.0})])
    titles = {node.text for node in ET.fromstring(drawn).iter() if node.tag.endswith("title")}  # noqa: S314  our own
    assert titles == {
        "bare, 1 clients: 20.0",
        "bare, 128 clients: 47.0",
        "a & b, 1 clients: 22.0",
        "a & b: 120",
    }


def test_a_report_replaces_the_one_before_it_and_nothing_else() -> None:
    text = "# A\n<!-- bench: b -->\nold\n<!-- /bench: b -->\nend\n"
    once = put(text, "b", "| new |\n")
    assert once == "# A\n<!-- bench: b -->\n\n| new |\n\n<!-- /bench: b -->\nend\n"
    assert put(once, "b", "| new |\n") == once
    with pytest.raises(ValueError, match="there is no <!-- bench: c -->"):
        put(text, "c", "")


def test_every_report_has_its_place_on_a_page() -> None:
    for name, page in PAGE_OF.items():
        text = (PAGES / page).read_text()
        report = text.partition(f"<!-- bench: {name} -->\n")[2].partition(f"<!-- /bench: {name} -->")[0]
        assert put(text, name, report) == text


def test_commands_are_shown_without_what_differs_from_run_to_run() -> None:
    command = [
        "smg",
        "launch",
        "--port",
        "20001",
        "--worker-urls",
        "http://127.0.0.1:1",
        "http://127.0.0.1:2",
    ]
    assert routers.shown(command) == "smg launch --port PORT --worker-urls ENGINES"
    assert routers.shown(["litellm", "--config", "folder/litellm.yaml"]) == "litellm --config ENGINES.yaml"
