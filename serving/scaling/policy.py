"""How many slices a model wants in each of its pools: a pure function of its state, a load report and the time.

The need is a rate: the requests a second expected when a slice ordered now would serve, with room for chance. The lead
time until then is learned from the last orders. The queue is worked off within another lead time. Slices on order count
as present, and a queue that grew while they are awaited is not ordered for again. The largest need within the cool-down
stays. Pools fill in order of preference. Slices that a pool has not delivered within its patience are ordered in the
next, and go when the first delivers after all; so are those of a pool whose starts fail again and again. A report that can't be true holds the last good decision.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from serving.scaling.boost import Boost, most_boost, next_boost
from serving.scaling.capacity import (
    FASTEST,
    NOT_WORTH,
    SLOWEST,
    Capacity,
    Pool,
    capacity,
    itl_s,
    whole_slices,
    with_room,
)
from serving.scaling.steadiness import Steadiness
from serving.scaling.traffic import NonsenseError, Sums, Traffic, add_up, follow
from serving.state.records import Demand, SliceRecord

# The lead time before the first slice has arrived: a warm node pool and a large model's start.
_ASSUMED_LEAD_S = 300.0
_SHORTEST_LEAD_S = 30.0
# Reports further apart than this say nothing of rates: the process slept, or its clock jumped.
_LONGEST_STEP_S = 60.0
# Points kept of the needs within the cool-down.
_WINDOW_POINTS = 30
# After this many times its patience, a pool that had to give its order up is asked again.
_AGAIN = 4
# A pool none of whose slices has come up after so many starts is sought elsewhere.
_FAILED_STARTS = 3
# The learned speed is averaged over so many seconds; a new lead time enters the learned one with this share.
_SPEED_S = 120.0
_LEAD_SHARE = 0.5


@dataclass(frozen=True)
class Settings:
    """What the YAML says of one model."""

    model: str
    pools: tuple[Pool, ...]
    ttft_s: float | None = None
    itl_s: float | None = None
    cool_down_s: float = 300.0

    @property
    def scales(self) -> bool:
        return any(pool.min < pool.max for pool in self.pools)


@dataclass(frozen=True)
class Room:
    """What the budget leaves to this model; None is no limit."""

    slices: float | None = None
    dollars_per_hour: float | None = None

    def less(self, slices: float, dollars_per_hour: float) -> "Room":
        """The room that is left when others take these slices and dollars."""
        return Room(
            None if self.slices is None else self.slices - slices,
            None if self.dollars_per_hour is None else self.dollars_per_hour - dollars_per_hour,
        )


@dataclass(frozen=True)
class Report:
    """The store's records of one model at one moment.

    `leaving`: slices of pools that the YAML no longer has, and their dollars an hour. They take a part of the room until they go.
    """

    entries: Sequence[SliceRecord]
    demands: Sequence[Demand] = ()
    room: Room = Room()
    leaving: tuple[float, float] = (0, 0.0)


@dataclass(frozen=True)
class PoolState:
    """One pool, known by its key: slices wanted, the times of orders still open, and what was learned.

    `first` is how many slices there were at the first report; the first pool's has those of pools that have left the YAML.
    """

    key: str
    wanted: int
    first: int = 0
    orders: tuple[float, ...] = ()
    starting: tuple[tuple[str, float], ...] = ()  # (replica, time of its order)
    lead_s: float | None = None
    speed: float = 1.0
    delivered: int = 0  # slices that are there, serving or not
    serving: int = 0
    late_s: float | None = None  # last wait beyond patience, or failed start; None once a slice serves
    failed: int = 0  # starts since a slice last came up
    failure: str = ""  # why the last of them failed

    @property
    def late(self) -> bool:
        return self.late_s is not None

    @property
    def failing(self) -> bool:
        return self.failed >= _FAILED_STARTS

    @property
    def to_count_on(self) -> int:
        """Slices that will serve: those that are there, or of a pool whose starts fail those that serve."""
        return self.serving if self.failing else self.delivered

    def overdue(self, now_s: float, patience_s: float) -> int:
        """Orders that have waited longer than the pool's patience."""
        return sum(now_s - at_s > patience_s for at_s in self.orders)

    def expected_lead_s(self, now_s: float) -> float:
        """From order to serving: the learned lead time, and at least what the oldest order has waited."""
        waited = now_s - min([*self.orders, *(at for _, at in self.starting)], default=now_s)
        return max(_ASSUMED_LEAD_S if self.lead_s is None else self.lead_s, waited, _SHORTEST_LEAD_S)


