import pytest

from serving.errors import BadRequestError
from serving.paging import limit_of

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("asked", ["0", "-1", "101", "1e1", "", "\u0661", "9" * 5000])
def test_a_limit_is_a_number_in_plain_digits(asked: str) -> None:
    with pytest.raises(BadRequestError, match="from 1 to 100"):
        limit_of(asked, 20, 100)


def test_a_limit_that_is_left_out_is_the_usual_one() -> None:
    assert (limit_of(None, 20, 100), limit_of("100", 20, 100)) == (20, 100)
