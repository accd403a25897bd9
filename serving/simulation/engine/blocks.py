"""The paged KV cache: blocks that sequences hold, share by content, and leave to later sequences that begin alike.

A block is free when no sequence holds it. A free block keeps its content until it is taken, the longest untouched first,
so all free blocks are cache.
"""

from collections.abc import Iterable, Sequence
from itertools import islice


def chain(parent: int, tokens: Sequence[int]) -> int:
    """The name of a full block, from its tokens and the name of the block before it."""
    return hash((parent, *tokens))


class BlockPool:
    """How many sequences hold each block, and which content lies where. Of the contents that gave way, `dropped_s` is when
    the one used last had been taken.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free: dict[int, None] = dict.fromkeys(range(count))  # in the order they will be taken
        self._holders = [0] * count
        self._content: dict[int, int] = {}  # block -> name of its content
        self._lies_in: dict[int, int] = {}  # name of a content -> block
        self._taken_s = [0.0] * count
        self.dropped_s = 0.0

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        return 1 - len(self._free) / self.count

    def cached(self, names: Iterable[int]) -> list[int]:
        """The blocks of the longest beginning of this chain that the cache still has."""
        blocks = []
        for name in names:
            if (block := self._lies_in.get(name)) is None:
                break
            blocks.append(block)
        return blocks

    def take(self, shared: Sequence[int], fresh: int, now_s: float = 0.0) -> list[int] | None:
        """Hold these cached blocks and as many fresh ones; None, and nothing held, where there are too few."""
        revived = sum(not self._holders[block] for block in shared)
        if revived + fresh > len(self._free):
            return None
        for block in shared:
            if not self._holders[block]:
                del self._free[block]
            self._holders[block] += 1
            self._taken_s[block] = now_s
        taken = list(islice(self._free, fresh))
        for block in taken:
            del self._free[block]
            self._holders[block] = 1
            self._forget(block)
            self._taken_s[block] = now_s
        return [*shared, *taken]

    def name(self, block: int, content: int) -> None:
        """A held block is full: others may share it. Where another block has the same content, that block stays shared."""
        if content not in self._lies_in:
            self._content[block] = content
            self._lies_in[content] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Free a sequence's blocks. The last are taken again before the first, which more prompts share."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free[block] = None

    def _forget(self, block: int) -> None:
        content = self._content.pop(block, None)
        if content is not None:
            del self._lies_in[content]
            self.dropped_s = max(self.dropped_s, self._taken_s[block])
