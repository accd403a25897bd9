"""What is kept of an answer on its way, and when its client has it."""

import json
from typing import Any

import pytest

from serving.router.http.keeper import Keeper

pytestmark = pytest.mark.unit

JSON = [(b"content-type", b"application/json"), (b"content-length", b"7")]


class Client:
    """What a client has got."""

    def __init__(self) -> None:
        self.heads: list[tuple[int, Any]] = []
        self.body = b""
        self.over = False

    def start(self, status: int, headers: Any) -> None:
        self.heads.append((status, [*headers]))

    def write(self, data: bytes) -> None:
        self.body += data

    def end(self, data: bytes = b"") -> None:
        self.body += data
        self.over = True


def response(length: int) -> bytes:
    output = {"output": ["x" * length], "previous_response_id": None, "user": "u" * 200}
    fields = {"id": "resp_1", "status": "completed", **output}
    return json.dumps(fields, separators=(",", ":")).encode()


@pytest.mark.parametrize("last", [0, 100_000])
def test_a_response_that_is_too_long_to_keep_goes_on_as_it_comes(last: int) -> None:
    client: Any = Client()
    keeper, body = Keeper(client, "resp_0"), response(1 << 20)
    keeper.start(200, JSON)
    for at in range(0, len(body) - last, 100_000):
        keeper.write(body[at : min(at + 100_000, len(body) - last)])
    keeper.end(body[len(body) - last :])
    assert client.over
    keeper.finish()
    assert client.heads == [(200, JSON[:1])]
    assert json.loads(client.body) == {**json.loads(body), "previous_response_id": "resp_0"}
    assert keeper.response is None


def test_a_streams_last_event_that_is_too_long_to_keep_goes_on_too() -> None:
    client: Any = Client()
    keeper = Keeper(client, "resp_0")
    last = b"event: response.completed\ndata: " + b'{"response":' + response(1 << 20) + b"}\n\n"
    keeper.start(200, [(b"content-type", b"text/event-stream")])
    keeper.write(b"event: response.created\ndata: {}\n\n")
    keeper.write(last)
    keeper.end()
    assert client.over
    keeper.finish()
    assert len(client.heads) == 1
    assert client.body.endswith(b"}\n\n")
    assert keeper.response is None


def test_a_short_response_is_held_until_it_is_kept() -> None:
    client: Any = Client()
    keeper = Keeper(client, "resp_0")
    keeper.start(200, JSON)
    keeper.end(response(10))
    assert not client.heads
    assert keeper.response
    assert keeper.response["previous_response_id"] == "resp_0"
    keeper.finish()
    assert client.over
    assert (b"content-length", b"%d" % len(client.body)) in client.heads[0][1]
