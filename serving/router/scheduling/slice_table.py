"""Which slices there are and which one takes the next request. Decisions only: the board's entries and time are given.

What a slice has to do is what this router has in flight there, exact and current, and what the slice says it runs
beyond that for other routers, up to a beat old. What a slice has cached is what this router sent it.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from serving.config import Affinity
from serving.errors import NoSliceError, UnknownModelError
from serving.router.http.protocol import InferenceRequest
from serving.router.scheduling import prefix_index, scoring
from serving.state.records import SliceRecord, SliceState, Wanted
from serving.timings import TIMINGS

_LONGEST_NAME = 200  # of a wrong name that an error repeats
# Of all slices together: 64 MiB of text, some 16 million tokens, in some 40 MB of memory.
_MOST_BLOCKS = 1 << 18
# What it is thought to save to go where a session was last, beyond its text, or where an adapter is on the chips already.
_SESSION_TOKENS = 512
_ADAPTER_TOKENS = 1024
_PREFILL_LEFT = (
    0.75  # of what was sent since the last report, on average; half as much of what was sent before
)
_AT_HOME_SHARE = 0.5  # of a prompt that another router had before, thought to be on its conversation's home


class SliceTable:
    """One router's view of the slices of every model it serves."""

    def __init__(
        self,
        wanted: dict[str, int],
        shapes: dict[str, str],
        *,
        adapters: Mapping[str, str] | None = None,
        pools: Mapping[str, Sequence[str]] | None = None,
        affinity: Affinity = Affinity.PREFIX,
        routers: int = 1,
    ) -> None:
        """For each model: how many slices it starts with, and their shape in words.

        `adapters`: the model of each. `pools`: the keys of each model's pools, the preferred first. `routers`: how many share
        the requests.
        """
        self.shapes = shapes
        self.adapters = adapters or {}
        self._wanted = wanted
        self._ranks = {
            (model, pool): rank for model, keys in (pools or {}).items() for rank, pool in enumerate(keys)
        }
        self._missing_since: dict[str, float] = {}
        self._entries: dict[str, SliceRecord] = {}
        self._in_flight: Counter[str] = Counter()
        self._peak: Counter[str] = Counter()  # of in-flight requests since the last update, and before it
        self._peak_before: Counter[str] = Counter()
        self._others: dict[str, float] = {}  # requests that slices have from elsewhere
        self._prefill: defaultdict[str, float] = defaultdict(
            float
        )  # tokens sent since the last update, and before it
        self._prefill_before: defaultdict[str, float] = defaultdict(float)
        self._paces: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._draws: dict[str, int] = {}
        self._index = prefix_index.PrefixIndex(_MOST_BLOCKS) if affinity is Affinity.PREFIX else None
        self._routers = routers

    def update(self, entries: Iterable[SliceRecord], now_s: float) -> None:
        """Take over what the board says at this time."""
        before, self._entries = self._entries, {entry.replica: entry for entry in entries}
        self._read_loads(before)
        if self._index is not None and before.keys() != self._entries.keys():
            self._index.keep(self._entries)
        self._missing_since = {
            model: self._missing_since.get(model, now_s) for model in self.shapes if self._missing(model)
        }

    def want(self, model: str, slices: int) -> None:
        """Take over how many slices scaling wants."""
        self._wanted[model] = slices

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
            0, self._wanted[model] - sum(entry.state is not SliceState.LOST for entry in self.entries(model))
        )

    def entry(self, replica: str) -> SliceRecord | None:
        return self._entries.get(replica)

    def entries(self, model: str) -> list[SliceRecord]:
        return [entry for entry in self._entries.values() if entry.model == model]

    def resolve(self, name: object) -> str:
        """The model a request means, an adapter's for its name; one without a name means the only one. Raises UnknownModelError."""
        if name is None and len(self.shapes) == 1:
            return next(iter(self.shapes))
        if isinstance(name, str) and name in self.shapes:
            return name
        if isinstance(name, str) and name in self.adapters:
            return self.adapters[name]
        asked = (
            "The request names no model"
            if name is None
            else f"The model {repr(name)[:_LONGEST_NAME]} does not exist"
        )
        raise UnknownModelError(f"{asked}. Models served here: {', '.join([*self.shapes, *self.adapters])}.")

    def choose(
        self, model: str, tried: Collection[str] = (), request: InferenceRequest | None = None
    ) -> SliceRecord:
        """The slice for a request, by what it asks where that is given; raises NoSliceError with what is waited for."""
        able = [entry for entry in self.entries(model) if entry.serves and entry.replica not in tried]
        if not able:
            raise NoSliceError(self.why_none(model))
        trace = prefix_index.NOTHING
        if request and self._index is not None:
            asked = request.fields.get("model")
            trace = prefix_index.trace(
                request, asked if isinstance(asked, str) and asked in self.adapters else None
            )
        at_home = (1 - 1 / self._routers) * _AT_HOME_SHARE * trace.tokens
        chosen = scoring.choose([self._candidate(entry, trace) for entry in able], at_home)
        self._prefill[chosen.replica] += max(0.0, trace.tokens - chosen.saved_tokens)
        if self._index is not None:
            self._index.add(chosen.replica, trace)
        return self._entries[chosen.replica]

    def begin(self, replica: str) -> None:
        self._in_flight[replica] += 1
        self._peak[replica] = max(self._peak[replica], self._in_flight[replica])

    def end(self, replica: str) -> None:
        self._in_flight[replica] -= 1
        if self._in_flight[replica] <= 0:
            del self._in_flight[replica]
            self._prefill.pop(replica, None)
            self._prefill_before.pop(replica, None)

    def in_flight(self, replica: str) -> int:
        return self._in_flight[replica]

    def _candidate(self, entry: SliceRecord, trace: prefix_index.Trace) -> scoring.Candidate:
        replica = entry.replica
        # Every router reads the same report and makes up its share of what it says; if each made up all, all would
        # go to the slice that was idle last.
        load = self._in_flight[replica] + self._others.get(replica, 0.0) / self._routers
        return scoring.Candidate(
            replica,
            load=load * self._weights.get(replica, 1.0),
            prefill_tokens=_PREFILL_LEFT * (self._prefill[replica] + self._prefill_before[replica] / 2),
            waiting=entry.waiting,
            kv_usage=entry.kv_usage,
            # A pool that the YAML has no more comes after those that it has.
            pool=self._ranks.get((entry.model, entry.pool), len(self._ranks)),
            saved_tokens=self._saved_tokens(replica, trace),
            draw=scoring.draw(trace.home, self._draws[replica]) if trace.home else 0,
        )

    def _saved_tokens(self, replica: str, trace: prefix_index.Trace) -> float:
        if self._index is None:
            return 0.0
        matched = (
            self._index.matched(replica, trace.blocks) * prefix_index.BLOCK_BYTES / prefix_index.TOKEN_BYTES
        )
        return (
            matched
            + _SESSION_TOKENS * self._index.has(replica, trace.session)
            + _ADAPTER_TOKENS * self._index.has(replica, trace.adapter)
        )

    def _read_loads(self, before: dict[str, SliceRecord]) -> None:
        """What slices do for others and how fast they are, from this report and the one before."""
        pools: defaultdict[tuple[str, str], dict[str, float]] = defaultdict(dict)
        for replica, entry in self._entries.items():
            if entry.beat != (last := before.get(replica, entry)).beat:
                seconds = (entry.beat - last.beat) * TIMINGS.beat_s
                tokens = entry.output_tokens - last.output_tokens
                pace = scoring.paced(
                    self._paces.get(replica), tokens, min(entry.running, last.running), seconds
                )
                if pace is not None:
                    self._paces[replica] = pace
            if replica in self._paces:
                pools[entry.model, entry.pool][replica] = self._paces[replica]
            # Of what it says it runs, this router may have ended some since: the most it had counts as its own.
            own = max(self._peak[replica], self._peak_before[replica])
            self._others[replica] = max(0.0, entry.running + entry.waiting - own)
        self._prefill, self._prefill_before = defaultdict(float), self._prefill
        self._peak, self._peak_before = self._in_flight.copy(), self._peak
        self._weights = {
            replica: weight for paces in pools.values() for replica, weight in scoring.weights(paces).items()
        }
        for known in (self._paces, self._others, self._draws):
            for gone in known.keys() - self._entries.keys():
                del known[gone]
        for new in self._entries.keys() - self._draws.keys():
            self._draws[new] = prefix_index.everywhere(new.encode())

    def why_none(self, model: str) -> str:
        """What a model without a slice is waiting for."""
        said, comes_back = [], False
        for entry in self.entries(model):
            where = f"one on slice {entry.slice or '?'}"
            if entry.state is SliceState.LOST:
                said.append(f"{where} was lost ({entry.reason})")
            elif entry.state is SliceState.STARTING:
                said.append(f"{where} is {entry.phase}")
                comes_back = True
            elif entry.serves:
                said.append(f"{where} has just failed to answer")
                comes_back = True
        said.append("try again shortly" if comes_back else f"it waits for a free {self.shapes[model]} slice")
        return f"No slice of {model!r} is ready: {'; '.join(said)}."