@dataclass(frozen=True)
class PolicyState:
    """What the policy remembers from one report to the next."""

    pools: tuple[PoolState, ...]
    first_s: float = math.inf  # time of the first report; the slices it showed stay for a cool-down
    at_s: float | None = None
    active_s: float | None = None
    traffic: Traffic = field(default_factory=Traffic)
    needs: tuple[tuple[float, float], ...] = ()  # (time, slices of the first pool), falling
    backlog: float = 0.0  # requests a second ordered to work off a queue
    boost: Boost = field(default_factory=Boost)
    steadiness: Steadiness = field(default_factory=Steadiness)
    kv_per_sequence: float = 0.0
    hold: str = ""
    in_full: tuple[int, ...] = ()  # by pool, slices wanted once those that leave have gone

    @property
    def wanted(self) -> tuple[int, ...]:
        return tuple(pool.wanted for pool in self.pools)


@dataclass(frozen=True)
class Decision:
    """Slices wanted, by pool, and why.

    `asked`: those wanted if there were no budget, by pool; empty where `held`.
    `held`: the report could not be used; `short`: a limit keeps slices away; `failing`: no slice of some pool comes up.
    """

    wanted: tuple[int, ...]
    reason: str
    held: bool
    state: PolicyState
    short: bool = False
    failing: bool = False
    asked: tuple[int, ...] = ()


def start(settings: Settings, wanted: Mapping[str, int] | None = None) -> PolicyState:
    """The state before the first report: by pool key what Serve runs already, else each pool's least."""
    return aligned(settings, PolicyState(()), wanted or {})


def aligned(settings: Settings, state: PolicyState, wanted: Mapping[str, int]) -> PolicyState:
    """The state with the settings' pools, in their order; known pools keep what was learned."""
    known = {pool.key: pool for pool in state.pools}
    pools = []
    for spec in settings.pools:
        count = wanted.get(spec.key, spec.min)
        pools.append(known.get(spec.key) or PoolState(spec.key, count, first=count))
    in_full = dict(zip(known, state.in_full, strict=False))
    state = replace(
        state,
        pools=tuple(pools),
        in_full=tuple(in_full.get(pool.key, pool.wanted) for pool in pools) if in_full else (),
    )
    if known and settings.pools[0].key != next(iter(known)):
        # What is remembered in slices is in those of the pool that was the first.
        state = replace(state, needs=(), boost=Boost(), steadiness=Steadiness())
    return state


def decide(settings: Settings, state: PolicyState, report: Report, now_s: float) -> Decision:
    """Decide by a report. Never raises for what a report holds."""
    try:
        sums, traffic = add_up(report.entries, report.demands, state.traffic)
    except NonsenseError as error:
        return _held(state, f"{error}", replace(state, at_s=now_s))
    # Counters grew all the while reports could not be used, not in the last second: no rate is learned from them.
    passed_s = 0.0 if state.at_s is None or state.hold else now_s - state.at_s
    if state.at_s is not None and not 0 <= passed_s <= _LONGEST_STEP_S:
        moved = _moved(replace(state, at_s=now_s, traffic=traffic), passed_s)
        return _held(state, f"the clock jumped by {passed_s:.0f} s", moved)
    pools = _count(settings, state, sums, now_s)
    state = replace(state, pools=pools, at_s=now_s, hold="")
    if passed_s > 0:
        state = _learn(settings, state, sums, traffic, passed_s)
    elif state.first_s < math.inf:
        state = replace(state, traffic=traffic)
    else:
        state = replace(state, traffic=traffic, first_s=now_s, pools=_with_gone(state.pools, sums))
    capacities = _capacities(settings, state)
    state, need, why = _need(settings, state, report, sums, capacities, now_s)
    asked, limits, short = _fill(settings, state, need, capacities, now_s)
    wanted = _within(settings, state, report.room, list(asked), [pool.min for pool in settings.pools])
    if sum(wanted) < sum(asked):
        short = True
        limits.append(f"the budget allows {sum(wanted)} of {sum(asked)} slices")
    allowed = _beside(settings, state, report, wanted)
    if more := sum(wanted) - sum(allowed):
        limits.append(f"{more} more once slices of pools that were taken out have gone")
    pools = tuple(
        _ordered(known, max(count, pool.min), count, now_s)
        for pool, known, count in zip(settings.pools, state.pools, allowed, strict=True)
    )
    steadiness = state.steadiness.decided(sum(asked), now_s, settings.cool_down_s)
    state = replace(state, pools=pools, in_full=tuple(wanted), steadiness=steadiness)
    failing = any(pool.failing for pool in pools)
    return Decision(
        state.wanted,
        "; ".join([why, *limits]),
        held=False,
        state=state,
        short=short,
        failing=failing,
        asked=tuple(asked),
    )


