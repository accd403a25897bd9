"""Public certificate authorities: tests speak on loopback, and know them only to install something.

Whoever makes an HTTP client, as each call of `httpx.get` does, reads the bundle of all of them first: 30 ms of a core.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

# OpenSSL's, which httpx and what tests start look at too.
_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
_FOUND = {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def forget() -> None:
    """Know none, in this process and in what it starts."""
    os.environ.pop("SSL_CERT_FILE", None)
    os.environ["SSL_CERT_DIR"] = os.devnull


@contextmanager
def known() -> Iterator[None]:
    """Know those again that were known before."""
    with mock.patch.dict(os.environ):
        for name in _VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(_FOUND)
        yield
