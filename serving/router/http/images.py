"""How many pixels a picture has, by its first bytes. Pure.

A few bytes may unpack to gigabytes. What is not told in the one place where every reader looks for it is not known here: a
second header, a format without a row, bytes that are missing.
"""

import base64
import struct

# Parts of a file before its pixels: a photograph has 20, one with a long colour profile 300.
_MOST_PARTS = 512
_PNG = b"\x89PNG\r\n\x1a\n"
# A JPEG's frame headers (SOF), and what in that range is none: tables of Huffman and arithmetic codes, and an extension.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SCAN = 0xDA


def pixels(packed: str) -> int | None:
    """The pixels of a picture in base64; None where they are not known."""
    data = _Packed(packed)
    try:
        width, height = _size(data)
    except (ValueError, struct.error):
        return None
    return width * height or None


class _Packed:
    """Bytes in base64, unpacked where they are read."""

    def __init__(self, packed: str) -> None:
        self._packed = packed

    def at(self, offset: int, size: int) -> bytes:
        """Raises ValueError where there are fewer."""
        first, last = offset // 3 * 4, -(-(offset + size) // 3) * 4
        data = base64.b64decode(self._packed[first:last], validate=True)[offset % 3 :][:size]
        if len(data) < size:
            raise ValueError
        return data

    def numbers(self, form: str, offset: int) -> tuple[int, ...]:
        return struct.unpack(form, self.at(offset, struct.calcsize(form)))


def _size(data: _Packed) -> tuple[int, int]:
    head = data.at(0, 16)
    if head.startswith(_PNG):
        return _png(data)
    if head.startswith(b"\xff\xd8\xff"):
        return _jpeg(data)
    if head.startswith((b"GIF87a", b"GIF89a")):
        return _gif(data)
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return _webp(data, head[12:])
    if head.startswith(b"BM"):
        width, height = data.numbers("<HH" if data.numbers("<I", 14) == (12,) else "<ii", 18)
        return abs(width), abs(height)
    raise ValueError


def _png(data: _Packed) -> tuple[int, int]:
    size, at = (0, 0), len(_PNG)
    for _ in range(_MOST_PARTS):
        length, kind = struct.unpack(">I4s", data.at(at, 8))
        if kind == b"IDAT":
            return size
        if kind == b"IHDR":
            if size != (0, 0):
                raise ValueError
            width, height = data.numbers(">II", at + 8)
            size = width, height
        at += length + 12
    raise ValueError


def _jpeg(data: _Packed) -> tuple[int, int]:
    size, at = (0, 0), 2
    for _ in range(_MOST_PARTS):
        sign, marker, length = data.numbers(">BBH", at)
        if sign != 0xFF or marker < 0xC0 or 0xD0 <= marker < _SCAN:
            raise ValueError
        if marker == _SCAN:
            return size
        if marker in _FRAMES:
            if size != (0, 0):
                raise ValueError
            height, width = data.numbers(">HH", at + 5)
            size = width, height
        at += 2 + length
    raise ValueError


def _gif(data: _Packed) -> tuple[int, int]:
    """The screen, or what the first picture has beyond it."""
    width, height, flags = data.numbers("<HHB", 6)
    at = 13 + _colours(flags)
    extends = False
    for _ in range(_MOST_PARTS):
        (kind,) = data.at(at, 1)
        if extends:
            at += 1 + kind
            extends = kind > 0
        elif kind == ord("!"):
            at += 2
            extends = True
        elif kind == ord(","):
            left, top, wide, high = data.numbers("<HHHH", at + 1)
            return max(width, left + wide), max(height, top + high)
        else:
            break
    raise ValueError


def _colours(flags: int) -> int:
    return 3 << (flags % 8 + 1) if flags & 0x80 else 0


def _webp(data: _Packed, kind: bytes) -> tuple[int, int]:
    if kind == b"VP8X":
        sides = data.at(24, 6)
        return int.from_bytes(sides[:3], "little") + 1, int.from_bytes(sides[3:], "little") + 1
    if kind == b"VP8L" and data.at(20, 1) == b"\x2f":
        (bits,) = data.numbers("<I", 21)
        return bits % (1 << 14) + 1, (bits >> 14) % (1 << 14) + 1
    if kind == b"VP8 " and data.at(23, 3) == b"\x9d\x01\x2a":
        width, height = data.numbers("<HH", 26)
        return width % (1 << 14), height % (1 << 14)
    raise ValueError