def _with_gone(pools: tuple[PoolState, ...], sums: Sums) -> tuple[PoolState, ...]:
    """At the first report slices of pools that the YAML no longer has count for the first pool, which takes their place."""
    gone = sum(count for key, count in sums.serving.items() if key not in {pool.key for pool in pools})
    return (replace(pools[0], first=pools[0].first + gone), *pools[1:])


def unread(state: PolicyState, problem: str, now_s: float) -> PolicyState:
    """The state after a moment without a report: nothing that is remembered has grown older, and no rate is learned over it."""
    passed_s = 0.0 if state.at_s is None else now_s - state.at_s
    return _moved(replace(state, at_s=now_s, hold=problem), passed_s)


def _held(before: PolicyState, problem: str, state: PolicyState) -> Decision:
    reason = f"holding {sum(before.wanted)}: {problem}"
    return Decision(before.wanted, reason, held=True, state=replace(state, hold=problem))


def _moved(state: PolicyState, by_s: float) -> PolicyState:
    """All remembered times moved with the clock, so that an order a minute old is still a minute old."""
    return replace(
        state,
        active_s=None if state.active_s is None else state.active_s + by_s,
        needs=tuple((at + by_s, need) for at, need in state.needs),
        boost=state.boost.moved(by_s),
        steadiness=state.steadiness.moved(by_s),
        first_s=state.first_s + by_s,
        pools=tuple(
            replace(
                pool,
                orders=tuple(at + by_s for at in pool.orders),
                starting=tuple((name, at + by_s) for name, at in pool.starting),
                late_s=None if pool.late_s is None else pool.late_s + by_s,
            )
            for pool in state.pools
        ),
    )


def _count(settings: Settings, before: PolicyState, sums: Sums, now_s: float) -> tuple[PoolState, ...]:
    """Which orders have been delivered, how long they took, and which starts failed."""
    return tuple(
        _counted(spec, known, sums, now_s) for spec, known in zip(settings.pools, before.pools, strict=True)
    )


def _counted(spec: Pool, known: PoolState, sums: Sums, now_s: float) -> PoolState:
    starting = [entry.replica for entry in sums.starting if entry.pool == spec.key]
    serving = sums.serving.get(spec.key, 0)
    present = serving + len(starting)
    missing = max(0, known.wanted - present)
    since = dict(known.starting)
    ready = [since.pop(name) for name in list(since) if name in sums.ready]
    new = [name for name in starting if name not in since]
    fresh = [entry for entry in sums.fresh if entry.pool == spec.key]
    order_times = iter(known.orders)  # the oldest first
    arrived = [next(order_times, None) for _ in fresh]
    ordered = {name: since.pop(name) if name in since else next(order_times, now_s) for name in starting}
    # What is left of `since` came and went without serving: it failed, unless its host is to go, or nobody wants it any more.
    failed = len(since.keys() - sums.leaving) if missing else 0
    orders = sorted([*order_times, *since.values()])[:missing]
    lead_s = known.lead_s
    for ordered_s in [*arrived, *ready]:
        if ordered_s is not None:
            took = now_s - ordered_s
            lead_s = took if lead_s is None else lead_s + _LEAD_SHARE * (took - lead_s)
    came_up = bool(ready or fresh)
    failures = 0 if came_up else known.failed + failed
    reasons = [entry.reason for entry in sums.lost if entry.replica in since and entry.reason]
    return replace(
        known,
        orders=(*orders, *(now_s for _ in range(missing - len(orders)))),
        starting=tuple(ordered.items()),
        lead_s=lead_s,
        delivered=present,
        serving=serving,
        late_s=None if came_up else _late_s(spec, known, failures, delivered=bool(new), now_s=now_s),
        failed=failures,
        failure="" if came_up else (reasons[-1] if reasons else known.failure),
    )


