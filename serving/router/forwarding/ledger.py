"""What looking for wrong tokens costs each slice, and who differed from whom, as one router counts it. Pure; time is given."""

from collections import Counter, defaultdict
from collections.abc import Collection

from serving.engine.answer_check import Case

TIME_SHARE = 0.01  # of a slice's time that goes into answers asked again, of all routers together


class Ledger:
    """Of one router among `routers`."""

    def __init__(self, routers: int = 1) -> None:
        self.differed: Counter[frozenset[str]] = Counter()
        self._routers = routers
        self._since_s: dict[str, float] = {}
        self._spent_s: defaultdict[str, float] = defaultdict(float)

    def may_ask(self, replica: str, now_s: float) -> bool:
        """Whether the slice has spent less than its share of the time since this router first saw it."""
        since_s = self._since_s.setdefault(replica, now_s)
        return self._spent_s[replica] <= (now_s - since_s) * TIME_SHARE / self._routers

    def spent(self, replica: str, seconds: float) -> None:
        self._spent_s[replica] += seconds

    def note(self, case: Case) -> None:
        """Count who differed from whom in a case that is over."""
        self.differed.update(frozenset(pair) for pair in case.differing)

    def keep(self, replicas: Collection[str], now_s: float) -> None:
        """Take over which slices there are."""
        for replica in replicas:
            self._since_s.setdefault(replica, now_s)
        for gone in self._since_s.keys() - set(replicas):
            del self._since_s[gone]
            self._spent_s.pop(gone, None)
        for pair in [pair for pair in self.differed if not pair <= set(replicas)]:
            del self.differed[pair]
