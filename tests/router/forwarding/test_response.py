import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from serving.config import FailoverSpec
from serving.errors import SliceLostError
from serving.router.forwarding.response import Forwarding
from serving.router.http.downstream import OverAsgi
from serving.router.http.protocol import InferenceRequest
from serving.router.telemetry.record import RequestRecord

pytestmark = pytest.mark.unit


async def never(*_: Any) -> Any:
    await asyncio.Event().wait()


def relay(opened: Any) -> Any:
    sentinel = SimpleNamespace(samples=lambda _: False)
    return SimpleNamespace(failover=FailoverSpec(), tries=lambda: None, open=opened, sentinel=sentinel)


async def test_a_client_whose_leaving_serve_sees_first_counts_as_gone() -> None:
    """Serve then cancels the whole call; left to itself the record would say that we failed."""
    asked = InferenceRequest("m", "/v1/completions", b"{}", {})
    record = RequestRecord(asked.path)
    answering = asyncio.create_task(OverAsgi(Forwarding(relay(never), asked, record).run)({}, never, never))
    await asyncio.sleep(0)
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering
    assert (record.outcome, record.status) == ("cancelled", 499)


async def test_an_error_of_the_relay_is_answered_and_kept() -> None:
    sent = []

    async def lost(*_: Any) -> Any:
        raise SliceLostError("gone")

    async def send(message: Any) -> None:
        sent.append(message)

    asked = InferenceRequest("m", "/v1/completions", b"{}", {})
    record = RequestRecord(asked.path)
    await OverAsgi(Forwarding(relay(lost), asked, record).run)({"type": "http"}, never, send)
    assert sent[0]["status"] == 503
    assert record.outcome == "slice_lost"
