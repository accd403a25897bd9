"""The life of a slice replica as a table: state x event -> next state and actions. Pure.

    STARTING --started--> SERVING --notice--> LEAVING --done--> OVER
    SERVING, LEAVING --stop--> STOPPING --done--> OVER
    STARTING --notice--> OVER
    any of them --lost, wrong--> OVER

A slice leaves by plan where a host is to go, or where Serve stops it. Such a slice is never
called lost, even if its engine ends before its last request. One that leaves in its start says so: nobody is to blame its engine.
Nothing happens after OVER: the first event decides how a replica ends.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum, auto


class Life(StrEnum):
    """The state of a replica. LEAVING ends its own process; STOPPING leaves the process to Serve."""

    STARTING = auto()
    SERVING = auto()
    LEAVING = auto()
    STOPPING = auto()
    OVER = auto()


class Event(StrEnum):
    """What happens to a replica.

    FAILED: the engine did not come up. LOST: a host, a process or the engine is gone or silent. NOTICE: a host is to go.
    WRONG: the slice gives wrong tokens. STOP: Serve ends the replica. DONE: no request is open, or time is up.
    """

    STARTED = auto()
    FAILED = auto()
    LOST = auto()
    WRONG = auto()
    NOTICE = auto()
    STOP = auto()
    DONE = auto()


class Action(StrEnum):
    """What a replica does on an event, in this order.

    NOTE_FAILURE: remember it of the slice's host, unless its engine has served for long. FINISH: wait for open requests, at most until a deadline, then DONE. HURRY: bring the deadline forward. LAST_WORDS: end
    the process once clients have their errors. EXIT: end the process now.
    """

    SAY_SERVING = auto()
    SAY_LEAVING = auto()
    KILL = auto()
    SAY_LOST = auto()
    NOTE_FAILURE = auto()
    FORGET = auto()
    FINISH = auto()
    HURRY = auto()
    LAST_WORDS = auto()
    EXIT = auto()


@dataclass(frozen=True)
class Step:
    """A replica's next state, and its actions."""

    life: Life
    actions: tuple[Action, ...] = ()


_A, _E, _L = Action, Event, Life
_STAY = {life: Step(life) for life in Life}

# KILL comes before SAY_LOST: the store may be away, and an engine's remaining processes hold chips.
TABLE: Mapping[tuple[Life, Event], Step] = {
    (_L.STARTING, _E.STARTED): Step(_L.SERVING, (_A.SAY_SERVING,)),
    (_L.STARTING, _E.FAILED): Step(_L.OVER, (_A.KILL, _A.SAY_LOST, _A.NOTE_FAILURE)),
    (_L.STARTING, _E.LOST): Step(_L.OVER, (_A.KILL, _A.SAY_LOST, _A.NOTE_FAILURE, _A.EXIT)),
    (_L.STARTING, _E.WRONG): _STAY[_L.STARTING],
    (_L.STARTING, _E.NOTICE): Step(_L.OVER, (_A.KILL, _A.SAY_LEAVING, _A.EXIT)),
    (_L.STARTING, _E.STOP): Step(_L.OVER, (_A.KILL, _A.FORGET)),
    (_L.STARTING, _E.DONE): _STAY[_L.STARTING],
    (_L.SERVING, _E.STARTED): _STAY[_L.SERVING],
    (_L.SERVING, _E.FAILED): _STAY[_L.SERVING],
    (_L.SERVING, _E.LOST): Step(_L.OVER, (_A.KILL, _A.SAY_LOST, _A.NOTE_FAILURE, _A.LAST_WORDS)),
    (_L.SERVING, _E.WRONG): Step(_L.OVER, (_A.KILL, _A.SAY_LOST, _A.NOTE_FAILURE, _A.LAST_WORDS)),
    (_L.SERVING, _E.NOTICE): Step(_L.LEAVING, (_A.SAY_LEAVING, _A.FINISH)),
    (_L.SERVING, _E.STOP): Step(_L.STOPPING, (_A.SAY_LEAVING, _A.FINISH)),
    (_L.SERVING, _E.DONE): _STAY[_L.SERVING],
    (_L.LEAVING, _E.STARTED): _STAY[_L.LEAVING],
    (_L.LEAVING, _E.FAILED): _STAY[_L.LEAVING],
    (_L.LEAVING, _E.LOST): Step(_L.OVER, (_A.KILL, _A.FORGET, _A.LAST_WORDS)),
    (_L.LEAVING, _E.WRONG): Step(_L.OVER, (_A.KILL, _A.FORGET, _A.NOTE_FAILURE, _A.LAST_WORDS)),
    (_L.LEAVING, _E.NOTICE): Step(_L.LEAVING, (_A.HURRY,)),
    (_L.LEAVING, _E.STOP): Step(_L.STOPPING),
    (_L.LEAVING, _E.DONE): Step(_L.OVER, (_A.KILL, _A.FORGET, _A.LAST_WORDS)),
    (_L.STOPPING, _E.STARTED): _STAY[_L.STOPPING],
    (_L.STOPPING, _E.FAILED): _STAY[_L.STOPPING],
    (_L.STOPPING, _E.LOST): Step(_L.OVER, (_A.KILL, _A.FORGET)),
    (_L.STOPPING, _E.WRONG): Step(_L.OVER, (_A.KILL, _A.FORGET, _A.NOTE_FAILURE)),
    (_L.STOPPING, _E.NOTICE): Step(_L.STOPPING, (_A.HURRY,)),
    (_L.STOPPING, _E.STOP): _STAY[_L.STOPPING],
    (_L.STOPPING, _E.DONE): Step(_L.OVER, (_A.KILL, _A.FORGET)),
    **{(_L.OVER, event): _STAY[_L.OVER] for event in Event},
}
