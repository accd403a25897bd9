import asyncio
import json
import threading
from pathlib import Path

import httpx
import pytest
from support.fronts import router_before
from support.servers import SSE_HEAD, RawServers, chunk
from support.simulated_engine import MODEL, small_plan

from serving.config import RouterSpec
from serving.router.telemetry.request_log import RequestLog
from serving.state.records import SliceRecord, SliceState

pytestmark = pytest.mark.http

ROLE = b'data: {"id":"x","choices":[{"index":0,"delta":{"role":"assistant"}}]}\n\n'
BROKEN = b'data: {"id":"x","choices":["of no engine"]}\n\n'


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/chat%2Fcompletions"], ids=["door", "asgi"])
@pytest.mark.parametrize("begun", [False, True])
def test_an_answer_that_the_router_itself_fails_on_did_not_go_well(
    path: str, begun: bool, tmp_path: Path
) -> None:
    """Its engine had answered 200, so that log and metrics said that all was well."""
    read = threading.Event()

    async def engine(_: bytes, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD)
        if begun:
            writer.write(chunk(ROLE))
            await asyncio.to_thread(read.wait, 60)
        writer.write(chunk(BROKEN))

    raw, log = RawServers(), RequestLog(tmp_path / "requests.jsonl")
    entry = SliceRecord("a", MODEL, SliceState.SERVING, "serving", "v6e 2x4", address=raw.start(engine))
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}
    with (
        router_before([small_plan()], [entry], RouterSpec(), log=log) as address,
        httpx.stream("POST", address + path, json=asked, timeout=60) as answer,
    ):
        status, pieces = answer.status_code, answer.iter_raw()
        if begun:
            assert next(pieces) == ROLE
            read.set()
            with pytest.raises(httpx.RemoteProtocolError):  # the answer does not look complete
                list(pieces)
    raw.stop()
    assert status == (200 if begun else 500)
    (line,) = map(json.loads, log.path.read_text().splitlines())
    assert (line["outcome"], line["code"], line["status"]) == ("error", "internal_error", status)
