"""Parses JSON of strangers: a text is measured before it is parsed, for as Python objects the smallest values take thirty times their bytes.

NaN, numbers that no computer keeps as texts, lone surrogates and a key that stands twice in one object are refused. Pure.
"""

import re
from typing import Any

import jiter

from serving.errors import BadRequestError

# The parser holds Python's lock, and with it the event loop, from a text's beginning to its end: most of these alone take it 5
# to 15 ms. 128 tools and a conversation of a million tokens stay below all of them.
# A list or object takes 56 bytes and more, a number 32: at most 4 MiB and 8 MiB of one text.
_MOST_CONTAINERS = 1 << 16
_MOST_VALUES = 1 << 18  # a prompt of so many tokens, as numbers
_MOST_TEXTS = 1 << 16
# Of objects: each is looked for among those before it, by all of its letters.
_MOST_NAMES = 1 << 15
_MOST_NAME_BYTES = 1 << 20
# Beside texts and blanks, 16 for each value.
_MOST_BARE_BYTES = 4 << 20
# What takes more digits than a machine's integer is read and written digit by digit: 160,000 numbers of 25 digits take 80 ms to write.
_LONG = b"0" * 19
_MOST_LONG = 1 << 12
_DIGITS = bytes.maketrans(b"123456789", b"000000000")
_MOST_UNICODE_ESCAPES = 1 << 20  # \u4e2d
_MOST_ESCAPES = 1 << 22  # of any kind
_MOST_NOT_ASCII_BYTES = 8 << 20
_ASCII = bytes(range(128))
# Below the size of pieces that a router's allocator maps anew each time.
_PIECE_BYTES = 1 << 16
# Enough for jiter to see that a text is nested too deeply, at 200 levels.
_OPENING_BYTES = 1 << 12
_TOO_DEEP = "recursion limit"
_HALF = "hex escape"
# What a text that is no JSON in UTF-8 begins with, where its writer can be told what to change.
_NOT_PLAIN = {
    b"\x1f\x8b": "it is packed with gzip; send it as it is",
    b"\x28\xb5\x2f\xfd": "it is packed with zstd; send it as it is",
    b"\xef\xbb\xbf": "it begins with a byte order mark; send UTF-8 without one",
    b"\xff\xfe": "it is UTF-16; send UTF-8",
    b"\xfe\xff": "it is UTF-16; send UTF-8",
}
# Below this size a text is neither measured nor parsed off the event loop: it is parsed within a millisecond.
SMALL_BYTES = 1 << 16


def read(text: bytes, what: str = "The request body") -> dict[str, Any]:
    """The fields of an object of a bounded number of values; raises BadRequestError, which calls the text `what`."""
    try:
        if len(text) >= SMALL_BYTES:
            _check_opening(text)
            if too_many := _too_many_values(text, what):
                raise too_many
        fields = jiter.from_json(text, allow_inf_nan=False, catch_duplicate_keys=True)
    except ValueError as error:
        problem = next((says for begins, says in _NOT_PLAIN.items() if text.startswith(begins)), "")
        raise BadRequestError(f"{what} is not JSON: {problem or _told(str(error))}.") from None
    if not isinstance(fields, dict):
        raise BadRequestError(f"{what} is JSON, but an object is needed.")
    return fields


def _check_opening(text: bytes) -> None:
    """Raises ValueError where the first bytes alone are nested too deeply. Other faults there may be those of the cut."""
    try:
        jiter.from_json(text[:_OPENING_BYTES], partial_mode=True)
    except ValueError as error:
        if _TOO_DEEP in str(error):
            raise


def _too_many_values(text: bytes, what: str) -> BadRequestError | None:
    """Count a text's values without making them, piece by piece: no call holds other threads up for long."""
    containers = values = texts = names = name_bytes = bare = long = letters = escapes = not_ascii = 0
    within, at = False, 0  # a text
    while at < len(text):
        piece = text[at : at + _PIECE_BYTES]
        signs = len(piece) - len(piece.rstrip(b"\\"))
        if signs % 2 and at + len(piece) < len(text):
            piece = piece[:-1]  # what it escapes is in the next piece
        at += len(piece) or 1
        if not piece.isascii():
            not_ascii += len(piece.translate(None, _ASCII))
        if b"\\" in piece:
            size = len(piece)
            piece = piece.replace(b"\\\\", b"")
            escapes += (size - len(piece)) // 2 + piece.count(b"\\")
            letters += piece.count(b"\\u")
            piece = piece.replace(b'\\"', b"")
        parts = piece.split(b'"')
        outside = b"".join(parts[within::2])
        if b":" in outside:
            name_bytes += sum(
                len(text)
                for text, after in zip(parts[1 - within :: 2], parts[2 - within :: 2], strict=False)
                if after.lstrip().startswith(b":")
            )
        within ^= len(parts) % 2 == 0
        containers += outside.count(b"[") + outside.count(b"{")
        values += outside.count(b",")
        names += outside.count(b":")
        bare += len(outside.translate(None, b" \t\r\n"))
        long += outside.translate(_DIGITS).count(_LONG)
        texts += len(parts) // 2
        for count, most, kind in (
            (containers, _MOST_CONTAINERS, "lists and objects"),
            (values, _MOST_VALUES, "values"),
            (texts, _MOST_TEXTS, "texts"),
            (names, _MOST_NAMES, "names in its objects"),
            (name_bytes, _MOST_NAME_BYTES, "bytes of names in its objects"),
            (bare, _MOST_BARE_BYTES, "bytes of numbers and signs"),
            (long, _MOST_LONG, "numbers of 19 digits, longer ones counted as several"),
            (letters, _MOST_UNICODE_ESCAPES, "escaped letters"),
            (escapes, _MOST_ESCAPES, "escapes"),
            (not_ascii, _MOST_NOT_ASCII_BYTES, "bytes beyond ASCII"),
        ):
            if count > most:
                return BadRequestError(
                    f"{what} has more than {most} {kind}; send at most so many in one request."
                )
    return None


def _told(problem: str) -> str:
    """jiter's words on a text: the name of a key that stands there twice may be anything, also a client's text."""
    problem = re.sub(r'"(?s:.*)"', "a name", problem)[:200]
    if _HALF in problem:  # JavaScript's slices of a text count by halves
        return f"half of a surrogate pair, as of an emoji that was cut in two ({problem})"
    return problem
