import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from support.servers import asgi_server, free_address

from serving.http_server import HttpServer
from serving.metrics.scrape import Scraper
from serving.pinned_tls import identity
from serving.state.records import SliceRecord, SliceState

pytestmark = pytest.mark.http


async def test_what_an_agent_says_is_shown_under_its_nodes_address() -> None:
    async def agent(_: Request) -> PlainTextResponse:
        return PlainTextResponse(
            'ray_tpu_serving_retries_total{WorkerId="a",application="blue",model="llama"} 2.0\n'
        )

    with asgi_server(Starlette(routes=[Route("/metrics", agent)])) as address:

        async def addresses() -> list[str]:
            return [free_address(), address]

        scraper = Scraper("blue", addresses, list)
        page = await scraper.page()
        await scraper.close()
    assert 'tpu_serving_retries_total{application="blue",model="llama",node="127.0.0.1"} 2.0\n' in page
    assert 'tpu_serving_scrape_sources_unreachable{application="blue"} 1\n' in page


@pytest.mark.parametrize("tls", [False, True])
async def test_engines_are_read_by_the_certificate_of_their_record_alone(*, tls: bool) -> None:
    async def engine(_: Request) -> PlainTextResponse:
        return PlainTextResponse("# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 3.0\n")

    server = HttpServer(Starlette(routes=[Route("/metrics", engine)]), "127.0.0.1", tls=tls)
    server.start()
    record = SliceRecord(
        "a", "llama", SliceState.SERVING, "", "v6e 2x4", slice="slice-0", **server.peer._asdict()
    )
    impostor = replace(record, slice="slice-x", certificate=identity("x").certificate)

    async def agents() -> list[str]:
        return []

    scraper = Scraper("blue", agents, lambda: [record, impostor] if tls else [record])
    page = await scraper.page()
    await scraper.close()
    server.uvicorn.should_exit = True
    await server.ended()
    assert 'slice="slice-0"' in page
    assert 'slice="slice-x"' not in page
    assert f'tpu_serving_scrape_sources_unreachable{{application="blue"}} {int(tls)}\n' in page


async def test_a_source_that_gives_nonsense_does_not_take_the_page_of_the_others() -> None:
    async def sound(_: Request) -> PlainTextResponse:
        return PlainTextResponse("# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 3.0\n")

    async def damaged(_: Request) -> Response:
        return Response(
            b"# TYPE vllm:x gauge\nvllm:x \xff\xfe\n# TYPE\n", media_type="text/plain; charset=utf-8"
        )

    async def agent(_: Request) -> PlainTextResponse:
        return PlainTextResponse('ray_tpu_serving_retries_total{application="blue",model="llama"} none\n')

    def app(answer: Callable[[Request], Awaitable[Response]]) -> Starlette:
        return Starlette(routes=[Route("/metrics", answer)])

    with asgi_server(app(sound)) as good, asgi_server(app(damaged)) as bad, asgi_server(app(agent)) as other:
        records = [
            SliceRecord(
                name, "llama", SliceState.SERVING, "", "v6e 2x4", slice=name, address=where, certificate=shown
            )
            for name, where, shown in (("0", good, ""), ("1", bad, ""), ("2", good, "no certificate"))
        ]

        async def agents() -> list[str]:
            return [other]

        scraper = Scraper("blue", agents, lambda: records)
        page = await scraper.page()
        await scraper.close()
    assert 'slice="0",pool=""} 3.0\n' in page
    assert 'tpu_serving_scrape_sources_unreachable{application="blue"} 2\n' in page


async def test_however_many_ask_the_sources_are_asked_once_a_second() -> None:
    asked, now_s = [], 0.0

    async def agents() -> list[str]:
        asked.append(now_s)
        return []

    scraper = Scraper("blue", agents, list, clock=lambda: now_s)
    await asyncio.gather(*(scraper.page() for _ in range(50)))
    now_s = 0.9
    await scraper.page()
    assert asked == [0.0]
    now_s = 1.0
    await asyncio.gather(*(scraper.page() for _ in range(50)))
    assert asked == [0.0, 1.0]
    await scraper.close()


async def test_one_who_hangs_up_does_not_take_the_page_from_the_others() -> None:
    goes_on = asyncio.Event()

    async def agents() -> list[str]:
        await goes_on.wait()
        return []

    scraper = Scraper("blue", agents, list)
    impatient, patient = asyncio.create_task(scraper.page()), asyncio.create_task(scraper.page())
    await asyncio.sleep(0)
    impatient.cancel()
    await asyncio.gather(impatient, return_exceptions=True)
    goes_on.set()
    assert 'tpu_serving_scrape_sources_unreachable{application="blue"} 0\n' in await patient
    await scraper.close()
