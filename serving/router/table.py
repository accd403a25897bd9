"""Which slices there are and which one takes the next request. Decisions only: the board's entries and time are given.

Least loaded first, by what this router has in flight there, then by what the slice says it runs: the router's own count
is exact and current, the slice's is up to a beat old. A slice that refused a connection is left out until it has
beaten anew.
"""

from collections import Counter
from collections.abc import Collection, Iterable

from serving.errors import NoSliceError, UnknownModelError
from serving.slices.board import Entry, State, Wanted

_LONGEST_NAME = 200  # of a wrong name that an error repeats


class SliceTable:
    """One router's view of the slices of every model it serves."""

    def __init__(self, wanted: dict[str, int], shapes: dict[str, str]) -> None:
        """For each model: how many slices the YAML asks for, and their shape in words."""
        self.shapes = shapes
        self._wanted = wanted
        self._missing_since: dict[str, float] = {}
        self._entries: dict[str, Entry] = {}
        self._suspects: dict[str, int] = {}
        self._in_flight: Counter[str] = Counter()

    def update(self, entries: Iterable[Entry], now_s: float) -> None:
        """Take over what the board says at this time."""
        self._entries = {entry.replica: entry for entry in entries}
        self._suspects = {
            replica: beat
            for replica, beat in self._suspects.items()
            if replica in self._entries and self._entries[replica].beat <= beat + 1
        }
        self._missing_since = {
            model: self._missing_since.get(model, now_s) for model in self.shapes if self._missing(model)
        }

    def wanted(self, now_s: float) -> list[Wanted]:
        """For each model, what it wants and how long it has missed it."""
        return [
            Wanted(
                model=model,
                shape=shape,
                slices=self._wanted[model],
                missing=self._missing(model),
                missing_for_s=round(now_s - self._missing_since.get(model, now_s), 1),
            )
            for model, shape in self.shapes.items()
        ]

    def _missing(self, model: str) -> int:
        return max(
            0, self._wanted[model] - sum(entry.state is not State.LOST for entry in self.entries(model))
        )

    def entries(self, model: str) -> list[Entry]:
        return [entry for entry in self._entries.values() if entry.model == model]

    def resolve(self, name: object) -> str:
        """The model a request means; one without a name means the only one. Raises UnknownModelError."""
        if name is None and len(self.shapes) == 1:
            return next(iter(self.shapes))
        if isinstance(name, str) and name in self.shapes:
            return name
        asked = (
            "The request names no model"
            if name is None
            else f"The model {repr(name)[:_LONGEST_NAME]} does not exist"
        )
        raise UnknownModelError(f"{asked}. Models served here: {', '.join(self.shapes)}.")

    def choose(self, model: str, tried: Collection[str] = ()) -> Entry:
        """The slice for a request; raises NoSliceError with what the model is waiting for."""
        able = [
            entry
            for entry in self.entries(model)
            if entry.serves and entry.replica not in self._suspects and entry.replica not in tried
        ]
        if not able:
            raise NoSliceError(self._why_none(model))
        return min(
            able,
            key=lambda entry: (self._in_flight[entry.replica], entry.running + entry.waiting, entry.replica),
        )

    def begin(self, replica: str) -> None:
        self._in_flight[replica] += 1

    def end(self, replica: str) -> None:
        self._in_flight[replica] -= 1
        if self._in_flight[replica] <= 0:
            del self._in_flight[replica]

    def suspect(self, replica: str) -> None:
        """Leave a slice out until two beats from now."""
        if replica in self._entries:
            self._suspects[replica] = self._entries[replica].beat

    def in_flight(self, replica: str) -> int:
        return self._in_flight[replica]

    def _why_none(self, model: str) -> str:
        said, comes_back = [], False
        for entry in self.entries(model):
            where = f"one on slice {entry.slice or '?'}"
            if entry.state is State.LOST:
                said.append(f"{where} was lost ({entry.reason})")
            elif entry.state is State.STARTING:
                said.append(f"{where} is {entry.phase}")
                comes_back = True
            elif entry.serves:
                said.append(f"{where} has just failed to answer")
                comes_back = True
        said.append("try again shortly" if comes_back else f"it waits for a free {self.shapes[model]} slice")
        return f"No slice of {model!r} is ready: {'; '.join(said)}."
