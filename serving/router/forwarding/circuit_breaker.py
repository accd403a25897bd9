"""Which slices are left out because they fail, and when they are tried again. Pure: time is an argument.

A slice is left out at once when it breaks off a connection, and after FAILURES errors in a row. After `circuit_open_s` a
single request tries the slice again. An answer brings the slice back; a failure leaves it out for twice as long as before, up
to `circuit_longest_s`. Any token that the slice gives while it is tried brings it back too: a long answer in one piece would
keep the slice out for minutes.
"""

from dataclasses import dataclass

from serving.timings import TIMINGS, Timings

FAILURES = 3  # a request that makes any engine fail must not close slice after slice


@dataclass
class _Circuit:
    failures: int = 0
    open_s: float = 0.0
    until_s: float = 0.0
    trying: bool = False
    tried_s: float = 0.0


class CircuitBreaker:
    """The circuits of one router's slices. A slice without a circuit is a good one."""

    def __init__(self, timings: Timings = TIMINGS) -> None:
        self._open_s, self._longest_s = timings.circuit_open_s, timings.circuit_longest_s
        self._circuits: dict[str, _Circuit] = {}

    def left_out(self, now_s: float) -> set[str]:
        """Slices that no request is to be sent to."""
        return {
            replica
            for replica, circuit in self._circuits.items()
            if circuit.open_s and (now_s < circuit.until_s or circuit.trying)
        }

    def began(self, replica: str, now_s: float) -> bool:
        """Note a sent request; true where it tries a slice that was left out."""
        circuit = self._circuits.get(replica)
        if circuit and circuit.open_s and now_s >= circuit.until_s:
            circuit.trying, circuit.tried_s = True, now_s
            return True
        return False

    def answered(self, replica: str) -> None:
        """The slice gave an answer, or the beginning of one."""
        self._circuits.pop(replica, None)

    def worked(self, replica: str, at_s: float) -> None:
        """The slice gave a token to some request then, or later."""
        circuit = self._circuits.get(replica)
        if circuit and circuit.trying and circuit.tried_s <= at_s:
            self.answered(replica)

    @property
    def on_trial(self) -> list[str]:
        """Slices that one request tries now."""
        return [replica for replica, circuit in self._circuits.items() if circuit.trying]

    def ended(self, replica: str) -> None:
        """A request ended before its answer, by nobody's fault: it tells nothing of the slice."""
        if circuit := self._circuits.get(replica):
            circuit.trying = False

    def failed(self, replica: str, now_s: float, *, broken: bool) -> None:
        """The slice answered with an error of its own or, `broken`, not at all."""
        circuit = self._circuits.setdefault(replica, _Circuit())
        if now_s < circuit.until_s:
            return  # requests that ran when the slice broke say nothing new
        circuit.failures += 1
        if broken or circuit.trying or circuit.failures >= FAILURES:
            circuit.open_s = min(self._longest_s, circuit.open_s * 2) if circuit.open_s else self._open_s
            circuit.until_s = now_s + circuit.open_s
            circuit.trying = False

    def keep(self, replicas: set[str]) -> None:
        """Forget slices that are gone."""
        self._circuits = {name: circuit for name, circuit in self._circuits.items() if name in replicas}
