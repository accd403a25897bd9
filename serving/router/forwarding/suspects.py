"""Which requests are suspected of ending slices, and which have been found to. Pure; time is given.

A slice died. Of the requests that ran there, a request is a suspect in two cases:

- It had got nothing yet, and the slice had not given tokens for WORKED_S while the request was there.
- It is the second slice that died under it.

A request that was there while the slice went on giving tokens did not end the slice by coming. Silences don't count as such
time, for a deadly program is compiled first. Nor do a token or two, for they may be the deadly request's own. A death is
forgotten once its request had a whole answer, or was on the next slice for longer than any trial takes.

A suspect is tried again once every router has heard of it (HEARD_S), on a slice where it is the only suspect of all routers.
That slice is not the one that died: a router may hear of a suspect before it knows of the death. Three things clear a suspect:

- its first new token, unless two slices have died under it
- its whole answer
- to have run for half as long again, and a second, as on the slice that died

If its slice dies meanwhile, the suspect is guilty, and nobody else is suspected of that death. The guilty are refused for
REFUSED_S, on every router. A suspect is remembered as long: the only slice of a model may take minutes to come back, and
whoever asks the same then would end it again.

Requests are known by a fingerprint of model, path and body: the same request sent again shares its suspicion.

A request with another body may be as deadly: of the same key, with the same parameters. It is of the same kind as a guilty one. Until
one of this kind gets a token or an answer, each counts as a suspect from the start, and a router tries one of them at a time. So it
ends one slice and not two. Once two of a kind are guilty, the next one is tried PACE_S later, and then after twice as long each time.
In a kind that others use too one is answered at once, and no more is asked of it. Once a second of it is guilty, lines of batches of
this kind are held to all that again: they have time, and each deadly one would end two slices.

A key may send other parameters too, or hang up before its slice dies and send another text. Three slices that it has ended so, or seems
to have, put all its requests for that model and path on trial, one at a time. Where its clients have hung up, nobody knows which of
those on a slice was deadly: the next answer of the key ends that.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from serving.metrics.table import NO_KEY
from serving.router.forwarding.slice_timing import WORKED_S
from serving.router.http.protocol import InferenceRequest
from serving.state.records import Suspicion
from serving.timings import TIMINGS

HEARD_S = TIMINGS.heard_s
REFUSED_S = 600.0
PACE_S = 60.0  # by then a slice mostly serves again
LONGEST_S = 60.0  # that is counted of a request that gets nothing; its trial is half as long again
_LONGER, _LONGER_S = 1.5, 1.0
_LONGEST_TRIAL_S = _LONGER * WORKED_S + _LONGER_S  # of a suspect that had got tokens
_DIGITS = 16
_MOST_BLAMED = 4096  # for their kind
_MOST_OF_A_KEY = 3  # slices that its requests may end before all of them are on trial
_TOLD_BELOW = 100  # numbers of a parameter that tell kinds apart: larger ones may differ with every request


@dataclass(frozen=True)
class Flight:
    """A request on a slice: what it is known by, since when it has been there, and whether it has got anything.

    Without a `request` its client has hung up; `whose` it was, if it came with a key.
    """

    name: str
    model: str
    since_s: float
    answered: bool = False
    request: InferenceRequest | None = None
    whose: str = ""


@dataclass(frozen=True)
class _Trial:
    replica: str
    until_s: float
    hung_up: bool = False


def over(suspicion: Suspicion, now: float) -> bool:
    return now - suspicion.at > REFUSED_S


def fingerprint(request: InferenceRequest) -> str:
    """The same for the same request, whoever sends it."""
    digest = hashlib.sha256(f"{request.model}\0{request.path}\0".encode())
    digest.update(request.body)
    return digest.hexdigest()[:_DIGITS]


def kind_of(request: InferenceRequest) -> str:
    """The same for requests of one key for one model and path with the same parameters, whatever their texts and large numbers are."""
    digest = hashlib.sha256()
    try:
        fields = request.all_fields()
    except ValueError:  # a form
        fields = {}
    for name, value in sorted(fields.items()):
        tells = value is None or (isinstance(value, int) and abs(value) < _TOLD_BELOW)
        digest.update(f"{name}={value if tells else type(value).__name__}\0".encode())
    return f"{_whose(request)}{digest.hexdigest()[:_DIGITS]}"


def whose(request: InferenceRequest) -> str:
    """The same for all requests of one key for one model and path; empty without a key."""
    return "" if request.key in ("", NO_KEY) else _whose(request)


def _whose(request: InferenceRequest) -> str:
    """What a kind begins with: most requests need not be parsed for it."""
    digest = hashlib.sha256(f"{request.key}\0{request.model}\0{request.path}".encode())
    return f"{digest.hexdigest()[:_DIGITS]}-"


class Suspects:
    """One router's suspects, and those that other routers tell of. `now` is seconds since 1970, which routers share."""

    def __init__(self, heard_s: float = HEARD_S) -> None:
        """`heard_s`: nothing where this router is the only one."""
        self._heard_s = heard_s
        self._ours: dict[str, Suspicion] = {}
        self._guilty: dict[str, Suspicion] = {}  # those of `_ours` that are
        self._theirs: dict[str, Suspicion] = {}
        self._cleared: dict[str, float] = {}  # until when blamed, each is cleared
        # Replicas that died under a request, and when the last one did.
        self._deaths: dict[str, tuple[frozenset[str], float]] = {}
        self._trials: dict[str, _Trial] = {}
        self._keys: frozenset[str] = frozenset()  # whose requests are all on trial
        self._sound: dict[str, float] = {}  # until when its clients' hanging up counts for nothing, by key

    def __bool__(self) -> bool:
        """Whether anybody is suspected or on trial: until then no request needs a fingerprint."""
        return bool(self._ours or self._theirs or self._trials)

    @property
    def remembers(self) -> bool:
        """Whether a whole answer may change anything: a slice has died of late."""
        return bool(self._deaths or self._ours or self._theirs or self._trials)

    @property
    def ours(self) -> Mapping[str, Suspicion]:
        """What this router found, for the others to know. They blame requests for their kind themselves."""
        return {
            name: suspicion for name, suspicion in self._ours.items() if suspicion.guilty or suspicion.replica
        }

    @property
    def guilty(self) -> Mapping[str, Suspicion]:
        """Those that are refused, whichever router found them. Thousands may wait for a trial, and each looks ten times a second."""
        return self._guilty

    def is_guilty(self, name: str) -> bool:
        return name in self._guilty

    def suspects(self, name: str, now: float) -> bool:
        """Whether it is to be tried. Without the store nothing is forgotten, and no trial begins."""
        return any(name in known and not over(known[name], now) for known in (self._ours, self._theirs))

    def died_under(self, name: str) -> set[str]:
        """The replicas for whose death it is suspected. One may still be taken for alive here."""
        blamed = [known[name] for known in (self._ours, self._theirs) if name in known]
        return {replica for suspicion in blamed for replica in (suspicion.replica, *suspicion.before)}

    @property
    def ended(self) -> set[str]:
        """Replicas that requests have ended which are guilty of it."""
        return {replica for name in self.guilty for replica in self.died_under(name)}

    @property
    def kinds(self) -> set[str]:
        """Kinds of the guilty of which none was answered."""
        guilty = self.guilty.values()
        return {suspicion.kind for suspicion in guilty if suspicion.kind} - {
            suspicion.kind for suspicion in guilty if suspicion.answered
        }

    @property
    def _kinds_of_lines(self) -> set[str]:
        """As `kinds`, and those of which several are guilty though others were answered."""
        counts = Counter(suspicion.kind for suspicion in self.guilty.values() if suspicion.kind)
        return self.kinds | {kind for kind, count in counts.items() if count > 1}

    def kind(self, request: InferenceRequest) -> str:
        """The kind of a request, where it counts as a suspect for that, or its key where all of the key's do; else nothing."""
        kinds = self._kinds_of_lines if request.fills else self.kinds
        if self._keys and (key := whose(request)) in self._keys:
            return key
        begins = _whose(request) if kinds else ""
        if not any(kind.startswith(begins) for kind in kinds):
            return ""
        kind = kind_of(request)
        return kind if kind in kinds else ""

    def of_kind(self, name: str, kind: str) -> None:
        """Note the kind of a guilty request."""
        answered = any(suspicion.answered for suspicion in self.guilty.values() if suspicion.kind == kind)
        self._condemn(name, replace(self._ours[name], kind=kind, answered=answered))
        self._look_at_keys()

    def _condemn(self, name: str, suspicion: Suspicion) -> None:
        self._ours[name] = self._guilty[name] = suspicion

    def blame(self, name: str, kind: str, model: str, now: float) -> None:
        """A request is suspected for its kind alone."""
        if name in self._ours or name in self._theirs or len(self._ours) >= _MOST_BLAMED:
            return
        alike = [suspicion.ran_s for suspicion in self.guilty.values() if suspicion.kind.startswith(kind)]
        if not alike:
            known = (*self._ours.values(), *self._theirs.values())
            alike = [suspicion.ran_s for suspicion in known if suspicion.hung == kind]
        self._ours[name] = Suspicion(now, False, model, max(alike, default=0.0), kind=kind)

    def paced_s(self, kind: str, now: float) -> float:
        """For how many seconds no request of this kind is tried."""
        ends = [suspicion.at for suspicion in self.guilty.values() if suspicion.kind.startswith(kind)]
        if len(ends) < 2:
            return 0.0
        pause_s = PACE_S * 2.0 ** (len(ends) - 2)
        return min(pause_s, max(0.0, max(ends) + pause_s - now))  # the clock may have been put back

    def paced(self, name: str, now: float) -> float:
        """As `held_s`; a request that has to wait is forgotten."""
        if name in self._trials or not (wait_s := self.held_s(name, now)):
            return 0.0
        self._ours.pop(name, None)
        return wait_s

    def held_s(self, name: str, now: float) -> float:
        """For how many seconds no request of its kind is tried."""
        kind = self._kind(name)
        return self.paced_s(kind, now) if kind else 0.0

    def sound(self, kind: str) -> None:
        """A request of this kind was answered: those that are suspected for the kind alone are not any more."""
        if kind in self._keys:
            self._sound[kind] = max((at for at, _ in self._hung()[kind]), default=-1.0)
            self._look_at_keys()
            is_sound = kind not in self._keys
        else:
            is_sound = kind in self.kinds
        alike = [(name, suspicion) for name, suspicion in self._ours.items() if suspicion.kind == kind]
        for name, suspicion in alike if is_sound else ():
            if suspicion.guilty:
                self._condemn(name, replace(suspicion, answered=True))
            else:
                del self._ours[name]
                self._cleared[name] = suspicion.at

    def _hung(self) -> Mapping[str, list[tuple[float, str]]]:
        """By key, when slices died on which its clients had hung up, and which: those that nobody is guilty of."""
        ended, deaths = self.ended, defaultdict(list)
        for suspicion in (*self._ours.values(), *self._theirs.values()):
            if suspicion.hung and not suspicion.guilty and suspicion.replica not in ended:
                deaths[suspicion.hung].append((suspicion.at, suspicion.replica))
        return deaths

    def _look_at_keys(self) -> None:
        """Whose requests are all on trial from now on."""
        counts = Counter(
            f"{suspicion.kind.partition('-')[0]}-" for suspicion in self.guilty.values() if suspicion.kind
        )
        for key, deaths in self._hung().items():
            counts[key] += len({replica for at, replica in deaths if at > self._sound.get(key, -1.0)})
        self._keys = frozenset(key for key, count in counts.items() if count >= _MOST_OF_A_KEY)

    def _kind(self, name: str) -> str:
        return next((known[name].kind for known in (self._ours, self._theirs) if name in known), "")

    def deaths(self, name: str) -> int:
        """How many slices have died under it of late."""
        return len(self._died(name))

    def _died(self, name: str) -> frozenset[str]:
        replicas, _ = self._deaths.get(name, (frozenset(), 0.0))
        return replicas

    def on_trial(self, name: str) -> bool:
        """Whether the same request, or one of its kind, runs on trial already: two would hide each other's guilt."""
        kind = self._kind(name)
        return name in self._trials or bool(kind and any(self._kind(other) == kind for other in self._trials))

    def heard_in_s(self, name: str, now: float) -> float:
        """After how many seconds every router has heard of the suspect; another host's clock may be hours ahead.

        Who is suspected for its kind alone is known nowhere else.
        """
        blamed = [known[name] for known in (self._ours, self._theirs) if name in known]
        waits = [suspicion.at + self._heard_s - now for suspicion in blamed if suspicion.replica]
        return max((min(self._heard_s, wait_s) for wait_s in waits), default=0.0)

    def closed(self) -> set[str]:
        """Replicas on which a suspect of this router is on trial: no other suspect goes there."""
        return {trial.replica for trial in self._trials.values()}

    def tried(self, name: str, replica: str, now: float) -> None:
        """A suspect goes to a replica on which it is the only one."""
        self._trials[name] = _Trial(replica, now + self.trial_s(name))

    def answered(self, name: str, *, whole: bool) -> str | None:
        """It got its first token, or its whole answer. Returns the replica that it was tried on, if the trial is over.

        A token clears nobody under whom two slices have died: their next step may end the slice as well.
        """
        if whole:
            self._deaths.pop(name, None)
        return None if self.deaths(name) > 1 else self.cleared(name)

    def cleared(self, name: str) -> str | None:
        """What ended its slice was not this request. Returns the replica that it was tried on."""
        trial = self._trials.pop(name, None)
        if not self.is_guilty(name):
            blamed = [known.pop(name) for known in (self._ours, self._theirs) if name in known]
            if blamed:
                self._cleared[name] = max(suspicion.at for suspicion in blamed)
        return trial.replica if trial else None

    def lives(self, replica: str) -> None:
        """The replica was only late to say so: nobody has ended it."""
        for known in (self._ours, self._theirs):
            for name in [
                name
                for name, suspicion in known.items()
                if suspicion.replica == replica and not suspicion.guilty
            ]:
                self._cleared[name] = max(known.pop(name).at, self._cleared.get(name, -1.0))
        deaths = {name: (died - {replica}, at) for name, (died, at) in self._deaths.items()}
        self._deaths = {name: (died, at) for name, (died, at) in deaths.items() if died}

    def left(self, name: str, replica: str) -> str | None:
        """It runs no more there, by nobody's fault; it stays suspected for a while. Returns the replica if its trial there is over."""
        trial = self._trials.get(name)
        if trial is None or trial.replica != replica or trial.hung_up:
            return None
        del self._trials[name]
        return replica

    def hung_up(self, name: str, replica: str) -> None:
        """Its client has gone. What the slice was sent may still end it: a trial goes on to its end."""
        trial = self._trials.get(name)
        if trial and trial.replica == replica:
            self._trials[name] = replace(trial, hung_up=True)

    def trial_s(self, name: str) -> float:
        """For how long a suspect is tried: longer than it ran on the slice that died."""
        ran_s = [known[name].ran_s for known in (self._ours, self._theirs) if name in known]
        return _LONGER * max(ran_s, default=0.0) + _LONGER_S

    def stood_still(self, for_s: float) -> None:
        """So much of the time says nothing of slices on trial: this router stood still, or the clock jumped, by less than nothing too."""
        self._trials = {
            name: replace(trial, until_s=trial.until_s + for_s) for name, trial in self._trials.items()
        }

    def survivors(self, now: float) -> list[str]:
        """Suspects that have run on trial for longer than on the slice that died, also where the suspicion is over meanwhile."""
        return [name for name, trial in self._trials.items() if now > trial.until_s]

    def outlived(self, name: str) -> str | None:
        """Its slice has outlived the trial; that clears it unless its client hung up. Returns the replica that it was tried on."""
        trial = self._trials[name]
        return self.cleared(name) if not trial.hung_up else self._trials.pop(name).replica

    def died(self, replica: str, running: Iterable[Flight], now: float, worked_since_s: float) -> list[str]:
        """A replica died under these requests; returns those that are guilty now.

        Who came before `worked_since_s` has been there while it gave tokens for WORKED_S.
        """
        flights = {flight.name: flight for flight in running}
        on_trial = [
            name
            for name in flights
            if name in self._trials
            and self._trials[name].replica == replica
            and replica not in self.died_under(name)
        ]
        for name in on_trial:
            del self._trials[name]
            before = sorted(self.died_under(name))
            ran_s = max(0.0, min(LONGEST_S, now - flights[name].since_s))
            kind = self._kind(name)
            self._condemn(name, Suspicion(now, True, flights[name].model, ran_s, replica, before, kind))
        if on_trial:
            self._look_at_keys()
            return on_trial
        for name, flight in flights.items():
            stayed = flight.since_s <= worked_since_s and now - flight.since_s > _LONGEST_TRIAL_S
            died = frozenset() if stayed else self._died(name) - {replica}
            self._deaths[name] = died | {replica}, now
            new = not flight.answered and flight.since_s > worked_since_s
            ran_s = min(LONGEST_S if new else WORKED_S, now - flight.since_s)
            if (died or new) and not self.is_guilty(name):
                before = sorted(self.died_under(name) - {replica})
                hung = "" if flight.request else flight.whose
                self._ours[name] = Suspicion(now, False, flight.model, ran_s, replica, before, hung=hung)
        self._look_at_keys()
        return []

    def take(self, theirs: Iterable[Mapping[str, Suspicion]], now: float) -> None:
        """Take over what the other routers say, and forget what is over. Guilt outlives the router that found it."""
        self._theirs = {}
        for of_router in theirs:
            for name, suspicion in of_router.items():
                if over(suspicion, now):
                    continue
                if suspicion.guilty:
                    self._take_guilty(name, suspicion)
                elif suspicion.at > self._cleared.get(name, -1.0):
                    self._theirs[name] = suspicion
        self._ours = {name: suspicion for name, suspicion in self._ours.items() if not over(suspicion, now)}
        self._guilty = {name: suspicion for name, suspicion in self._ours.items() if suspicion.guilty}
        self._cleared = {name: at for name, at in self._cleared.items() if now - at <= REFUSED_S}
        self._deaths = {
            name: (died, at) for name, (died, at) in self._deaths.items() if now - at <= REFUSED_S
        }
        self._sound = {key: at for key, at in self._sound.items() if now - at <= REFUSED_S}
        self._look_at_keys()

    def _take_guilty(self, name: str, suspicion: Suspicion) -> None:
        """A kind of which any router has answered one is an answered one for all."""
        if suspicion.answered:
            self.sound(suspicion.kind)
        known = self._ours[name] if self.is_guilty(name) else suspicion
        answered = known.answered or suspicion.answered
        self._condemn(name, replace(known, kind=known.kind or suspicion.kind, answered=answered))
