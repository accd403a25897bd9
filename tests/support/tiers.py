"""Which modules of tests a marker expression leaves anything of, and which of them run one after the other."""

import re
from functools import cache
from itertools import chain, combinations
from pathlib import Path

from _pytest.mark.expression import Expression
from xdist.scheduler import LoadFileScheduling

# What a test needs. Every test has one of them.
NEEDS = ("unit", "http", "cluster", "engine", "compiler", "browser")
_MARKER = re.compile(rf"\bmark\.({'|'.join(NEEDS)}|slow)\b")
_ONE_CLUSTER = "modules that borrow the one cluster"


def can_match(expression: str, module: str) -> bool:
    """Whether a test of the module, given as text, may have markers that the expression of `-m` selects.

    The others need not be imported, which takes longer than many tests.
    """
    markers = sorted(set(_MARKER.findall(module)))
    if not expression or not markers:
        return True
    selects = Expression.compile(expression)
    of_a_test = chain.from_iterable(combinations(markers, count) for count in range(1, len(markers) + 1))
    return any(selects.evaluate(lambda name, some=some, **_: name in some) for some in of_a_test)


@cache
def _borrows(module: Path) -> bool:
    return "leases: Leases" in module.read_text()


class BorrowersFirst(LoadFileScheduling):
    """One worker runs all modules that borrow the cluster, from the first moment on; the others share out what is left."""

    def _split_scope(self, nodeid: str) -> str:
        module = self.config.rootpath / super()._split_scope(nodeid)
        return _ONE_CLUSTER if _borrows(module) else str(module)

    def _assign_work_unit(self, node: object) -> None:
        if _ONE_CLUSTER in self.workqueue:
            self.workqueue.move_to_end(_ONE_CLUSTER, last=False)
        super()._assign_work_unit(node)
