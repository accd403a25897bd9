"""Whole numbers of many slices, one column a kind of number. Pure.

A set of slices is an int: slice number 5 is bit 5. A column keeps one such set a binary digit: the slices whose number has
that digit. So the least number of any set of slices, and all numbers below a limit, are found in as many steps as numbers
have digits. A step is one `and` of two ints: 0.1 µs for 1,000 slices.
"""

_MOST = (1 << 24) - 1  # no slice has as many tokens before it


def members(slices: int) -> list[int]:
    """The numbers of the slices in a set, the lowest first."""
    numbers = []
    while slices:
        lowest = slices & -slices
        numbers.append(lowest.bit_length() - 1)
        slices ^= lowest
    return numbers


class BitColumn:
    """One number per slice; a slice that was never set has 0."""

    def __init__(self) -> None:
        self._digits: list[int] = []
        self._values: dict[int, int] = {}

    def __getitem__(self, slice_number: int) -> int:
        return self._values.get(slice_number, 0)

    def set(self, slice_number: int, value: int) -> None:
        """Numbers beyond 2^24 count as 2^24, negative ones as 0."""
        if not 0 <= value <= _MOST:
            value = _MOST if value > 0 else 0
        changed = self._values.get(slice_number, 0) ^ value
        if not changed:
            return
        self._values[slice_number] = value
        digits, bit = self._digits, 1 << slice_number
        while len(digits) < value.bit_length():
            digits.append(0)
        while changed:
            lowest = changed & -changed
            digits[lowest.bit_length() - 1] ^= bit
            changed ^= lowest
        while digits and not digits[-1]:
            digits.pop()

    def least(self, among: int) -> tuple[int, int]:
        """The least number of a set that is not empty, and the slices that have it."""
        value = 0
        for place in range(len(self._digits) - 1, -1, -1):
            having = among & self._digits[place]
            if having == among:
                value |= 1 << place
            elif having:
                among ^= having
        return value, among

    def below(self, limit: int, among: int) -> int:
        """The slices of a set whose number is less than the limit."""
        if limit.bit_length() > len(self._digits):
            return among
        below, equal = 0, among  # `equal`: those whose higher digits are the limit's
        for place in range(len(self._digits) - 1, -1, -1):
            having = equal & self._digits[place]
            if limit >> place & 1:
                below |= equal ^ having
                equal = having
            else:
                equal ^= having
            if not equal:
                break
        return below
