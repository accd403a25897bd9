"""A model's traffic, from the counters of slices and routers: requests a second, their trend, and mean lengths.

Pure. A counter that falls has started anew.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from serving.scaling.capacity import Lengths
from serving.state.records import Demand, SliceRecord, SliceState

# A rate is averaged over a tenth of the lead time: a shorter burst is no reason to order a slice, and a longer average
# would delay the order. The slow average shows where the fast one is heading.
_SHARE_OF_LEAD = 0.1
_FASTEST_S, _SLOWEST_S = 5.0, 60.0
_SLOWER = 6.0
_LENGTHS_S = 600.0
# A trend is followed up to this multiple of the present rate: beyond it is guesswork.
_STEEPEST = 1.25
# The assumed lengths count as so many requests.
_ASSUMED_REQUESTS = 10.0
# A share of 1, and room for rounding.
_MOST_KV = 1.01
# Slices and routers that are out of sight for a while count on from where they were when they are back.
_MOST_REMEMBERED = 4096


_T = TypeVar("_T")


class NonsenseError(ValueError):
    """A report holds an impossible value: negative, not a number, or missing."""


# Of a router's lines of batches since its start: tokens of prompts and answers, lines due, lines that ended.
_Filled = tuple[float, float, float, float]


@dataclass(frozen=True)
class Sums:
    """What the reports of one moment add up to."""

    running: float = 0.0
    waiting: float = 0.0
    kv_usage: float = 0.0  # summed over slices that serve
    held: float = 0.0
    serving: Mapping[str, int] = field(default_factory=dict)  # slices that serve, by pool
    starting: tuple[SliceRecord, ...] = ()
    fresh: tuple[SliceRecord, ...] = ()  # serving, and seen for the first time
    ready: frozenset[str] = frozenset()  # replicas that serve
    lost: tuple[SliceRecord, ...] = ()
    leaving: frozenset[str] = frozenset()  # replicas that go by plan
    prompt_tokens: float = 0.0  # since the last report; so are those below
    output_tokens: float = 0.0
    arrived: float = 0.0
    finished: float = 0.0
    counted: bool = False  # whether routers say how many requests arrived
    filling: float = 0.0  # lines of batches that run; none of the sums has any part of them
    due: float = 0.0  # lines of batches among `arrived`, that slices are ordered for


@dataclass(frozen=True)
class Traffic:
    """Estimates that follow the reports. A weight is the share of data in an average that started at zero."""

    fast: float = 0.0
    slow: float = 0.0
    fast_weight: float = 0.0
    slow_weight: float = 0.0
    over_s: float = _FASTEST_S
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    finished: float = 0.0
    tokens: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    requests: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    filled: Mapping[str, _Filled] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Requests a second."""
        return self.fast / self.fast_weight if self.fast_weight else 0.0

    @property
    def ended_per_s(self) -> float:
        """Requests that ended a second, over the last minutes."""
        return self.finished / _LENGTHS_S

    @property
    def known(self) -> bool:
        """Whether lengths rest on more requests than are assumed."""
        return self.finished > _ASSUMED_REQUESTS

    @property
    def lengths(self) -> Lengths:
        assumed = Lengths()
        finished = self.finished + _ASSUMED_REQUESTS
        return Lengths(
            (self.prompt_tokens + _ASSUMED_REQUESTS * assumed.prompt) / finished,
            (self.output_tokens + _ASSUMED_REQUESTS * assumed.answer) / finished,
        )

    def ahead(self, seconds: float) -> float:
        """Requests a second after so many seconds, if the trend holds; never less than now."""
        now = self.rate
        if not self.slow_weight:
            return now
        # The two averages lag a straight line by their time constants (less while they are young).
        lag = self.over_s * (_SLOWER * self.slow_weight - self.fast_weight)
        slope = (now - self.slow / self.slow_weight) / max(lag, self.over_s)
        return min(max(now, now + slope * (self.over_s + seconds)), _STEEPEST * now)


