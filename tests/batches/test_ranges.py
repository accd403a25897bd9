import pytest

from serving.batches.ranges import part
from serving.errors import RangeError

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("bytes=0-", range(10)),
        ("bytes=0-0", range(1)),
        ("bytes=3-5", range(3, 6)),
        ("bytes=9-100", range(9, 10)),
        ("bytes=-4", range(6, 10)),
        ("bytes=-40", range(10)),
        (None, None),
        ("", None),
        ("bytes=-", None),
        ("bytes=5-3", None),
        ("bytes=0-1,3-4", None),
        ("lines=0-1", None),
        ("bytes=a-b", None),
        ("bytes=\u0663-", None),
    ],
)
def test_one_range_of_bytes_is_heeded_and_whatever_else_means_the_whole_file(
    asked: str | None, found: range | None
) -> None:
    assert part(asked, 10) == found


@pytest.mark.parametrize(("asked", "size"), [("bytes=10-", 10), ("bytes=-0", 10), ("bytes=0-", 0)])
def test_bytes_that_a_file_does_not_have_are_refused(asked: str, size: int) -> None:
    with pytest.raises(RangeError, match=f"has {size} bytes"):
        part(asked, size)
