"""The door to vLLM's KV cache events: how old the content is that an engine's prefix cache still has.

EngineCore publishes which blocks it stored and dropped, and their tokens. Nobody but its replica hears that: they meet at a
socket in a folder that is the replica's alone, and is gone as soon as they have. Only hashes of blocks are decoded, never tokens.
"""

import asyncio
import logging
import shutil
import tempfile
import time
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from serving.engine.cache_age import CacheAge

logger = logging.getLogger("ray.serve")

_MEET_S = 10.0  # EngineCore has opened its socket before it says that it is ready


class BlockStored(msgspec.Struct, tag=True):
    """What is read of vLLM's event of this name."""

    block_hashes: list[bytes | int]
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    """What is read of vLLM's event of this name."""

    block_hashes: list[bytes | int]
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """vLLM's event of this name."""


class Batch(msgspec.Struct, array_like=True):
    """The events of one step of EngineCore."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


_decoder = msgspec.msgpack.Decoder(Batch)


class KvEvents:
    """One engine's events. Lives in the replica's event loop, once `follow` was called."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="kv-events-"))
        self._endpoint = f"ipc://{self._folder}/socket"
        self._age = CacheAge()
        self._reading: asyncio.Task[None] | None = None

    @property
    def config(self) -> dict[str, object]:
        """vLLM's `kv_events_config`."""
        return {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self._endpoint}

    def age_s(self, now_s: float) -> float:
        return self._age.age_s(now_s)

    def close(self) -> None:
        """Remove the place where both meet, once they have or a start failed."""
        shutil.rmtree(self._folder, ignore_errors=True)

    async def end(self) -> None:
        """Read no more."""
        if self._reading:
            self._reading.cancel()
            await asyncio.wait([self._reading])

    async def follow(self, within_s: float = _MEET_S) -> None:
        """Meet an EngineCore that is up, and read on. Where it does not come, routers are told of no dropped block."""
        socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        socket.subscribe(b"")
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        socket.connect(self._endpoint)
        try:
            async with asyncio.timeout(within_s):
                await recv_monitor_message(monitor)
        except TimeoutError:
            logger.warning("the engine does not tell what its prefix cache drops: %s", self._endpoint)
            socket.close(linger=0)
            return
        socket.disable_monitor()
        self._reading = asyncio.create_task(self._read(socket))

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        try:
            while True:
                *_, raw = await socket.recv_multipart()
                try:
                    self.take(raw, time.monotonic())
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    logger.warning("an event of the engine's prefix cache can't be read: %s", error)
        finally:
            socket.close(linger=0)

    def take(self, raw: bytes, now_s: float) -> None:
        """Take over one batch as vLLM publishes it.

        Raises msgspec.DecodeError, UnicodeDecodeError for a text that is no UTF-8, RecursionError where it is nested too deeply.
        """
        for event in _decoder.decode(raw).events:
            match event:
                case BlockStored():
                    self._age.stored(_named(event), now_s)
                case BlockRemoved():
                    self._age.removed(_named(event))
                case AllBlocksCleared():
                    self._age.cleared(now_s)


def _named(event: BlockStored | BlockRemoved) -> list[tuple[int | None, bytes | int]]:
    return [(event.group_idx, block) for block in event.block_hashes]
