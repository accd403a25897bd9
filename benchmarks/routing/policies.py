"""How a slice is chosen: our own ways, and other projects' routers."""

import random
from dataclasses import dataclass
from typing import Any

from serving.config import Affinity
from serving.router.http.protocol import InferenceRequest
from serving.router.scheduling.slice_table import SliceTable
from serving.state.records import SliceRecord

MODEL = "llama-70b"
ENGINES = 4
OURS = "tpu-serving"


class RoundRobin(SliceTable):
    """Slices in turn, whatever they have to do."""

    _turn = 0

    def choose(self, model: str, tried: Any = (), ask: InferenceRequest | None = None) -> SliceRecord:  # noqa: ARG002  as the table's
        entries = [entry for entry in self.entries(model) if entry.replica not in tried]
        self._turn += 1
        return entries[self._turn % len(entries)]


class TwoChoices(SliceTable):
    """Serve's own: of two slices at random the one with fewer of this router's requests."""

    def choose(self, model: str, tried: Any = (), ask: InferenceRequest | None = None) -> SliceRecord:  # noqa: ARG002  as the table's
        entries = [entry for entry in self.entries(model) if entry.replica not in tried]
        return min(
            random.sample(entries, min(2, len(entries))), key=lambda entry: self.in_flight(entry.replica)
        )


@dataclass(frozen=True)
class Policy:
    """One row: how slices are chosen, by whom, and by how many routers."""

    name: str
    routers: int = 1
    peer: str = ""
    shares: bool = False

    def table(self, model: str) -> SliceTable:
        wanted, shapes = {model: ENGINES}, {model: "simulated"}
        if self.name == "round robin":
            return RoundRobin(wanted, shapes)
        if self.name == "power of two":
            return TwoChoices(wanted, shapes)
        affinity = Affinity.NONE if self.name == "least loaded" else Affinity.PREFIX
        key = b"of this benchmark" if self.shares else b""
        return SliceTable(wanted, shapes, affinity=affinity, routers=self.routers, shared_key=key)


POLICIES = (
    Policy("round robin"),
    Policy("least loaded"),
    Policy("power of two"),
    Policy("smg", peer="smg"),
    Policy("vllm-router", peer="vllm-router"),
    Policy(OURS),
    Policy(f"{OURS}, 3 routers", routers=3, shares=True),
    Policy(f"{OURS}, 3 that do not share", routers=3),
)