def _late_s(spec: Pool, known: PoolState, failures: int, *, delivered: bool, now_s: float) -> float | None:
    """When a pool that is out of patience last waited. One whose order the budget took is tried again _AGAIN patiences later."""
    if failures >= _FAILED_STARTS:
        return now_s if known.late_s is None else known.late_s
    if delivered and not failures:
        return None
    if known.late_s is None:
        return now_s if known.orders and now_s - known.orders[0] > spec.patience_s else None
    if known.orders or known.starting:
        return now_s
    return known.late_s if now_s - known.late_s < _AGAIN * spec.patience_s else None


def _learn(
    settings: Settings, state: PolicyState, sums: Sums, traffic: Traffic, seconds: float
) -> PolicyState:
    """Learn rates, lengths, and how fast slices are beside their plan."""
    pool, known = settings.pools[0], state.pools[0]
    lengths = state.traffic.lengths
    serving = sum(sums.serving.values())
    sequences = sums.running / serving if serving else 0.0
    planned_itl_s = itl_s(pool, lengths, max(1.0, sequences), known.speed)
    traffic = follow(
        traffic, sums, seconds, lead_s=_lead_s(state), residence_s=lengths.answer * planned_itl_s
    )
    kv = state.kv_per_sequence
    pools = state.pools
    if sequences >= 1 and sums.output_tokens:
        share = 1 - math.exp(-seconds / _SPEED_S)
        kv += share * (sums.kv_usage / sums.running - kv) if kv else sums.kv_usage / sums.running
        measured = sums.output_tokens / seconds
        planned = sum(
            pool_state.serving * sequences / itl_s(pool, lengths, sequences)
            for pool, pool_state in zip(settings.pools, state.pools, strict=True)
        )
        # Of a pool that the YAML no longer has nobody knows what its slices were planned to do.
        if serving == sum(pool_state.serving for pool_state in state.pools):
            speed = known.speed + share * (min(max(measured / planned, SLOWEST), FASTEST) - known.speed)
            pools = tuple(replace(pool_state, speed=speed) for pool_state in pools)
    return replace(state, traffic=traffic, kv_per_sequence=kv, pools=pools)


def _capacities(settings: Settings, state: PolicyState) -> list[Capacity]:
    lengths, kv = state.traffic.lengths, state.kv_per_sequence
    return [
        capacity(pool, lengths, settings.itl_s, known.speed, kv)
        for pool, known in zip(settings.pools, state.pools, strict=True)
    ]


