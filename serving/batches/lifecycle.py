"""A batch's life: a table of state and event. Pure.

`expiring` is ours: to a client such a batch is `finalizing`. Whatever a batch ends as, its files are made before.
"""

from enum import StrEnum


class State(StrEnum):
    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    EXPIRING = "expiring"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def shown(self) -> str:
        """What a client is told."""
        return State.FINALIZING.value if self is State.EXPIRING else self.value


class Event(StrEnum):
    READ = "every line of the input has a row"
    DONE = "every line has a result"
    CANCEL = "the client cancels"
    EXPIRE = "the completion window is over"
    BREAK = "the input can't be read"
    ASSEMBLED = "the files of results are stored"


NEXT: dict[tuple[State, Event], State] = {
    (State.VALIDATING, Event.READ): State.IN_PROGRESS,
    (State.VALIDATING, Event.CANCEL): State.CANCELLING,
    (State.VALIDATING, Event.EXPIRE): State.EXPIRING,
    (State.VALIDATING, Event.BREAK): State.FAILED,
    (State.IN_PROGRESS, Event.DONE): State.FINALIZING,
    (State.IN_PROGRESS, Event.CANCEL): State.CANCELLING,
    (State.IN_PROGRESS, Event.EXPIRE): State.EXPIRING,
    (State.FINALIZING, Event.ASSEMBLED): State.COMPLETED,
    (State.CANCELLING, Event.ASSEMBLED): State.CANCELLED,
    (State.EXPIRING, Event.ASSEMBLED): State.EXPIRED,
}
OVER = frozenset((State.COMPLETED, State.FAILED, State.CANCELLED, State.EXPIRED))
OPEN = frozenset(set(State) - OVER)
ASSEMBLING = frozenset(state for state, event in NEXT if event is Event.ASSEMBLED)


def after(state: State, event: Event) -> State | None:
    """The state that an event leads to; None where it changes nothing."""
    return NEXT.get((state, event))
