"""Which slices read a prompt now, as far as this router knows. Pure: time is given.

A request that comes while its slice reads a prompt waits for the end of that step. Reports of slices are half a second old, a prompt
is read in a tenth of that: so its reading is reckoned, from the speed of the plan.
"""

import heapq
from collections.abc import Mapping

_STEP_S = 0.02  # about: a prompt is read once the step under way has ended
_MOST_S = 10.0  # a plan that takes a slice for too slow must not count its prompts for ever


def read_s(tokens: float, tokens_per_s: float) -> float:
    """Seconds for which a line's prompt keeps a slice."""
    return _STEP_S + tokens / tokens_per_s


class UnreadPrompts:
    """`tokens_per_s`: how quickly a slice reads, by model and pool. Of one that is not named nothing is known."""

    def __init__(self, tokens_per_s: Mapping[tuple[str, str], float]) -> None:
        self._tokens_per_s = tokens_per_s
        self._until_s: dict[int, float] = {}
        self._ends: list[tuple[float, int]] = []

    def began(
        self, slice_: int, of: tuple[str, str], tokens: float, now_s: float, *, fills: bool
    ) -> float | None:
        """A prompt was sent to a slice of this number; the tokens that the slice has still to read. None where its speed is not known.

        Prompts of requests share steps. One that `fills`, a line's, waits for the next.
        """
        if not (speed := self._tokens_per_s.get(of)):
            return None
        before_s = self._until_s.get(slice_, now_s)
        if fills:
            until_s = max(now_s, before_s) + read_s(tokens, speed)
        else:
            until_s = max(now_s + _STEP_S, before_s) + tokens / speed
        self._until_s[slice_] = until_s = min(until_s, now_s + _MOST_S)
        heapq.heappush(self._ends, (until_s, slice_))
        return (until_s - now_s) * speed

    def forget(self, slice_: int) -> None:
        """The slice has no request any more, whether it has read its prompts or not."""
        self._until_s.pop(slice_, None)

    def ended(self, now_s: float) -> list[int]:
        """The slices that have read theirs since the last call."""
        ended = []
        while self._ends and self._ends[0][0] <= now_s:
            until_s, slice_ = heapq.heappop(self._ends)
            if self._until_s.get(slice_) == until_s:  # no other prompt has come since
                del self._until_s[slice_]
                ended.append(slice_)
        return ended
