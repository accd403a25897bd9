"""Which requests are suspected of ending slices, and which have been found to. Pure; time is given.

Whoever was running on a slice when that slice died is a suspect. A suspect is tried again on a slice where it is the only
suspect, so that a second death has one cause: the request that ends two slices is guilty and is refused for REFUSED_S, on
every router. A suspect that gets its first new token, or its whole answer, is cleared. Others that run beside a suspect on
trial are not suspected of what happens there.

Requests are known by a fingerprint of model, path and body, so that the same request sent again shares its suspicion.
"""

import hashlib
from collections.abc import Iterable, Mapping

from serving.router.http.protocol import InferenceRequest
from serving.state.records import Suspicion

REFUSED_S = 600.0
# A suspicion that nothing came of: the client has gone, or every router was replaced.
SUSPECTED_S = 60.0
_DIGITS = 16


def over(suspicion: Suspicion, now: float) -> bool:
    return now - suspicion.at > (REFUSED_S if suspicion.guilty else SUSPECTED_S)


def fingerprint(request: InferenceRequest) -> str:
    """The same for the same request, whoever sends it."""
    digest = hashlib.sha256(f"{request.model}\0{request.path}\0".encode())
    digest.update(request.body)
    return digest.hexdigest()[:_DIGITS]


class Suspects:
    """One router's suspects, and those that other routers tell of."""

    def __init__(self) -> None:
        self._ours: dict[str, Suspicion] = {}
        self._theirs: dict[str, Suspicion] = {}
        self._cleared: dict[str, float] = {}  # until when blamed, each is cleared
        self._trials: dict[str, str] = {}  # the replica that each suspect on trial runs on

    def __bool__(self) -> bool:
        """Whether anybody is suspected: until then no request needs a fingerprint."""
        return bool(self._ours or self._theirs)

    @property
    def ours(self) -> Mapping[str, Suspicion]:
        """What this router found, for the others to know."""
        return self._ours

    @property
    def guilty(self) -> dict[str, Suspicion]:
        """Those that are refused, whichever router found them."""
        return {name: suspicion for name, suspicion in self._ours.items() if suspicion.guilty}

    def is_guilty(self, name: str) -> bool:
        return name in self._ours and self._ours[name].guilty

    def suspects(self, name: str) -> bool:
        return name in self._ours or name in self._theirs

    def on_trial(self, name: str) -> bool:
        """Whether the same request already runs as a suspect: two would hide each other's guilt."""
        return name in self._trials

    def closed(self) -> set[str]:
        """Replicas on which a suspect is on trial: no other suspect goes there."""
        return set(self._trials.values())

    def sent(self, name: str, replica: str) -> None:
        """A request goes to a replica; if it is a suspect, that is its trial."""
        if self.suspects(name):
            self._trials[name] = replica

    def cleared(self, name: str) -> None:
        """It got something new: what ended its slice was not this request."""
        self._trials.pop(name, None)
        if self.is_guilty(name):
            return
        blamed = [known.pop(name) for known in (self._ours, self._theirs) if name in known]
        if blamed:
            self._cleared[name] = max(suspicion.at for suspicion in blamed)

    def left(self, name: str) -> None:
        """It runs no more, by nobody's fault; it stays suspected for a while."""
        self._trials.pop(name, None)

    def died(self, replica: str, running: Mapping[str, str], now: float) -> list[str]:
        """A replica died under these requests (model by fingerprint); returns those that are guilty now."""
        on_trial = [name for name, where in self._trials.items() if where == replica and name in running]
        for name in on_trial or running:
            self._ours[name] = Suspicion(now, name in on_trial, running[name])
            self._trials.pop(name, None)
        return on_trial

    def take(self, theirs: Iterable[Mapping[str, Suspicion]], now: float) -> None:
        """Take over what the other routers say, and forget what is over. Guilt outlives the router that found it."""
        self._theirs = {}
        for told in theirs:
            for name, suspicion in told.items():
                if over(suspicion, now):
                    continue
                if suspicion.guilty:
                    self._ours.setdefault(name, suspicion)
                elif suspicion.at > self._cleared.get(name, -1.0):
                    self._theirs[name] = suspicion
        self._ours = {name: one for name, one in self._ours.items() if not over(one, now)}
        self._cleared = {name: at for name, at in self._cleared.items() if now - at <= SUSPECTED_S}
