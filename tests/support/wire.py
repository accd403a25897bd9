"""A connection of asyncio's without a client."""

import asyncio
from typing import Any


class Wire(asyncio.Transport):
    """A transport to nowhere, which keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.closed = False
        self.paused = False

    def write(self, data: Any) -> None:
        self.sent += data

    def writelines(self, list_of_data: Any) -> None:
        self.sent += b"".join(list_of_data)

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False
