"""Takes secrets out of what a library says of its options, before it goes to a log, a record or a status page. Pure."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

_SECRET = re.compile(
    r"(^|[_-])(token|secret|password|passwd|credentials?|(api|access|private|secret)[_-]?key)$", re.IGNORECASE
)
_SHORTEST = 4  # a shorter text stands in too many words
REDACTED = "[redacted]"


def secrets_of(*mappings: Mapping[str, Any]) -> set[str]:
    """The texts in options or environments whose names say that they are secret, as `hf_token` does."""
    return {text for mapping in mappings for text in _texts(mapping) if len(text) >= _SHORTEST}


def redacted(text: str, secrets: Collection[str]) -> str:
    """The text without any of the secrets, the longest first: one may be a part of another."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    return text


def _texts(value: Any, *, secret: bool = False) -> Iterator[str]:
    match value:
        case str() if secret:
            yield value
        case Mapping():
            for name, inner in value.items():
                yield from _texts(inner, secret=secret or bool(_SECRET.search(str(name))))
        case list() | tuple():
            for inner in value:
                yield from _texts(inner, secret=secret)
