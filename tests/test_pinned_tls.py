"""TLS between processes of the cluster: one certificate is trusted, whoever comes has a time, and no key is left anywhere."""

import asyncio
import socket
import ssl
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop
from cryptography import x509
from support.servers import PATIENCE_S

from serving.pinned_tls import TlsListener, identity, of, trusting

Run = Callable[[Coroutine[Any, Any, Any]], Any]
SLICE, ANOTHER = identity("slice"), identity("slice")  # two of one name


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    return request.param  # type: ignore[no-any-return]


class Echo(asyncio.Protocol):
    transport: asyncio.Transport

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


def listening(**limits: Any) -> tuple[TlsListener, int]:
    listener = socket.create_server(("127.0.0.1", 0))
    return TlsListener(listener, SLICE.context, Echo, **limits), listener.getsockname()[1]


async def echoed(port: int, context: ssl.SSLContext) -> bytes:
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        writer.write(b"hello")
        try:
            return await reader.readexactly(5)
        finally:
            writer.transport.abort()


async def ended(reader: asyncio.StreamReader) -> None:
    async with asyncio.timeout(PATIENCE_S):
        with suppress(ConnectionError):
            await reader.read()


@pytest.mark.http
def test_a_client_takes_the_certificate_that_it_knows_and_no_other_of_the_same_name(run: Run) -> None:
    async def scenario() -> None:
        door, port = listening()
        assert await echoed(port, trusting(SLICE.certificate)) == b"hello"
        with pytest.raises(ssl.SSLCertVerificationError):
            await echoed(port, trusting(ANOTHER.certificate))
        door.close()

    run(scenario())


@pytest.mark.unit
def test_nothing_is_trusted_without_a_certificate() -> None:
    with pytest.raises(ssl.SSLError, match="its record has none"):
        trusting("")
    with pytest.raises(ssl.SSLError):
        trusting("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    assert of("") is True
    assert of(SLICE.certificate) is trusting(SLICE.certificate)
    assert trusting(SLICE.certificate).verify_mode is ssl.CERT_REQUIRED


@pytest.mark.unit
def test_no_clock_is_too_early_or_too_late_for_a_certificate() -> None:
    made = x509.load_pem_x509_certificate(SLICE.certificate.encode())
    assert (made.not_valid_before_utc.year, made.not_valid_after_utc.year) == (1970, 9999)


@pytest.mark.unit
def test_the_key_is_in_no_file_once_it_is_made() -> None:
    before = set(Path("/proc/self/fd").iterdir())
    made = identity("slice")
    assert set(Path("/proc/self/fd").iterdir()) == before
    assert "PRIVATE" not in made.certificate


@pytest.mark.http
def test_who_shakes_no_hands_is_cut_off_in_time_and_of_too_many_the_oldest(run: Run) -> None:
    async def scenario() -> None:
        door, port = listening(within_s=60, most=2)
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        for reader, _ in silent[:2]:
            await ended(reader)
        assert await echoed(port, trusting(SLICE.certificate)) == b"hello"
        await ended(silent[2][0])
        door._within_s = 0.1
        late, its_own = await asyncio.open_connection("127.0.0.1", port)
        await ended(late)
        for writer in (its_own, *(writer for _, writer in silent)):
            writer.close()
        async with asyncio.timeout(PATIENCE_S):
            while door._handshakes:  # noqa: ASYNC110  a task ends after its connection
                await asyncio.sleep(0.005)
        door.close()

    run(scenario())


@pytest.mark.http
def test_who_speaks_no_tls_is_answered_nothing_in_plain_text(run: Run) -> None:
    async def scenario() -> None:
        door, port = listening()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            said = b""
            with suppress(ConnectionError):
                said = await reader.read()
        assert b"HTTP" not in said
        writer.close()
        door.close()

    run(scenario())


@pytest.mark.http
def test_a_closed_door_takes_nobody_and_keeps_whom_it_has(run: Run) -> None:
    async def scenario() -> None:
        door, port = listening()
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting(SLICE.certificate))
        silent, idle = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(PATIENCE_S):
            while not door._handshakes:  # noqa: ASYNC110  the kernel tells nobody
                await asyncio.sleep(0.005)
        door.close()
        await ended(silent)
        with suppress(asyncio.CancelledError):
            await door._accepting
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        for end in (writer, idle):
            end.close()

    run(scenario())
