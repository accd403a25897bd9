import asyncio

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from support.servers import asgi_server, free_address

from serving.metrics.scrape import Scraper

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
