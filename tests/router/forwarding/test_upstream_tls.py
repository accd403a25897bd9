"""A router's connections by TLS: the same answers, hang-ups and pace as in plain text, and not a byte for an impostor."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop
from support.servers import PATIENCE_S, SSE_HEAD, RawServers, chunk, whole

from serving import secret
from serving.pinned_tls import identity
from serving.router.forwarding.connecting import (
    NobodyListensError,
    NotConnectedError,
    UntrustedError,
    UpstreamError,
    connected,
)
from serving.router.forwarding.upstream import Health, Upstream
from serving.router.http.protocol import InferenceRequest
from serving.state.records import Peer, SliceRecord, SliceState

Run = Callable[[Coroutine[Any, Any, Any]], Any]
pytestmark = pytest.mark.http
SLICE, ANOTHER = identity("slice"), identity("slice")
BODY = b"data: 1\n\ndata: 22\n\n"
REQUEST = InferenceRequest("llama", "/v1/completions", b"{}", {})


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def raw() -> Iterator[RawServers]:
    servers = RawServers(SLICE)
    yield servers
    servers.stop()


def entry(peer: Peer) -> SliceRecord:
    return SliceRecord("a", "llama", SliceState.SERVING, "", "v6e 2x4", slice="slice-0", **peer._asdict())


async def answered(_: bytes, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(whole(BODY))


def test_a_connection_is_kept_for_the_next_request(raw: RawServers, run: Run) -> None:
    connections: list[asyncio.StreamWriter] = []

    async def counted(request: bytes, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        writer.write(whole(request.partition(b"\r\n\r\n")[2]))

    async def scenario() -> None:
        upstream, slice_ = Upstream(1), entry(raw.peer(counted))
        for body in (b"{}", b"x" * (1 << 20), b"[]"):
            response = await upstream.post(slice_, REQUEST, body, {})
            assert await response.read() == body
        assert await upstream.health(slice_, 5) is Health.WELL
        await upstream.close()

    run(scenario())
    assert len(connections) == 3
    assert len(set(connections)) == 1


@pytest.mark.parametrize("first", ["answers", "breaks off", "says nothing"])
def test_a_slice_is_asked_for_its_health_on_a_kept_connection_and_anew_where_that_brings_nothing(
    raw: RawServers, run: Run, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the cluster's secret on each connection: a slice cuts off what has not shown it."""
    monkeypatch.setenv(secret.VARIABLE, "of-the-cluster")
    connections: list[asyncio.StreamWriter] = []
    shown: set[asyncio.StreamWriter] = set()

    async def script(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        if b"authorization: Bearer of-the-cluster\r\n" in request:
            shown.add(writer)
        if request.startswith(b"POST") or first == "answers" or writer is not connections[0]:
            writer.write(whole(b""))
        elif first == "breaks off":
            writer.close()
        else:
            await reader.read()

    async def scenario() -> None:
        upstream, slice_ = Upstream(10), entry(raw.peer(script, well=False))
        await (await upstream.post(slice_, REQUEST, b"{}", {})).read()
        if (
            first == "says nothing"
        ):  # half of the time goes to the kept connection, and a handshake may take the rest
            async with asyncio.timeout(PATIENCE_S):
                while await upstream.health(slice_, 1) is not Health.WELL:
                    pass
        for _ in range(3):
            assert await upstream.health(slice_, 60) is Health.WELL
        await upstream.close()

    run(scenario())
    assert len(set(connections)) == {"answers": 1, "breaks off": 2}.get(first, len(set(connections)))
    assert (connections[-1] is connections[0]) is (first == "answers")
    assert shown == set(connections)


def test_who_has_the_address_of_a_slice_in_plain_text_is_told_no_secret_when_asked_for_its_health(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the connection, which a slice would cut off after some seconds, is kept for no request."""
    monkeypatch.setenv(secret.VARIABLE, "of-the-cluster")
    asked: list[bytes] = []
    connections: set[asyncio.StreamWriter] = set()

    async def script(request: bytes, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(request)
        connections.add(writer)
        writer.write(whole(b""))

    async def scenario() -> None:
        upstream, slice_ = Upstream(10), entry(plain.peer(script, well=False))
        for _ in range(2):
            assert await upstream.health(slice_, 60) is Health.WELL
        await (await upstream.post(slice_, REQUEST, b"{}", {})).read()
        assert await upstream.health(slice_, 60) is Health.WELL
        await upstream.close()

    plain = RawServers()
    run(scenario())
    plain.stop()
    assert len(connections) == 3
    assert [b"of-the-cluster" in request for request in asked] == [False, False, True, False]


def test_a_client_that_goes_ends_the_request_on_its_slice(raw: RawServers, run: Run) -> None:
    gone: list[bytes] = []

    async def streams(_: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + chunk(BODY))
        gone.append(await reader.read())
        writer.close()

    async def scenario() -> None:
        upstream = Upstream(1)
        response = await upstream.post(entry(raw.peer(streams)), REQUEST, b"{}", {})
        response.close()
        async with asyncio.timeout(PATIENCE_S):
            while not gone:  # noqa: ASYNC110  another loop's thread tells it
                await asyncio.sleep(0.005)

    run(scenario())


@pytest.mark.parametrize("politely", [True, False])
def test_a_stream_that_breaks_off_is_no_whole_answer(raw: RawServers, run: Run, *, politely: bool) -> None:
    async def breaks(_: bytes, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + chunk(BODY))
        await writer.drain()
        if not politely:
            await asyncio.sleep(0.05)
            writer.transport.abort()
        writer.close()

    async def scenario() -> None:
        upstream = Upstream(1)
        response = await upstream.post(entry(raw.peer(breaks)), REQUEST, b"{}", {})
        pieces: list[bytes] = []
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(UpstreamError):
                await response.pipe(lambda data: pieces.append(data) is None)
        assert b"".join(pieces) == BODY

    run(scenario())


def test_a_slow_reader_holds_the_slice_up_and_nothing_grows(raw: RawServers, run: Run) -> None:
    sent, piece = 0, chunk(b"x" * (64 << 10))

    async def sends(_: bytes, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(SSE_HEAD)
        for _ in range(1000):
            writer.write(piece)
            await writer.drain()
            sent += len(piece)
        writer.write(b"0\r\n\r\n")

    async def scenario() -> None:
        upstream = Upstream(1)
        response = await upstream.post(entry(raw.peer(sends)), REQUEST, b"{}", {})
        size = 0

        def take(data: bytes) -> bool:
            nonlocal size
            size += len(data)
            response.pause()
            return True

        piping = asyncio.create_task(response.pipe(take))
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.2)
        assert size < 1 << 20
        assert sent < 30 << 20
        while not piping.done():
            response.resume()
            await asyncio.sleep(0)
        assert size == 1000 * 64 << 10
        await upstream.close()

    run(scenario())


# Who listens there, and the scheme and certificate of the slice's record.
IMPOSTORS = {
    "another certificate": (ANOTHER, "https", SLICE.certificate),
    "plain HTTP": (None, "https", SLICE.certificate),
    "plain HTTP, and so the address": (None, "http", SLICE.certificate),
    "no certificate in the record": (SLICE, "https", ""),
}


@pytest.mark.parametrize("which", IMPOSTORS)
def test_an_impostor_gets_no_request_and_the_log_says_which_slice(
    run: Run, which: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(secret.VARIABLE, "of-the-cluster")
    taken = b""
    listens, scheme, certificate = IMPOSTORS[which]

    async def takes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal taken
        taken += await reader.read(1 << 16)
        writer.write(whole(BODY))
        writer.close()

    async def scenario() -> None:
        server = await asyncio.start_server(takes, "127.0.0.1", 0, ssl=listens.context if listens else None)
        address = f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        upstream, slice_ = Upstream(1), entry(Peer(address, certificate))
        with pytest.raises(UntrustedError):
            await upstream.post(slice_, REQUEST, b"{}", {})
        assert await upstream.health(slice_, 5) is Health.SILENT
        server.close()

    with caplog.at_level(logging.ERROR, "ray.serve"):
        run(scenario())
    assert b"of-the-cluster" not in taken
    assert b"POST" not in taken
    assert f"slice slice-0 of llama gets no request: {scheme}://127.0.0.1:" in caplog.text
    assert "does not show the certificate of its record" in caplog.text


def test_a_router_that_has_not_read_of_the_certificate_gets_no_answer(raw: RawServers, run: Run) -> None:
    async def scenario() -> None:
        plain = Peer(raw.peer(answered).address.replace("https:", "http:"))
        with pytest.raises(UpstreamError):
            await Upstream(1).post(entry(plain), REQUEST, b"{}", {})

    run(scenario())


def test_where_nobody_listens_the_slice_is_gone_and_one_that_shakes_no_hands_is_not(run: Run) -> None:
    async def scenario() -> None:
        hung_up = asyncio.Event()

        async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()
            hung_up.set()

        silent = await asyncio.start_server(nothing, "127.0.0.1", 0)
        port = silent.sockets[0].getsockname()[1]
        peer = Peer(f"https://127.0.0.1:{port}", SLICE.certificate)
        with pytest.raises(NotConnectedError) as error:
            await connected(peer, asyncio.Protocol, 1, handshake_s=0.05)
        assert not isinstance(error.value, NobodyListensError | UntrustedError)
        async with asyncio.timeout(PATIENCE_S):
            await hung_up.wait()
        silent.close()
        with pytest.raises(NobodyListensError):
            await connected(peer, asyncio.Protocol, 1)
        assert await Upstream(1).health(entry(peer), 1) is Health.GONE

    run(scenario())
