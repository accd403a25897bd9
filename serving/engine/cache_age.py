"""How old the content is that an engine's prefix cache still has, from what the engine tells of its blocks. Pure; time is given.

vLLM drops the block that nobody has used for the longest time. So one number describes the whole cache: of the blocks
that it dropped, when the one that it had stored last was stored. What was asked for before then, and not since, is gone.
vLLM does not tell when a block is used again; the blocks that each request adds are dropped with those that it found.
"""

from collections.abc import Hashable, Iterable
from itertools import islice

# Of a real slice's cache; more than so many are left where vLLM's news of dropped blocks were lost.
MOST_BLOCKS = 1 << 18


class CacheAge:
    """When the engine stored each block that its cache has; blocks by their hashes."""

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most = most_blocks
        self._stored_s: dict[Hashable, float] = {}
        self._dropped_s = 0.0

    def stored(self, blocks: Iterable[Hashable], at_s: float) -> None:
        """A block that is stored twice keeps its first time: its copies are told of as one."""
        for block in blocks:
            self._stored_s.setdefault(block, at_s)
        # All in one go: a dictionary looks for its first entry behind those that are gone.
        for block in list(islice(self._stored_s, max(0, len(self._stored_s) - self._most))):
            del self._stored_s[block]

    def removed(self, blocks: Iterable[Hashable]) -> None:
        for block in blocks:
            self._dropped_s = max(self._dropped_s, self._stored_s.pop(block, 0.0))

    def cleared(self, at_s: float) -> None:
        """Nothing is left of what was stored until now."""
        self._stored_s.clear()
        self._dropped_s = at_s

    def age_s(self, now_s: float) -> float:
        """What the engine was last asked for so long ago, or longer, is gone; 0 where it has dropped nothing."""
        return round(now_s - self._dropped_s, 1) if self._dropped_s else 0.0
