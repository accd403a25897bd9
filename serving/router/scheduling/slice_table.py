"""Which slices there are and which one takes the next request. Decisions only: the store's entries and time are given.

A slice's load is this router's requests there, exact and current, and what the slice reports beyond those, up to a beat old.
A slice's cache is taken to hold what this router sent, and others that told of it (sharing), less what the slice says it dropped. Pools come in order: the next one where every slice of those before
it is full. What a choice needs of all slices stands in sets and columns (bit_columns): no request looks at each slice.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from serving.config import Affinity
from serving.errors import NoSliceError, UnknownModelError
from serving.router.http.protocol import InferenceRequest
from serving.router.scheduling import prefix_index, scoring, sharing
from serving.router.scheduling.homes import Homes
from serving.router.scheduling.scoring import REQUEST, UNIT_TOKENS
from serving.router.scheduling.unread_prompts import UnreadPrompts
from serving.state.records import SliceRecord, SliceState, Wanted
from serving.timings import TIMINGS

_LONGEST_NAME = 200  # of a wrong model name in an error
# Of all slices together, in some 40 MB: at least the last 16,000 prompts of 2,000 tokens, whatever the number of slices.
_MOST_NAMES = 1 << 19
# What a slice is thought to save that had the session last, beyond its text, or has the adapter on its chips.
_SESSION_TOKENS = 512
_ADAPTER_TOKENS = 1024
# The average part of the tokens sent since the last report that is still to be read; half as much of those sent before.
_PREFILL_LEFT = 0.75
_AT_HOME_SHARE = (
    0.5  # of a prompt that another router had before: the part thought to be on the conversation's home
)
_STEP_NAMES = 1000  # that are forgotten at once: half a millisecond
_MOST_UNREAD = 1 << 20  # tokens of one prompt that another router tells of
_ENDLESS = 1e9  # requests; what is no number or not finite counts as none
_OF_LATE_S = 10.0  # in which a model was asked, by others than batches
_ENTRY_NAMES = 10  # taking over an entry takes as long as forgetting so many names


@dataclass
class _Pool:
    """Sets of one pool's slices. `full` say that they have a queue or no room, `taken` have as many requests as they run at once.

    `homes` has those that serve.
    """

    serving: int = 0
    full: int = 0
    taken: int = 0
    homes: Homes = field(default_factory=Homes)


@dataclass(slots=True)
class _Slice:
    """What a router knows of one slice. `number`: its place in sets and columns."""

    number: int
    bit: int
    entry: SliceRecord
    name: int  # its hash, the same in every router
    # The most requests in flight since the last update, and between the two updates before.
    peak: int = 0
    peak_before: int = 0
    others: float = 0.0  # requests that the slice has from other routers
    # Tokens sent since the last update, and between the two updates before, to a slice of unknown speed.
    prefill: int = 0
    prefill_before: int = 0
    gone_s: float = -math.inf  # what its cache was asked for before then, and not since, is gone
    unread: int = 0  # tokens to be read now, where the slice's speed is known
    pace: float | None = None
    weight: float = 1.0
    seats: float = math.inf
    full: bool = False
    taken: bool = False
    pool: _Pool = field(default_factory=_Pool)

    @property
    def busy(self) -> bool:
        """Whether the next update changes it though its report stays the same."""
        return bool(self.peak or self.peak_before or self.prefill or self.prefill_before)


@dataclass
class _Model:
    """Sets of one model's slices, and its pools by their place in the order of preference."""

    known: int = 0
    lost: int = 0
    pools: dict[int, _Pool] = field(default_factory=dict)


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
        shared_key: bytes = b"",
        seats: Mapping[tuple[str, str], int] | None = None,
        dollars: Mapping[tuple[str, str], float] | None = None,
        reads: Mapping[tuple[str, str], float] | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """For each model: how many slices it starts with, and their shape in words.

        `adapters`: the model of each. `pools`: each model's pool keys, the preferred first. `routers`: how many share the
        requests. `shared_key`: under which they tell each other what they sent; empty where they do not. `seats`: sequences
        that a slice runs at once, by model and pool. `dollars`: what one of these costs an hour. `reads`: tokens of prompts that
        a slice reads a second, which make requests avoid slices that read a prompt now; `clock` is for these alone.
        """
        self._seats = seats or {}
        self.shapes = shapes
        self.adapters = adapters or {}
        self._wanted = wanted
        self._ranks = {
            (model, pool): rank for model, keys in (pools or {}).items() for rank, pool in enumerate(keys)
        }
        self._dollars = {(of[0], self._ranks[of]): cost for of, cost in (dollars or {}).items()}
        self._unread = UnreadPrompts(reads or {})
        self._clock = clock
        self._asked_s: dict[str, float] = {}
        self._missing_since: dict[str, float] = {}
        self._slices: dict[str, _Slice] = {}
        self._numbered: dict[int, _Slice] = {}
        self._models: defaultdict[str, _Model] = defaultdict(_Model)
        self._loads = scoring.Loads()
        self._index = prefix_index.PrefixIndex(_MOST_NAMES)
        self._sends = sharing.Sends(_MOST_NAMES)
        self.news = sharing.Outbox()
        self._shared_key = shared_key
        self._now_s = 0.0
        self._looks_at_text = affinity is Affinity.PREFIX
        self._routers = routers
        self._in_flight: Counter[str] = Counter()
        # By adapter, slices whose engine does not have it.
        self._lacking: defaultdict[str, int] = defaultdict(int)
        self._slow: set[str] = set()

    def update(self, entries: Iterable[SliceRecord], now_s: float) -> None:
        """Take over what the store says at this time."""
        for _ in self.update_in_steps(entries, now_s):
            pass

    def update_in_steps(self, entries: Iterable[SliceRecord], now_s: float) -> Iterator[None]:
        """As `update`, in steps that take half a millisecond; requests may be sent between them."""
        self._now_s = now_s
        there = {entry.replica: entry for entry in entries}
        for gone in self._slices.keys() - there.keys():
            self._leave(gone)
        work = 0
        for names in self._take_all(there.values()):
            work += names
            if work >= _STEP_NAMES:
                work = 0
                yield
        self._forget_read(self._clock())
        self._weigh()
        self._missing_since = {
            model: self._missing_since.get(model, now_s) for model in self.shapes if self._missing(model)
        }

    def at(self, now_s: float) -> None:
        """What is sent from now on is sent at this time, also while the store says nothing."""
        self._now_s = now_s

    def want(self, model: str, slices: int) -> None:
        """Take over how many slices scaling wants."""
        self._wanted[model] = slices

    def wanted(self, now_s: float) -> list[Wanted]:
        """For each model, the slices it wants, and for how long some have been missing."""
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
        there = self._models[model]
        return max(0, self._wanted[model] - (there.known & ~there.lost).bit_count())

    def entry(self, replica: str) -> SliceRecord | None:
        slice_ = self._slices.get(replica)
        return slice_.entry if slice_ else None

    def entries(self, model: str) -> list[SliceRecord]:
        return [slice_.entry for slice_ in self._slices.values() if slice_.entry.model == model]

    def resolve(self, name: object) -> str:
        """The model of a model's or adapter's name; none, or an empty one, means the only model. Raises UnknownModelError."""
        unnamed = name is None or name == ""
        if unnamed and len(self.shapes) == 1:
            return next(iter(self.shapes))
        if isinstance(name, str) and name in self.shapes:
            return name
        if isinstance(name, str) and name in self.adapters:
            return self.adapters[name]
        asked = (
            "The request names no model"
            if unnamed
            else f"The model {repr(name)[:_LONGEST_NAME]} does not exist"
        )
        raise UnknownModelError(f"{asked}. Models served here: {', '.join([*self.shapes, *self.adapters])}.")

    def choose(
        self, model: str, tried: Collection[str] = (), request: InferenceRequest | None = None
    ) -> SliceRecord:
        """The slice for a request, by its text where `request` is given; raises NoSliceError with the reason.

        `begin` then counts it there.
        """
        asked = request.fields.get("model") if request else None
        adapter = asked if isinstance(asked, str) and asked in self.adapters else None
        fills = request is not None and request.fills
        now_s = self._clock()
        if request and not fills:  # a probe of the service's health has none
            self._asked_s[model] = now_s
        self._forget_read(now_s)
        pools = self._able(model, tried, self._lacking.get(adapter, 0) if adapter else 0, fills=fills)
        if not pools:
            raise NoSliceError(self.why_none(model, adapter))
        trace = prefix_index.NOTHING
        if request and self._looks_at_text:
            trace = prefix_index.trace(request, adapter, self._shared_key)
        able = 0
        for _, slices in pools:
            able |= slices
        choice = scoring.choose(able, self._loads, self._saved(trace, able, *pools[0]))
        chosen = self._numbered[_one_of(choice.slices, trace.home)]
        unread = trace.tokens - choice.saved * UNIT_TOKENS
        if unread > 0:
            self._reads(chosen, unread, now_s, fills=fills)
        if trace is not prefix_index.NOTHING:
            news = self._was_sent(chosen, trace.names, self._now_s)
            if news and self._shared_key:
                self.news.put(sharing.Sent(chosen.entry.replica, tuple(news), tokens=max(0, unread)))
        return chosen.entry

    def everything(self) -> tuple[sharing.Sent, ...]:
        """What a router that starts is to know: the names that slices were sent last."""
        return tuple(
            sharing.Sent(self._numbered[number].entry.replica, names, max(0.0, self._now_s - at_s))
            for number, at_s, names in self._sends.latest(sharing.MOST_TOLD)
        )

    def take_news(self, sent: Iterable[sharing.Sent]) -> None:
        """Take over what other routers sent; what they sent to slices that this one does not know is not kept."""
        for entry in sent:
            if slice_ := self._slices.get(entry.replica):
                at_s = self._now_s - max(0.0, entry.age_s)
                self._was_sent(slice_, entry.names, at_s)
                if entry.tokens > 0:
                    self._reads(slice_, int(min(entry.tokens, _MOST_UNREAD)), self._clock(), fills=False)
                    self._reckon(slice_)

    def is_asked(self, model: str) -> bool:
        """Whether requests for a model have come of late that are no lines of batches."""
        return self._clock() - self._asked_s.get(model, -math.inf) < _OF_LATE_S

    def begin(self, replica: str) -> None:
        self._in_flight[replica] += 1
        if slice_ := self._slices.get(replica):
            slice_.peak = max(slice_.peak, self._in_flight[replica])
            self._reckon(slice_)

    def end(self, replica: str) -> None:
        self._in_flight[replica] -= 1
        slice_ = self._slices.get(replica)
        if self._in_flight[replica] <= 0:
            del self._in_flight[replica]
            if slice_:
                slice_.prefill = slice_.prefill_before = slice_.unread = 0
                self._unread.forget(slice_.number)
        if slice_:
            self._reckon(slice_)

    def in_flight(self, replica: str) -> int:
        return self._in_flight[replica]

    def _was_sent(self, slice_: _Slice, names: Sequence[int], at_s: float) -> list[int]:
        """Remember that a slice was sent names at this time; returns those that it was not sent of late."""
        self._index.put(slice_.number, names)
        news = self._sends.note(slice_.number, names, at_s)
        self._index.drop(*self._sends.excess(_STEP_NAMES))
        return news

    def _reads(self, slice_: _Slice, tokens: int, now_s: float, *, fills: bool) -> None:
        """A slice has so much more to read."""
        of = slice_.entry.model, slice_.entry.pool
        unread = self._unread.began(slice_.number, of, tokens, now_s, fills=fills)
        if unread is None:
            slice_.prefill += tokens
        else:
            slice_.unread = int(unread)

    def _forget_read(self, now_s: float) -> None:
        """Prompts that are read are no more than requests."""
        for number in self._unread.ended(now_s):
            if slice_ := self._numbered.get(number):
                slice_.unread = 0
                self._reckon(slice_)

    def _able(self, model: str, tried: Collection[str], out: int, *, fills: bool) -> list[tuple[_Pool, int]]:
        """The pools to choose from, and in each the slices: the first pool with room, or all where none has any.

        `out` has further slices that are left out. The first pool of what only `fills` a seat is the cheapest.
        """
        for replica in tried:
            if slice_ := self._slices.get(replica):
                out |= slice_.bit
        pools = []
        ranked: Iterable[tuple[int, _Pool]] = self._models[model].pools.items()
        if fills:
            ranked = sorted(ranked, key=lambda entry: self._dollars.get((model, entry[0]), math.inf))
        for _, pool in ranked:
            if able := pool.serving & ~out:
                if able & ~pool.full & ~pool.taken:
                    return [(pool, able & ~pool.taken)]
                pools.append((pool, able))
        return pools

    def _saved(self, trace: prefix_index.Trace, able: int, first: _Pool, of_first: int) -> scoring.Saved:
        if trace is prefix_index.NOTHING:
            return _NOTHING_SAVED
        index = self._index
        return scoring.Saved(
            matches=(
                (prefix_index.tokens_of(count) // UNIT_TOKENS, holders)
                for count, holders in index.matches(trace.blocks, able)
            ),
            marks=tuple(
                (worth // UNIT_TOKENS, holders)
                for worth, mark in ((_SESSION_TOKENS, trace.session), (_ADAPTER_TOKENS, trace.adapter))
                if (holders := index.holders(mark) & able)
            ),
            home=lambda: first.homes.of(trace.home, of_first) if trace.home else None,
            at_home=0
            if self._shared_key
            else int((1 - 1 / self._routers) * _AT_HOME_SHARE * trace.tokens) // UNIT_TOKENS,
        )

    def _take_all(self, entries: Iterable[SliceRecord]) -> Iterator[int]:
        """Take over reports, and forget what the slices' caches have lost; after each piece, how many names it was worth."""
        for entry in entries:
            slice_ = self._take(entry)
            yield _ENTRY_NAMES
            while names := self._sends.gone(slice_.number, slice_.gone_s, _STEP_NAMES):
                self._index.drop(slice_.number, names)
                yield len(names)

    def _take(self, entry: SliceRecord) -> _Slice:
        """Take over one slice's report."""
        slice_ = self._slices.get(entry.replica)
        new = slice_ is None
        if slice_ is None:
            slice_ = self._join(entry)
        elif entry is slice_.entry and not slice_.busy:
            return slice_
        last, slice_.entry = slice_.entry, entry
        if entry.beat != last.beat:
            slice_.pace = scoring.paced(
                slice_.pace,
                entry.output_tokens - last.output_tokens,
                min(entry.running, last.running),
                (entry.beat - last.beat) * TIMINGS.beat_s,
            )
        running = entry.running if 0 <= entry.running < _ENDLESS else 0
        waiting = entry.waiting if 0 <= entry.waiting < _ENDLESS else 0
        # The report may count requests of this router that ended since: the router's peak counts as its own.
        slice_.others = max(0.0, running + waiting - max(slice_.peak, slice_.peak_before))
        slice_.prefill, slice_.prefill_before = 0, slice_.prefill
        slice_.peak, slice_.peak_before = self._in_flight.get(entry.replica, 0), slice_.peak
        if entry.prompt_tokens < last.prompt_tokens:
            slice_.gone_s = self._now_s  # another engine, which counts from 0
        elif entry.cache_age_s > 0:
            slice_.gone_s = self._now_s - entry.cache_age_s - sharing.RENEWED_S
        slice_.seats = entry.sequences or self._seats.get((entry.model, entry.pool)) or math.inf
        self._loads.waiting.set(slice_.number, math.ceil(waiting))
        full = scoring.is_full(waiting, entry.kv_usage)
        if new or entry.state is not last.state or entry.pool != last.pool:
            self._sort_out(slice_, last)
            self._sort_in(slice_)
        if full != slice_.full:
            slice_.full = full
            slice_.pool.full ^= slice_.bit
        self._reckon(slice_)
        return slice_

    def _join(self, entry: SliceRecord) -> _Slice:
        number = self._index.join()
        slice_ = _Slice(number, 1 << number, entry, prefix_index.everywhere(entry.replica.encode()))
        self._slices[entry.replica] = self._numbered[number] = slice_
        return slice_

    def _leave(self, replica: str) -> None:
        slice_ = self._slices.pop(replica)
        del self._numbered[slice_.number]
        self._index.leave(slice_.number)
        self._sends.leave(slice_.number)
        self._unread.forget(slice_.number)
        for column in (self._loads.load, self._loads.cost, self._loads.waiting):
            column.set(slice_.number, 0)
        self._sort_out(slice_, slice_.entry)

    def _sort_in(self, slice_: _Slice) -> None:
        """Put a slice into the sets that its report says."""
        entry, bit = slice_.entry, slice_.bit
        model = self._models[entry.model]
        model.known |= bit
        if entry.state is SliceState.LOST:
            model.lost |= bit
        # A pool that is no longer in the YAML comes last.
        rank = self._ranks.get((entry.model, entry.pool), len(self._ranks))
        if rank not in model.pools:
            model.pools = dict(sorted({**model.pools, rank: _Pool()}.items()))
        pool = slice_.pool = model.pools[rank]
        if entry.adapters is not None:
            for adapter, of_model in self.adapters.items():
                if of_model == entry.model and adapter not in entry.adapters:
                    self._lacking[adapter] |= bit
        if entry.serves:
            pool.serving |= bit
            pool.homes.join(slice_.number, slice_.name)

    def _sort_out(self, slice_: _Slice, entry: SliceRecord) -> None:
        """Take a slice out of the sets of its report before."""
        out = ~slice_.bit
        model, pool = self._models[entry.model], slice_.pool
        model.known &= out
        model.lost &= out
        if pool.serving & slice_.bit:
            pool.serving &= out
            pool.homes.leave(slice_.number)
        pool.full &= out
        pool.taken &= out
        for adapter in self._lacking:
            self._lacking[adapter] &= out
        slice_.full = slice_.taken = False

    def _reckon(self, slice_: _Slice) -> None:
        """Work out what a slice has to do."""
        # Every router reads the same report and evens out only its share of that load. If each evened out all of it,
        # all routers would choose the slice that was idle last.
        own = self._in_flight.get(slice_.entry.replica, 0)
        load = int(REQUEST * (own + slice_.others / self._routers) * slice_.weight)
        unread = slice_.unread + _PREFILL_LEFT * (slice_.prefill + slice_.prefill_before / 2)
        self._loads.load.set(slice_.number, load)
        self._loads.cost.set(slice_.number, load + int(unread) // UNIT_TOKENS)
        taken = own + slice_.others >= slice_.seats
        if taken != slice_.taken:
            slice_.taken = taken
            slice_.pool.taken ^= slice_.bit

    def _weigh(self) -> None:
        """Work out which slices are slow for their pool."""
        pools: defaultdict[tuple[str, str], dict[str, float]] = defaultdict(dict)
        for replica, slice_ in self._slices.items():
            if slice_.pace is not None:
                pools[slice_.entry.model, slice_.entry.pool][replica] = slice_.pace
        weights = {
            replica: weight for paces in pools.values() for replica, weight in scoring.weights(paces).items()
        }
        for replica in (self._slow | weights.keys()) & self._slices.keys():
            slow = self._slices[replica]
            slow.weight = weights.get(replica, 1.0)
            self._reckon(slow)
        self._slow = set(weights)

    def why_none(self, model: str, adapter: str | None = None) -> str:
        """Why a model has no slice that serves, or none with this adapter."""
        reasons, comes_back = [], False
        for entry in self.entries(model):
            where = f"one on slice {entry.slice or '?'}"
            if entry.state is SliceState.LOST:
                reasons.append(f"{where} was lost ({entry.reason})")
            elif entry.state is SliceState.STARTING:
                reasons.append(f"{where} is {entry.phase}")
                comes_back = True
            elif entry.serves and adapter and adapter not in (entry.adapters or ()):
                reasons.append(f"{where} does not have the adapter {adapter!r} yet")
                comes_back = True
            elif entry.serves:
                reasons.append(f"{where} has just failed to answer")
                comes_back = True
        reasons.append(
            "try again shortly" if comes_back else f"it waits for a free {self.shapes[model]} slice"
        )
        return f"No slice of {model!r} is ready: {'; '.join(reasons)}."


def _one_of(slices: int, conversation: int) -> int:
    """One of a set, another one for another conversation."""
    start = conversation % slices.bit_length()
    later = slices >> start << start or slices
    return (later & -later).bit_length() - 1


_NOTHING_SAVED = scoring.Saved()