def add_up(
    entries: Sequence[SliceRecord], demands: Sequence[Demand], before: Traffic
) -> tuple[Sums, Traffic]:
    """The sums of the reports, and the counters to compare the next ones with; raises NonsenseError."""
    running = waiting = kv_usage = prompt = output = 0.0
    tokens: dict[str, tuple[float, float]] = {}
    by_state: defaultdict[SliceState, list[SliceRecord]] = defaultdict(list)
    fresh = []
    known, serves = before.tokens, SliceState.SERVING
    try:
        for entry in entries:
            at_once, queued, kv = entry.running, entry.waiting, entry.kv_usage
            computed, written = entry.prompt_tokens - entry.cached_tokens, entry.output_tokens
            # What is not a number fails every comparison; infinity is found in the sums.
            if not (at_once >= 0 and queued >= 0 and 0 <= kv <= _MOST_KV and computed >= 0 and written >= 0):
                raise NonsenseError(_nonsense(entry))
            running += at_once
            waiting += queued
            tokens[entry.replica] = (computed, written)
            by_state[entry.state].append(entry)
            if entry.state is serves:
                kv_usage += kv
            previous = known.get(entry.replica)
            if previous is None:
                fresh.append(entry)
            elif computed >= previous[0] and written >= previous[1]:
                prompt += computed - previous[0]
                output += written - previous[1]
        held, arrived, finished, requests = _requests(demands, before.requests)
        filling, (filled_prompt, filled_output, due, ended), filled = _fills(demands, before.filled)
    except TypeError:
        raise NonsenseError(_missing(entries, demands)) from None
    if not running + waiting + prompt + output < math.inf:
        raise NonsenseError(next(_nonsense(entry) for entry in entries if _endless(entry)))
    # A slice seen for the first time has worked since the last report, unless this report is the first.
    if known:
        prompt += sum(tokens[entry.replica][0] for entry in fresh)
        output += sum(tokens[entry.replica][1] for entry in fresh)
    # Lines of batches take seats that nobody else wants: no slice is held or ordered for them.
    wanted = max(0.0, running - filling)
    sums = Sums(
        running=wanted,
        waiting=waiting,
        kv_usage=kv_usage * wanted / running if running else kv_usage,
        held=held,
        serving=Counter(entry.pool for entry in by_state[serves]),
        starting=tuple(by_state[SliceState.STARTING]),
        fresh=tuple(entry for entry in fresh if entry.state is serves),
        ready=frozenset(entry.replica for entry in by_state[serves]),
        lost=tuple(by_state[SliceState.LOST]),
        leaving=frozenset(entry.replica for entry in by_state[SliceState.DRAINING]),
        prompt_tokens=max(0.0, prompt - filled_prompt),
        output_tokens=max(0.0, output - filled_output),
        arrived=arrived + due,
        finished=finished + ended,
        counted=any(demand.arrived or demand.expected for demand in demands) or filling > 0,
        filling=filling,
        due=due,
    )
    return sums, replace(
        before,
        tokens=_remembered(before.tokens, tokens),
        requests=requests,
        filled=_remembered(before.filled, filled),
    )


def _remembered(before: Mapping[str, _T], now: Mapping[str, _T]) -> dict[str, _T]:
    """What was last seen of each, those seen now last; the ones longest out of sight go."""
    unseen = [name for name in before if name not in now][-_MOST_REMEMBERED:]
    return {**{name: before[name] for name in unseen}, **now}


