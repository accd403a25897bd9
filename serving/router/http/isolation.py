"""Keeps each API key's prompts apart in the engines' prefix caches: `router: {keys: {isolated_cache: true}}`. Pure.

A prompt that another has sent before comes back sooner, so that one key could find out what another asked. vLLM keys its
cache by `cache_salt` too. The router sets it, from the key's whole hash, which only the operator knows: whatever salt a client
sends is mixed in, so that a client can part its own users, and reaches nobody else's.
"""

import base64
import hashlib
import hmac
from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

from serving.errors import BadRequestError
from serving.router.http.auth import Key
from serving.router.http.work import texts

FIELD = "cache_salt"
# Routes whose prompts reach the cache, and whose bodies vLLM 0.26 reads no salt from.
UNSALTED = frozenset(
    ("/v1/messages", "/v2/embed", "/generative_scoring", "/v1/audio/transcriptions", "/v1/audio/translations")
)


_MEDIA_ID = b"uuid"


def salt(key: Key, asked: str = "") -> str:
    """256 bits that nobody can work out without the file of keys."""
    digest = hmac.digest(
        bytes.fromhex(key.sha256), f"{FIELD}:{asked}".encode("utf-8", "backslashreplace"), hashlib.sha256
    )
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def salted(path: str, body: bytes, fields: Mapping[str, Any], key: Key) -> bytes:
    """The body with the key's salt; raises BadRequestError where the route takes none."""
    if path in UNSALTED:
        raise BadRequestError(
            f"{path} is not offered here: this service keeps the prompts of API keys apart, and the engine can't do it on "
            "this route. Use /v1/chat/completions or /v1/embeddings."
        )
    if _MEDIA_ID in body or b"\\u" in body:
        _check_media_ids(fields)
    asked = fields.get(FIELD)
    if asked is not None and not isinstance(asked, str):
        raise BadRequestError(f"{FIELD} is no text; send a text or leave it out.")
    made = salt(key, asked or "")
    if FIELD in fields or not fields:
        return to_json({**fields, FIELD: made})
    before, _, after = body.partition(b"{")
    return before + b'{"cache_salt":"' + made.encode() + b'",' + after


def _check_media_ids(fields: Mapping[str, Any]) -> None:
    """vLLM finds a picture again by the name that a client gave it, whatever the salt: also another key's picture."""
    for holder, name, _ in texts(fields):
        if name == "uuid" and ("type" in holder or any(other.endswith("_url") for other in holder)):
            raise BadRequestError(
                "uuid: this service keeps the prompts of API keys apart, and the engine would find media by that name for any "
                "key. Leave it out, and send the media."
            )
