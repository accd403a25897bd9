"""How a replica finds its engine silent; the engine is a stand-in."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from serving.engine.replica import SliceReplica
from serving.engine.server import Load

pytestmark = pytest.mark.unit


class HungEngine:
    """Answers no probe, and the control store is away."""

    load = Load()

    async def probe(self) -> None:
        await asyncio.Event().wait()

    def compiling_s(self) -> float | None:
        raise ConnectionError("the head restarts")


async def test_a_hung_engine_is_found_silent_though_the_control_store_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def no_sleep(_: float) -> None:
        return

    async def report(*_: Any) -> str:
        return "no report"

    # No replica, whose `__del__` Serve awaits and Python does not.
    made: Any = SimpleNamespace(_spec=SimpleNamespace(stall_s=0.02), _server=HungEngine(), _report=report)
    monkeypatch.setattr(asyncio, "sleep", no_sleep)
    assert (await SliceReplica._engine_is_silent(made)).startswith(
        "the engine or one of its workers has not answered"
    )
