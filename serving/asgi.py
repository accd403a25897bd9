"""What every ASGI app here asks of its server."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive


async def disconnected(receive: Receive) -> None:
    """Wait until the client has gone; what it still sends is dropped."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(work: Coroutine[Any, Any, None], receive: Receive) -> bool:
    """Run it to its end, raising what it raises, or until the client has gone: then it is cancelled, and this is false."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return False
        working.result()
        return True
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)