def _requests(
    demands: Sequence[Demand], before: Mapping[str, tuple[float, float]]
) -> tuple[float, float, float, dict[str, tuple[float, float]]]:
    held = arrived = finished = 0.0
    requests: dict[str, tuple[float, float]] = {}
    for demand in demands:
        unanswered = demand.refused + demand.abandoned + demand.held + demand.in_flight
        done = demand.arrived - unanswered
        if not 0 <= demand.arrived + demand.held + demand.in_flight < math.inf or demand.held < 0:
            raise NonsenseError(
                f"router {demand.router} reports {demand.arrived} arrived, {demand.held} held"
            )
        held += demand.held
        requests[demand.router] = (demand.arrived, done)
        previous = before.get(demand.router)
        if previous is not None:
            arrived += demand.arrived - previous[0] if demand.arrived >= previous[0] else demand.arrived
            finished += max(0.0, done - previous[1]) if demand.arrived >= previous[0] else 0.0
    return held, arrived, finished, requests


def _fills(
    demands: Sequence[Demand], before: Mapping[str, _Filled]
) -> tuple[float, _Filled, dict[str, _Filled]]:
    """Lines of batches that run, and since the last report: the tokens of those that ended, lines due, and lines that ended."""
    filling, sums = 0.0, [0.0] * 4
    filled: dict[str, _Filled] = {}
    for demand in demands:
        now = (
            demand.filled_prompt_tokens,
            demand.filled_output_tokens,
            demand.expected,
            demand.filled,
        )
        if not 0 <= demand.filling + sum(now) < math.inf:
            raise NonsenseError(f"router {demand.router} reports {demand.filling} lines of batches")
        filling += demand.filling
        filled[demand.router] = now
        previous = before.get(demand.router, (0.0, 0.0, 0.0, 0.0) if before else now)
        if all(new >= old for new, old in zip(now, previous, strict=True)):
            sums = [total + new - old for total, new, old in zip(sums, now, previous, strict=True)]
    prompt, output, due, ended = sums
    return filling, (prompt, output, due, ended), filled


def follow(traffic: Traffic, sums: Sums, seconds: float, *, lead_s: float, residence_s: float) -> Traffic:
    """The estimates after `seconds` more, for orders that take `lead_s`.

    Without routers' counts, the rate is the running requests over `residence_s`, and nothing is learned of lengths.
    """
    arrived = sums.arrived / seconds if sums.counted else sums.running / max(residence_s, 1e-3)
    over_s = min(max(lead_s * _SHARE_OF_LEAD, _FASTEST_S), _SLOWEST_S)
    fast, slow = 1 - math.exp(-seconds / over_s), 1 - math.exp(-seconds / (over_s * _SLOWER))
    if sums.counted:
        kept = math.exp(-seconds / _LENGTHS_S)
        traffic = replace(
            traffic,
            prompt_tokens=kept * traffic.prompt_tokens + sums.prompt_tokens,
            output_tokens=kept * traffic.output_tokens + sums.output_tokens,
            finished=kept * traffic.finished + sums.finished,
        )
    return replace(
        traffic,
        over_s=over_s,
        fast=traffic.fast + fast * (arrived - traffic.fast),
        slow=traffic.slow + slow * (arrived - traffic.slow),
        fast_weight=traffic.fast_weight + fast * (1 - traffic.fast_weight),
        slow_weight=traffic.slow_weight + slow * (1 - traffic.slow_weight),
    )


def _endless(entry: SliceRecord) -> bool:
    return math.isinf(entry.running + entry.waiting + entry.prompt_tokens + entry.output_tokens)


def _nonsense(entry: SliceRecord) -> str:
    return (
        f"slice {entry.slice or entry.replica} reports running={entry.running} waiting={entry.waiting} "
        f"kv_usage={entry.kv_usage} prompt_tokens={entry.prompt_tokens} output_tokens={entry.output_tokens}"
    )


def _missing(entries: Sequence[SliceRecord], demands: Sequence[Demand]) -> str:
    for entry in entries:
        values = (entry.running, entry.waiting, entry.kv_usage, entry.prompt_tokens, entry.cached_tokens)
        if not all(isinstance(value, int | float) for value in (*values, entry.output_tokens)):
            return _nonsense(entry)
    return f"a router's counts are no numbers: {demands}"
