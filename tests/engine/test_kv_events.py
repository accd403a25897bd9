"""vLLM's own block pool and publisher, heard by a slice's replica. No engine is started."""

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq.asyncio

from serving.engine.kv_events import KvEvents

pytestmark = pytest.mark.engine

BLOCK_TOKENS = 4
BLOCKS = 9  # one of them stays empty


class Cache:
    """What of EngineCore makes the events."""

    def __init__(self, config: dict[str, object]) -> None:
        import torch
        from vllm.config.kv_events import KVEventsConfig
        from vllm.distributed.kv_events import EventPublisherFactory
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        init_none_hash(sha256)
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self._manager = KVCacheManager(
            KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)]),
            max_model_len=1024,
            scheduler_block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            enable_kv_cache_events=True,
        )
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.publisher = EventPublisherFactory.create(KVEventsConfig(**config))  # type: ignore[arg-type]  # a dict of options

    def read(self, prompt: list[int]) -> int:
        """As a step of the scheduler reads a prompt, and its request ends; the tokens that were cached."""
        from vllm.distributed.kv_events import KVEventBatch
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        request = Request(
            str(time.monotonic_ns()), prompt, SamplingParams(max_tokens=1), None, block_hasher=self._hasher
        )
        found, cached, *_ = self._manager.get_computed_blocks(request)
        assert self._manager.allocate_slots(request, len(prompt) - cached, cached, found)
        self._manager.free(request)
        if events := self._manager.take_events():
            self.publisher.publish(KVEventBatch(time.time(), events))
        return int(cached)

    def clear(self) -> None:
        from vllm.distributed.kv_events import KVEventBatch

        assert self._manager.reset_prefix_cache()
        self.publisher.publish(KVEventBatch(time.time(), self._manager.take_events()))


def prompt(number: int) -> list[int]:
    """Two full blocks and a half."""
    return [100 * number + place for place in range(10)]


def places(folder: Path) -> list[Path]:
    """Where replica and engine are to meet."""
    return list(folder.glob("kv-events-*"))


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110  vLLM's publisher is a thread without an event
            await asyncio.sleep(0.01)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Any:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a socket's path has a hundred letters at most
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


async def test_the_replica_hears_what_the_engine_s_cache_drops(folder: Path) -> None:
    events = KvEvents()
    (meeting,) = places(folder)
    assert meeting.stat().st_mode & 0o777 == 0o700
    cache = Cache(events.config)
    await events.follow()
    events.close()
    assert not places(folder)

    for number in range(3):
        cache.read(prompt(number))
    assert cache.read(prompt(0)) == 8
    await until(lambda: len(events._age._stored_s) == 6)
    assert events.age_s(time.monotonic()) == 0
    stored_s = events._age._stored_s.copy()
    cache.read(prompt(3))
    cache.read(prompt(4))
    await until(lambda: events._age._dropped_s)
    assert set(stored_s) - set(events._age._stored_s)
    assert events._age._dropped_s == max(
        stored_s[block] for block in stored_s.keys() - events._age._stored_s.keys()
    )

    cleared_s = time.monotonic()
    cache.clear()
    await until(lambda: events._age._dropped_s >= cleared_s)
    cache.publisher.shutdown()
    await events.end()


STORED = b"\x82\xa4type\xabBlockStored\xacblock_hashes"


@pytest.mark.parametrize(
    "strange",
    [
        b"",
        msgspec.msgpack.encode([0.0, [{"type": "BlockStored", "block_hashes": [[1]]}]]),
        msgspec.msgpack.encode([0.0, [{"type": "BlockRemoved", "block_hashes": [{}]}]]),
        b"\x92\x00\x91" + STORED + b"\xdd\xff\xff\xff\xff",
        b"\x92\x00\x91" + STORED + b"\x91" * 100_000,
        b"\x93\x00\x90" + b"\x91" * 100_000,
        b"\x92\x00\x91\x81\xa4type\xa1\xff",
    ],
    ids=[
        "empty",
        "a list as hash",
        "an object as hash",
        "a lying length",
        "deep",
        "deep elsewhere",
        "no UTF-8",
    ],
)
async def test_the_replica_reads_on_behind_what_it_can_t_read(folder: Path, strange: bytes) -> None:
    events = KvEvents()
    with zmq.asyncio.Context.instance().socket(zmq.XPUB) as engine:
        engine.bind(str(events.config["endpoint"]))
        await events.follow()
        events.close()
        await engine.recv()  # the subscription: what is sent before it is lost
        good = msgspec.msgpack.encode([0.0, [{"type": "BlockStored", "block_hashes": [1, b"2"]}]])
        for batch in (strange, good):
            await engine.send_multipart([b"", b"", batch])
        await until(lambda: len(events._age._stored_s) == 2)
        await events.end()
    assert not places(folder)


async def test_an_engine_that_does_not_come_is_not_waited_for_for_ever(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events = KvEvents()
    await events.follow(within_s=0.05)
    events.close()
    assert "does not tell what its prefix cache drops" in caplog.text
    assert not places(folder)
    assert events.age_s(time.monotonic()) == 0
