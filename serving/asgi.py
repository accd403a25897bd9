"""What every ASGI app here asks of its server."""

from starlette.types import Receive


async def disconnected(receive: Receive) -> None:
    """Wait until the client has gone; what it still sends is dropped."""
    while (await receive())["type"] != "http.disconnect":
        pass