def _need(
    settings: Settings,
    state: PolicyState,
    report: Report,
    sums: Sums,
    capacities: Sequence[Capacity],
    now_s: float,
) -> tuple[PolicyState, float, str]:
    """Requests a second to hold slices for, and why."""
    awaited = any(pool.orders or pool.starting for pool in state.pools)
    busy = sums.running + sums.waiting + sums.held + sums.arrived > 0
    active_s = now_s if busy else state.active_s
    idle = active_s is None or now_s - active_s > settings.cool_down_s
    if idle:
        state = replace(
            state, active_s=active_s, needs=(), backlog=0.0, boost=Boost(), steadiness=Steadiness()
        )
        left_out = f"; {sums.filling:.0f} lines of batches keep no slice" if sums.filling else ""
        return state, 0.0, f"no request for {settings.cool_down_s:.0f} s{left_out}"
    lead_s = _lead_s(state)
    rate, ahead = state.traffic.rate, state.traffic.ahead(lead_s)
    queued = sums.waiting + sums.held
    backlog = state.backlog if awaited else queued / lead_s  # gone within another lead time
    missed, worst = _missed(settings, report.demands)
    # A model in use keeps a slice, however light its load.
    least = capacities[0].requests_per_s * 2 * NOT_WORTH
    held = _held_by_running(settings, state, sums, capacities)
    need = max(with_room(ahead, capacities[0]), ahead + backlog, least, held)
    slices = need / capacities[0].requests_per_s
    room = sum(pool.max for pool in settings.pools) - math.ceil(slices)
    boost = next_boost(
        state.boost,
        worst,
        slices,
        most_boost(slices, room),
        now_s,
        settings.cool_down_s,
        settled=not awaited and not queued,
    )
    # Remembered in slices: capacity is measured anew all the time, and would move a remembered rate across a border.
    slices += boost.slices
    needs = _window(state.needs if state.traffic.known else (), now_s, slices, settings.cool_down_s)
    needed = needs[0][1]
    steadiness = state.steadiness.needing(needed)
    state = replace(
        state, active_s=active_s, needs=needs, backlog=backlog, boost=boost, steadiness=steadiness
    )
    lengths = state.traffic.lengths
    reasons = [
        f"{rate:.2g} requests/s of {lengths.prompt:.0f}+{lengths.answer:.0f} tokens, {ahead:.2g} in {lead_s:.0f} s",
        f"a slice takes {capacities[0].requests_per_s:.2g}",
    ]
    if sums.due:
        reasons.append("lines of batches among them (batch.may_scale)")
    if sums.filling:
        reasons.append(f"{sums.filling:.0f} lines of batches left out")
    if queued:
        reasons.append(f"{queued:.0f} wait")
    if boost.slices:
        reasons.append(f"{boost.slices} more for {missed or 'targets missed before'}")
    elif missed and now_s < boost.rest_until_s:
        reasons.append(f"{missed}, which more slices did not change")
    if held == need:
        reasons.append(f"{sums.running:.0f} long answers keep their seats")
    if needed > slices * 1.01:
        reasons.append(f"{needed:.3g} slices were needed {now_s - needs[0][0]:.0f} s ago, {slices:.3g} now")
    if steadiness.kept > needed:
        reasons.append(f"{steadiness.kept:.3g} stay, for at this load a slice went that was needed again")
    return state, steadiness.kept * capacities[0].requests_per_s, "; ".join(reasons)


def _held_by_running(
    settings: Settings, state: PolicyState, sums: Sums, capacities: Sequence[Capacity]
) -> float:
    """The rate that keeps the serving slices whose seats are taken by answers that will not end within a cool-down.

    They run on when no request arrives any more, and a slice that goes leaves them without a seat.
    """
    serving = [known.serving for known in state.pools]
    seats = sum(
        count * pool.seats(state.kv_per_sequence) for count, pool in zip(serving, settings.pools, strict=True)
    )
    rate = sum(
        count * pool_capacity.requests_per_s for count, pool_capacity in zip(serving, capacities, strict=True)
    )
    stay = max(0.0, sums.running - state.traffic.ended_per_s * settings.cool_down_s)
    return rate * min(1.0, stay / seats) if seats else 0.0


def _lead_s(state: PolicyState) -> float:
    """Expected lead time of the quickest pool."""
    return min(pool.expected_lead_s(state.at_s or 0.0) for pool in state.pools)


def _missed(settings: Settings, demands: Sequence[Demand]) -> tuple[str, float]:
    """The target that the p90 of some router misses most, in words, and measured over wanted."""
    missed, words = 0.0, ""
    for name, target_s in (("ttft", settings.ttft_s), ("itl", settings.itl_s)):
        if target_s is None:
            continue
        worst_s = max((float(getattr(demand, f"{name}_p90_s")) for demand in demands), default=0.0)
        if worst_s / target_s > missed:
            missed, words = worst_s / target_s, f"{name} p90 {worst_s:.2g} s above {target_s:.2g}"
    return (words if missed > 1 else ""), missed


def _window(
    needs: tuple[tuple[float, float], ...], now_s: float, need: float, cool_down_s: float
) -> tuple[tuple[float, float], ...]:
    """The largest need within the cool-down first, behind it later and smaller needs."""
    kept = [point for point in needs if now_s - point[0] <= cool_down_s and point[1] > need]
    if not kept or now_s - kept[-1][0] >= cool_down_s / _WINDOW_POINTS:
        kept.append((now_s, need))
    return tuple(kept)


