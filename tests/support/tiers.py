"""Which modules of tests a marker expression leaves anything of: the others need not be imported, which takes longer than many tests."""

import re
from itertools import chain, combinations

from _pytest.mark.expression import Expression

# What a test needs. Every test has one of them.
NEEDS = ("unit", "http", "cluster", "engine", "browser")
_MARKER = re.compile(rf"\bmark\.({'|'.join(NEEDS)}|slow)\b")


def can_match(expression: str, module: str) -> bool:
    """Whether a test of the module, given as text, may have markers that the expression of `-m` selects."""
    markers = sorted(set(_MARKER.findall(module)))
    if not expression or not markers:
        return True
    selects = Expression.compile(expression)
    of_a_test = chain.from_iterable(combinations(markers, count) for count in range(1, len(markers) + 1))
    return any(selects.evaluate(lambda name, some=some, **_: name in some) for some in of_a_test)
