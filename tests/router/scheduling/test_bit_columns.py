import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.router.scheduling.bit_columns import BitColumn, members

pytestmark = pytest.mark.unit

numbers = st.integers(0, 200)
values = st.integers(0, 1 << 20)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(numbers, values), max_size=80),
    st.sets(numbers, min_size=1, max_size=60),
    values,
)
def test_a_column_gives_what_a_loop_over_its_numbers_gives(
    changes: list[tuple[int, int]], among: set[int], limit: int
) -> None:
    column, plain = BitColumn(), dict.fromkeys(range(201), 0)
    for number, value in changes:
        column.set(number, value)
        plain[number] = value
    asked = sum(1 << number for number in among)
    least, having = column.least(asked)
    assert least == min(plain[number] for number in among)
    assert set(members(having)) == {number for number in among if plain[number] == least}
    assert set(members(column.below(limit, asked))) == {n for n in among if plain[n] < limit}


def test_a_number_beyond_the_most_counts_as_the_most_and_a_negative_one_as_nothing() -> None:
    column = BitColumn()
    column.set(0, 1 << 60)
    column.set(1, -5)
    assert column[0] == (1 << 24) - 1
    assert column[1] == 0


def test_members_are_the_numbers_of_a_set() -> None:
    assert members(0) == []
    assert members(0b1000000101) == [0, 2, 9]
