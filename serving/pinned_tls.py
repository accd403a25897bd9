"""TLS between processes of one cluster without an authority: each trusts the one certificate that another's record shows.

Whoever listens makes itself a key and a certificate, and puts the certificate into its record in Ray's store, which asks for Ray's
token. The certificate names no host and never expires: hosts' clocks differ, and it goes with its process. The key stays in memory.
"""

import asyncio
import contextlib
import datetime as dt
import logging
import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

logger = logging.getLogger("ray.serve")

_FROM = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_UNTIL = dt.datetime(9999, 12, 31, 23, 59, 59, tzinfo=dt.UTC)  # RFC 5280's date of what never expires
_MOST_CONTEXTS = 4096  # slices that one router knows; a context takes some 20 KiB
_HANDSHAKE_S = 15.0  # as strangers have for their headers
_MOST_HANDSHAKES = 1024
_NO_FILES_S = 0.1  # before another try, where this process has no file left for a connection


@dataclass(frozen=True)
class Identity:
    """What a listener shows: its certificate in PEM, and the context that has the key."""

    certificate: str
    context: ssl.SSLContext


def identity(name: str) -> Identity:
    """A fresh key and its certificate, signed by itself; `name` is for who reads it, nobody checks it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # routers keep connections, and resume none
    # OpenSSL's Python door reads keys from files alone: this one is in memory, and no other process can name it.
    with os.fdopen(os.memfd_create("identity"), "wb") as file:
        file.write(certificate + private)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return Identity(certificate.decode(), context)


@lru_cache(maxsize=_MOST_CONTEXTS)
def trusting(certificate: str) -> ssl.SSLContext:
    """A client's context that takes a server with this certificate (PEM) and no other; raises ssl.SSLError where it is none."""
    if not certificate:
        raise ssl.SSLError("its record has none")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate is one process's
    context.load_verify_locations(cadata=certificate)
    return context


def of(certificate: str) -> ssl.SSLContext | bool:
    """What aiohttp asks as `ssl`: the context that trusts this certificate alone, or aiohttp's default where there is none."""
    return trusting(certificate) if certificate else True


class TlsListener:
    """Takes a socket's connections and has each shake hands, before a protocol of `protocol` is made for it.

    asyncio's own servers let any number of connections wait for their handshake. Here each has `within_s`; of more than `most`
    the oldest goes.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        protocol: Callable[[], asyncio.Protocol],
        within_s: float = _HANDSHAKE_S,
        most: int = _MOST_HANDSHAKES,
    ) -> None:
        self._listener = listener
        self._context = context
        self._protocol = protocol
        self._within_s = within_s
        self._most = most
        self._handshakes: dict[asyncio.Task[None], None] = {}  # the oldest first
        listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept())
        # Not before the event loop has let go of the socket's number, which the next connection may get.
        self._accepting.add_done_callback(lambda _: listener.close())

    def close(self) -> None:
        """Take no more connections; those that have shaken hands stay."""
        self._accepting.cancel()
        for task in self._handshakes:
            task.cancel()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                logger.warning("a connection could not be taken: %s", error)
                await asyncio.sleep(_NO_FILES_S)
                continue
            if len(self._handshakes) >= self._most:
                oldest = next(iter(self._handshakes))
                del self._handshakes[oldest]
                oldest.cancel()
            task = asyncio.create_task(self._shake_hands(connection))
            self._handshakes[task] = None
            task.add_done_callback(lambda done: self._handshakes.pop(done, None))

    async def _shake_hands(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):  # whoever came does not speak TLS, or has gone
            await loop.connect_accepted_socket(
                self._protocol, connection, ssl=self._context, ssl_handshake_timeout=self._within_s
            )
