import asyncio

import pytest
from support.servers import PATIENCE_S

from serving.errors import StoreAwayError
from serving.router.http.kept_files import KeptFiles

pytestmark = pytest.mark.unit


async def find_for_ever() -> tuple[str, str]:
    """As a handle of Serve, which raises an error of its own where it is cancelled."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        raise RuntimeError("request cancelled") from None
    raise AssertionError


async def test_who_is_cancelled_while_it_looks_for_the_store_ends() -> None:
    """A loop that took the error for a store that is away went on, and its router never ended."""
    kept = KeptFiles(find_for_ever)
    asking = asyncio.create_task(kept.call("/lines/take", {}))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await kept.close()


async def test_a_question_has_its_time_also_to_find_the_store() -> None:
    kept = KeptFiles(find_for_ever)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await kept.call("/usage/flush", {})
    await kept.close()


async def test_a_store_that_can_t_be_found_is_away() -> None:
    async def find() -> tuple[str, str]:
        raise RuntimeError("no replica")

    kept = KeptFiles(find)
    with pytest.raises(StoreAwayError):
        await kept.call("/lines/take", {})
    await kept.close()


async def test_a_store_that_nobody_finds_is_away_after_a_while() -> None:
    """Serve waits for ever for a process that has ended with its application."""
    kept = KeptFiles(find_for_ever, find_s=0.01)
    with pytest.raises(StoreAwayError):
        await kept.call("/lines/take", {})
    await kept.close()


async def test_a_store_whose_host_is_gone_is_away_within_its_time() -> None:
    """Nothing closes its connections: routers waited for five minutes, and batches with them."""

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1")
    host, port = server.sockets[0].getsockname()

    async def find() -> tuple[str, str]:
        return f"http://{host}:{port}", "token"

    kept = KeptFiles(find, answer_s=0.05)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(StoreAwayError):
            await kept.call("/lines/take", {})
    await kept.close()
    server.close()
    await server.wait_closed()
