"""The size of a picture, as Pillow writes it; what is odd is not known."""

import base64
import io
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from serving.router.http.images import pixels

pytestmark = pytest.mark.unit

WIDTH, HEIGHT = 301, 77


def packed(data: bytes) -> str:
    return base64.b64encode(data).decode()


def written(kind: str, mode: str = "L", **options: object) -> bytes:
    file = io.BytesIO()
    Image.new(mode, (WIDTH, HEIGHT), 128).save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    "picture",
    [
        pytest.param(written("PNG"), id="PNG"),
        pytest.param(written("JPEG"), id="JPEG"),
        pytest.param(written("JPEG", progressive=True, icc_profile=b"x" * 200_000), id="progressive JPEG"),
        pytest.param(written("GIF", comment=b"a word" * 99), id="GIF"),
        pytest.param(written("BMP"), id="BMP"),
        pytest.param(written("WEBP", lossless=True), id="VP8L"),
        pytest.param(written("WEBP", quality=1), id="VP8"),
        pytest.param(written("WEBP", exif=b"Exif\0\0x"), id="VP8X"),
    ],
)
def test_a_picture_has_the_pixels_that_its_reader_finds(picture: bytes) -> None:
    assert pixels(packed(picture)) == WIDTH * HEIGHT


def test_a_frame_larger_than_its_screen_counts() -> None:
    picture = bytearray(written("GIF"))
    picture[6:10] = struct.pack("<HH", 1, 1)
    assert Image.open(io.BytesIO(bytes(picture))).size == (WIDTH, HEIGHT)
    assert pixels(packed(bytes(picture))) == WIDTH * HEIGHT


def small_first(picture: bytes, at: int, header: bytes) -> bytes:
    return picture[:at] + header + picture[at:]


@pytest.mark.parametrize(
    "picture",
    [
        pytest.param(
            small_first(written("PNG"), 8, struct.pack(">I4sIIBBBBBI", 13, b"IHDR", 1, 1, 8, 0, 0, 0, 0, 0)),
            id="two headers of a PNG",
        ),
        pytest.param(
            small_first(written("JPEG"), 2, b"\xff\xc0" + struct.pack(">HBHHBBBB", 11, 8, 1, 1, 1, 1, 17, 0)),
            id="two frames of a JPEG",
        ),
        pytest.param(written("TIFF"), id="TIFF"),
        pytest.param(written("PNG")[:30], id="the beginning"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_what_readers_may_read_differently_is_not_known(picture: bytes) -> None:
    assert pixels(packed(picture)) is None


@given(
    st.binary(max_size=99),
    st.sampled_from([b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"BM", b"RIFF"]),
)
def test_any_bytes_have_pixels_or_none(data: bytes, head: bytes) -> None:
    found = pixels(packed(head + data))
    assert found is None or found > 0
    assert pixels((head + data).decode("latin-1")) is None
