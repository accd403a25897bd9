"""What every ASGI app here asks of its server."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from python_multipart.multipart import parse_options_header
from starlette.types import Receive

from serving.errors import BadRequestError

_CHARSETS = (b"utf-8", b"utf8", b"us-ascii", b"ascii")


def check_form(content_type: str) -> None:
    """Refuse a form in other charsets: Starlette takes whichever Python has, and punycode's megabyte takes a minute."""
    _, options = parse_options_header(content_type)
    if options.get(b"charset", _CHARSETS[0]).lower() not in _CHARSETS:
        raise BadRequestError("The form names a charset that is not UTF-8; send it in UTF-8.")


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