def _fill(
    settings: Settings,
    state: PolicyState,
    need: float,
    capacities: Sequence[Capacity],
    now_s: float,
) -> tuple[list[int], list[str], bool]:
    """Slices by pool for a rate, remarks, and whether `replicas.max` binds. The preferred pools fill first."""
    rates = [pool_capacity.requests_per_s for pool_capacity in capacities]
    least = [pool.min for pool in settings.pools]
    if now_s - state.first_s < settings.cool_down_s:
        least = [
            max(count, min(known.first, pool.max))
            for count, known, pool in zip(least, state.pools, settings.pools, strict=True)
        ]
    usable = [
        min(count, known.to_count_on) if known.late else count
        for count, known in zip(least, state.pools, strict=True)
    ]
    wanted = list(least)
    missing = need - sum(count * rate for count, rate in zip(usable, rates, strict=True))
    serving = [min(count, known.serving) for count, known in zip(least, state.pools, strict=True)]
    # The rate that serving slices leave uncovered.
    unsafe = need - sum(count * rate for count, rate in zip(serving, rates, strict=True))
    remarks = []
    for index, (pool, known) in enumerate(zip(settings.pools, state.pools, strict=True)):
        open_ = pool.max - least[index]
        more = _slices(missing, rates[index], open_)
        # A slice in place of another pool's goes when that pool's serves.
        more = max(more, min(_slices(unsafe, rates[index], open_), known.wanted - least[index]))
        wanted[index] += more
        counted = min(wanted[index], known.to_count_on) if known.late else wanted[index]
        missing -= (counted - usable[index]) * rates[index]
        unsafe -= (min(wanted[index], known.serving) - serving[index]) * rates[index]
        if known.orders:
            waited = f"{pool.name}: {len(known.orders)} on order for {now_s - known.orders[0]:.0f} s"
            remarks.append(waited + (", out of patience" if known.late and not known.failing else ""))
        if known.failed:
            remarks.append(
                f"{pool.name}: {known.failed} starts failed, the last: {known.failure or 'no reason given'}"
            )
    if short := missing > NOT_WORTH * rates[0]:
        remarks.append(f"{missing:.2g} requests/s above what replicas.max can take")
    return wanted, remarks, short


def _slices(rate: float, slice_rate: float, most: int) -> int:
    return min(most, whole_slices(rate, slice_rate))


def _beside(settings: Settings, state: PolicyState, report: Report, wanted: list[int]) -> list[int]:
    """Slices that the budget has room for beside those that leave; slices that are there stay."""
    if not report.leaving[0]:
        return wanted
    there = [min(count, known.delivered) for count, known in zip(wanted, state.pools, strict=True)]
    return _within(settings, state, report.room.less(*report.leaving), list(wanted), there)


def _within(
    settings: Settings, state: PolicyState, room: Room, wanted: list[int], least: Sequence[int]
) -> list[int]:
    """Cut to the budget: late orders first, other orders, then slices of the least preferred pools; never below `least`."""
    order = list(reversed(range(len(wanted))))
    # A slice that came after its order was given up goes again, and keeps nobody from the order in its place.
    present = [
        max(count, min(known.delivered, known.wanted))
        for count, known in zip(least, state.pools, strict=True)
    ]
    cuts = [
        *((index, present[index]) for index in order if state.pools[index].late),
        *((index, present[index]) for index in order),
        *((index, least[index]) for index in order),
    ]
    for index, floor in cuts:
        excess = 0.0
        if room.slices is not None:
            excess = max(excess, sum(wanted) - room.slices)
        price = settings.pools[index].dollars_per_hour
        if room.dollars_per_hour is not None and price > 0:
            cost = sum(
                count * pool.dollars_per_hour for count, pool in zip(wanted, settings.pools, strict=True)
            )
            excess = max(excess, (cost - room.dollars_per_hour) / price - 1e-9)
        wanted[index] -= max(0, min(wanted[index] - floor, math.ceil(excess)))
    return wanted


def _ordered(pool: PoolState, wanted: int, allowed: int, now_s: float) -> PoolState:
    """The pool with orders for what is missing; those beyond `allowed` wait for the budget, and no patience runs out on them."""
    missing = max(0, wanted - pool.delivered)
    orders = pool.orders[: max(0, allowed - pool.delivered)][:missing]
    return replace(pool, wanted=wanted, orders=(*orders, *(now_s for _ in range(missing - len(orders)))))
