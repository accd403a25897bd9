"""Many slices and many routers in one process and faked time: real boards, liveness, tables, timing and breakers, no socket.

A slice here is what it writes into the store. A router here is the parts of `RouterCore` that decide, fed as its store loop feeds
them. Scaling can be put on top: `Fleet.slices` and `Fleet.records` are what a policy reads.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from serving.router.forwarding.circuit_breaker import CircuitBreaker
from serving.router.forwarding.slice_timing import SliceTiming
from serving.router.http.protocol import InferenceRequest
from serving.router.scheduling.slice_table import SliceTable
from serving.state.board import Board, beat, fixed_part
from serving.state.liveness import Liveness
from serving.state.records import SliceRecord, SliceState
from serving.timings import TIMINGS

MODEL, SHAPE = "llama", "v6e 2x4"


@dataclass
class Router:
    """One router's view of the slices, as of its last look at the store."""

    table: SliceTable
    board: Board = field(default_factory=Board)
    liveness: Liveness = field(default_factory=lambda: Liveness(asks=True))
    timing: SliceTiming = field(default_factory=SliceTiming)
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)

    def look(
        self, beats: Mapping[str, bytes], fixed: Mapping[str, bytes], dead: Collection[str], now_s: float
    ) -> None:
        """A beat of the router: read the store, ask silent slices, of which the dead do not answer."""
        wanted = self.board.changed(beats)
        for _ in self.board.take(beats, {name: fixed[name] for name in wanted}):
            pass
        entries, _ = self.liveness.slices(self.board.slices, now_s)
        self.table.update(entries, now_s)
        self.timing.settle(entries, now_s)
        for replica in self.breaker.on_trial:
            self.breaker.worked(replica, self.timing.moved_s(replica) - TIMINGS.beat_s)
        for slice_ in self.liveness.silent:
            if slice_.replica in dead:
                self.liveness.unanswered(slice_.replica)
            else:
                self.liveness.answered(slice_.replica, now_s)

    def serving(self) -> set[str]:
        """The slices that this router sends requests to."""
        return {entry.replica for entry in self.table.entries(MODEL) if entry.serves}

    def send(self, text: str) -> str:
        """Choose a slice for a prompt, and count the request there."""
        replica = self.table.choose(MODEL, (), prompt(text)).replica
        self.table.begin(replica)
        return replica


def prompt(text: str) -> InferenceRequest:
    """A request for completions of a text."""
    return InferenceRequest(MODEL, "/v1/completions", b"", {"prompt": text})


class Fleet:
    """So many slices and so many routers of one model, at beats of the store's."""

    def __init__(self, slices: int, routers: int) -> None:
        self.now_s = 0.0
        self.slices = {
            name: SliceRecord(name, MODEL, SliceState.SERVING, "serving", SHAPE, address=f"http://{name}")
            for name in (f"slice-{number}" for number in range(slices))
        }
        self.routers = [
            Router(SliceTable({MODEL: slices}, {MODEL: SHAPE}, routers=routers)) for _ in range(routers)
        ]
        self.dead: set[str] = set()
        self._fixed = {name: fixed_part(record, 1) for name, record in self.slices.items()}
        self._beats: dict[str, bytes] = {}
        self.run(1)

    def records(self) -> list[SliceRecord]:
        """What the slices say of themselves now, whether or not it is in the store yet."""
        return list(self.slices.values())

    def set(self, replica: str, **load: float) -> None:
        """Change what a slice reports from now on."""
        self.slices[replica] = replace(self.slices[replica], **load)

    def run(self, beats: int, *, written: bool = True, read: bool = True) -> None:
        """Let beats pass; `written`: slices' puts arrive, `read`: routers' reads succeed."""
        for _ in range(beats):
            self.now_s += TIMINGS.beat_s
            for name, record in self.slices.items():
                if name not in self.dead:
                    self.slices[name] = replace(record, beat=record.beat + 1)
            if written:
                self._beats |= {
                    name: beat(record, 1) for name, record in self.slices.items() if name not in self.dead
                }
            if read:
                for router in self.routers:
                    router.look(self._beats, self._fixed, self.dead, self.now_s)
