"""How many slices a workload takes, by shape: what scaling would buy for it, asked before there is any traffic. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from serving.config import ModelSpec, SliceSpec
from serving.errors import ConfigError, ServingError
from serving.planning import Plan
from serving.planning.alternatives import slices_that_fit
from serving.planning.checkpoints import Hub, no_hub
from serving.planning.plan import plan
from serving.planning.prices import Prices, slice_hour
from serving.planning.speed import Engine, spread
from serving.scaling.capacity import Lengths, Pool, capacity, itl_s, pool_of, whole_slices, with_room

_MOST = 1_000_000  # tokens, or requests a second
_KEYS = ("in", "out", "rate")


@dataclass(frozen=True)
class Workload:
    """Requests of so many tokens in and out, and how many of them come a second. `answer` is 0 for models that write none."""

    prompt: int
    answer: int
    requests_per_s: float


@dataclass(frozen=True)
class Offer:
    """Slices of one shape that take a workload within its targets. `slices` is None where none do.

    The range is that of the plan's speed: as many slices as it takes if slices are as fast or as slow as may be.
    """

    plan: Plan
    slices: int | None
    least: int | None
    most: int | None
    slice_requests_per_s: float
    sequences: float
    itl_s: float
    ttft_s: float
    dollars_per_hour: float  # of one slice
    own: bool  # a pool of the YAML
    missed: str = ""


def read_workload(text: str) -> Workload:
    """`in=1024,out=256,rate=20`, without `out` for models that write nothing; raises ConfigError."""
    parts = [part.strip().partition("=")[::2] for part in text.split(",")]
    pairs = dict(parts)
    if len(pairs) < len(parts):
        raise ConfigError(f"--workload: a key is there twice in {text!r}; write in=1024,out=256,rate=20")
    if unknown := [key for key in pairs if key not in _KEYS]:
        raise ConfigError(
            f"--workload: {unknown[0]!r} is none of {', '.join(_KEYS)}; write in=1024,out=256,rate=20"
        )
    if missing := [key for key in ("in", "rate") if key not in pairs]:
        raise ConfigError(f"--workload: {missing[0]} is missing; write in=1024,out=256,rate=20")
    numbers = {key: _number(key, pairs.get(key, "0")) for key in _KEYS}
    return Workload(int(numbers["in"]), int(numbers["out"]), numbers["rate"])


def _number(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    least_is_0 = key == "out" and value == 0
    if not (least_is_0 or 0 < value <= _MOST) or (key != "rate" and value != int(value)):
        kind = "requests a second" if key == "rate" else "a whole number of tokens"
        raise ConfigError(f"--workload: {key} is {kind}, above 0 and at most {_MOST:,} (got {text!r})")
    return value


def offers(spec: ModelSpec, workload: Workload, prices: Prices, hub: Hub = no_hub) -> list[Offer]:
    """What takes the workload: the model's own pools first, then all other slices that it fits, the cheapest first.

    A model that embeds or scores texts writes no answer, whatever the workload has; for any other the workload has to have one.
    """
    own = [plan(pool, hub, prices=prices) for pool in spec.per_pool()]
    if own[0].sizes.pools:
        workload = replace(workload, answer=0)
    elif not workload.answer:
        raise ConfigError(
            f"--workload: out is missing, and {spec.name} writes answers; write in=1024,out=256,rate=20"
        )
    if workload.prompt + workload.answer > own[0].fit.max_model_len:
        raise ConfigError(
            f"{spec.name}: a request of {workload.prompt}+{workload.answer} tokens is longer than max_model_len, "
            f"{own[0].fit.max_model_len}"
        )
    others = [planned for planned in _others(own[0], hub) if planned.pool not in {pool.pool for pool in own}]
    ranked = sorted(
        (_offer(planned, workload, prices, own=False) for planned in others),
        key=lambda offer: (offer.slices is None, (offer.slices or 1) * offer.dollars_per_hour),
    )
    return [*(_offer(planned, workload, prices, own=True) for planned in own), *ranked]


def _others(own: Plan, hub: Hub) -> Iterable[Plan]:
    for candidate in slices_that_fit(own.shape, own.sizes, shares_attention=own.layout.attention_groups > 1):
        slice_ = candidate.slice
        elsewhere = SliceSpec(generation=slice_.generation, topology=slice_.topology, hosts=slice_.hosts)
        unchanged = {
            "slice": elsewhere,
            "parallel": type(own.model.parallel)(),
            "slo": type(own.model.slo)(),
        }
        try:
            other = plan(own.model.model_copy(update=unchanged), hub)
        except ServingError:
            continue
        yield _with_targets(other, own.model)


def _with_targets(other: Plan, spec: ModelSpec) -> Plan:
    """Targets that a slice misses are told of it, they don't keep it from being planned."""
    return Plan(**{**vars(other), "model": other.model.model_copy(update={"slo": spec.slo})})


def _offer(planned: Plan, workload: Workload, prices: Prices, *, own: bool) -> Offer:
    lengths = Lengths(float(workload.prompt), float(workload.answer))
    price = slice_hour(planned.model.slice, planned.slice, prices)
    pool = pool_of(planned, price, context=workload.prompt + workload.answer // 2)
    slo = planned.model.slo
    middle = capacity(pool, lengths, slo.itl_s)
    between_s = itl_s(pool, lengths, middle.sequences)
    first_s = workload.prompt / pool.prefill_tokens_per_s + pool.step_s(middle.sequences)
    missed = _missed("itl_s", slo.itl_s, itl_s(pool, lengths, 1.0)) or _missed("ttft_s", slo.ttft_s, first_s)
    off = spread(Engine(planned.shape, planned.sizes, planned.slice, planned.layout))
    counts = [_slices(pool, lengths, workload, slo.itl_s, speed) for speed in (off, 1.0, 1 / off)]
    least, slices, most = (None, None, None) if missed else counts
    return Offer(
        plan=planned,
        slices=slices,
        least=least,
        most=most,
        slice_requests_per_s=middle.requests_per_s,
        sequences=middle.sequences,
        itl_s=between_s,
        ttft_s=first_s,
        dollars_per_hour=price,
        own=own,
        missed=missed,
    )


def _slices(
    pool: Pool, lengths: Lengths, workload: Workload, target_itl_s: float | None, speed: float
) -> int | None:
    if target_itl_s is not None and itl_s(pool, lengths, 1.0, speed) > target_itl_s:
        return None
    slice_capacity = capacity(pool, lengths, target_itl_s, speed)
    return max(
        1, whole_slices(with_room(workload.requests_per_s, slice_capacity), slice_capacity.requests_per_s)
    )


def _missed(name: str, target_s: float | None, takes_s: float) -> str:
    if target_s is None or takes_s <= target_s:
        return ""
    return f"slo.{name} is {target_s:g} s, a request alone takes {takes_s:.2g} s"
