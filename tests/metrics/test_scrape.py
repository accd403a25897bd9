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
        return PlainTextResponse('ray_tpu_serving_retries_total{WorkerId="a",model="llama"} 2.0\n')

    with asgi_server(Starlette(routes=[Route("/metrics", agent)])) as address:

        async def addresses() -> list[str]:
            return [free_address(), address]

        scraper = Scraper(addresses, list)
        page = await scraper.page()
        await scraper.close()
    assert 'tpu_serving_retries_total{model="llama",node="127.0.0.1"} 2.0\n' in page
    assert "tpu_serving_scrape_sources_unreachable 1\n" in page
