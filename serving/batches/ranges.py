"""Which bytes of a file a client's Range header asks for. Pure."""

import re

from serving.errors import RangeError


def part(asked: str | None, size_bytes: int) -> range | None:
    """The bytes asked for; None for all of them: where nothing is asked, several parts, or something else. Raises RangeError."""
    match = re.fullmatch(r"bytes=([0-9]{0,18})-([0-9]{0,18})", (asked or "").strip())
    if not match or not (match[1] or match[2]):
        return None
    first, last = match.groups()
    start = int(first) if first else max(0, size_bytes - int(last))
    end = min(int(last) + 1, size_bytes) if first and last else size_bytes
    if first and last and int(last) < start:
        return None
    if start >= end:
        raise RangeError(f"The file has {size_bytes} bytes: none of those asked for (Range: {asked}).")
    return range(start, end)
