"""What slices say of themselves: one entry a slice replica in Ray's GCS, read by routers, the command line and scaling.

The GCS is the one process that the cluster can't do without, so an entry outlives replica, router and Serve controller
alike, and no process has to be asked that may be busy or dead. A put or get takes 0.2 ms. A replica repeats its entry
every BEAT_S with a higher beat; a reader calls an entry lost when the beat stands still by the reader's own clock, so
that hosts' clocks need not agree. `ray.experimental.internal_kv` and `ray._raylet.GcsClient` are used here alone.
"""

import dataclasses
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self, TypeVar

from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled
from ray.experimental import internal_kv

from serving.errors import ClusterError

BEAT_S = 0.5
# Five beats: a replica whose event loop waits for a slow step still beats, its thread needs the GIL only now and then.
STALE_S = 2.5
FORGOTTEN_S = 8.0  # as a host of a slice may be silent (slices.watch)
_CONNECT_TIMEOUT_S = 5
_NAMESPACE = b"tpu-serving"
_Beating = TypeVar("_Beating", "Entry", "Demand")
logger = logging.getLogger("ray.serve")


class State(StrEnum):
    """Where a slice replica is in its life."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    LOST = "lost"


@dataclass(frozen=True)
class Entry:
    """One slice replica. Times are seconds; `kv_usage` is a share of 1; `pool` counts from the preferred, 0.

    `prompt_tokens` (of them `cached_tokens` from the prefix cache) and `output_tokens` count since its start. The bytes are
    what the plan gives a chip: all it can use, and of that the weights and the cache. `since` is when it entered its state,
    seconds since 1970 by its own clock. `tag` is what Serve calls it within its deployment.
    """

    replica: str
    model: str
    state: State
    phase: str
    shape: str
    slice: str = ""
    hosts: tuple[str, ...] = ()
    address: str = ""
    simulated: bool = False
    max_model_len: int = 0
    phases: tuple[tuple[str, float], ...] = ()
    reason: str = ""
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    pool: int = 0
    chips_per_host: int = 0
    hbm_bytes: int = 0
    weight_bytes: int = 0
    cache_bytes: int = 0
    deployment: str = ""
    tag: str = ""
    version: str = ""
    since: float = 0.0
    beat: int = 0

    @property
    def serves(self) -> bool:
        return self.state is State.SERVING

    def dump(self) -> bytes:
        return _dump(self)

    @classmethod
    def load(cls, raw: bytes) -> Self:
        fields = json.loads(raw)
        fields["state"] = State(fields["state"])
        fields["hosts"] = tuple(fields["hosts"])
        fields["phases"] = tuple((name, seconds) for name, seconds in fields["phases"])
        return cls(**fields)


@dataclass(frozen=True)
class Wanted:
    """What a router says of a model: how many slices it is to have and for how long some have been missing."""

    model: str
    shape: str
    slices: int
    missing: int
    missing_for_s: float


@dataclass(frozen=True)
class Release:
    """What Serve is to run of one deployment: the version of its engine and the shape of its slices."""

    version: str
    shape: str


@dataclass(frozen=True)
class Demand:
    """What one router has to do for one model, and how it went of late: a percentile is 0 where nothing was answered.

    `arrived`, `refused` and `prompt_bytes` count since the router's start; `held` requests wait in the router for a
    slice, `in_flight` ones are with a slice.
    """

    router: str
    model: str
    held: int = 0
    in_flight: int = 0
    arrived: int = 0
    refused: int = 0
    prompt_bytes: int = 0
    ttft_p50_s: float = 0.0
    ttft_p90_s: float = 0.0
    itl_p50_s: float = 0.0
    itl_p90_s: float = 0.0
    beat: int = 0


@dataclass(frozen=True)
class Decision:
    """What scaling decided for one pool of a model, when (Unix time) and why."""

    at: float
    model: str
    pool: str
    wanted: int
    reason: str


def connect(address: str) -> None:
    """Read the board of the cluster at `address` without joining it as a driver; raises ClusterError."""
    check(address)
    internal_kv._initialize_internal_kv(GcsClient(address=address))  # noqa: SLF001


def check(address: str) -> None:
    """Raises ClusterError where nobody listens: GcsClient itself would try for 40 s, and then end the process."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError):
        raise ClusterError(
            f"no Ray cluster answers at {address!r}; an address is host:port of its head"
        ) from None


def disconnect() -> None:
    """Forget the cluster of `connect`: Ray ends a process that asks one that has been gone for a minute."""
    internal_kv._internal_kv_reset()  # noqa: SLF001


def phase_writer(address: str, replica: str) -> Callable[[str], None]:
    """For an engine's processes, which may not have joined Ray: tells the replica what the engine is doing."""
    client = GcsClient(address=address)
    key = f"phase/{replica}".encode()
    return lambda phase: client.internal_kv_put(key, phase.encode(), True, _NAMESPACE)


def phase(replica: str) -> str:
    """What the replica's engine said last."""
    raw = _get(f"phase/{replica}")
    return raw.decode() if raw else ""


def write(entry: Entry) -> None:
    _put(f"slice/{entry.replica}", entry.dump())


def delete(replica: str) -> None:
    _delete(f"slice/{replica}")
    _delete(f"phase/{replica}")


def read() -> list[Entry]:
    """Every slice replica's entry, in no order."""
    return [Entry.load(raw) for raw in _list("slice/")]


def want(wanted: Wanted) -> None:
    _put(f"model/{wanted.model}", _dump(wanted))


def unwant(model: str) -> None:
    _delete(f"model/{model}")


def wanted() -> list[Wanted]:
    """Every model that is served, by name."""
    return sorted((Wanted(**json.loads(raw)) for raw in _list("model/")), key=lambda each: each.model)


def deployment(application: str, name: str) -> str:
    """What the board calls a deployment, as Serve does in the names of its replicas."""
    return f"{application}#{name}"


def release(deployment: str, release: Release) -> None:
    _put(f"release/{deployment}", _dump(release))


def released(deployment: str) -> Release | None:
    """What was asked for last of a deployment."""
    raw = _get(f"release/{deployment}")
    return Release(**json.loads(raw)) if raw else None


def demand(demand: Demand) -> None:
    _put(f"router/{demand.router}/{demand.model}", _dump(demand))


def undemand(router: str, model: str) -> None:
    _delete(f"router/{router}/{model}")


def demands() -> list[Demand]:
    """What every router said last of every model. One whose beat stands still is gone."""
    return [Demand(**json.loads(raw)) for raw in _list("router/")]


def keep_decisions(application: str, kept: Iterable[Decision]) -> None:
    """Replace an application's decisions; scaling, which has one place in an application, keeps the last of them."""
    _put(f"decisions/{application}", json.dumps([dataclasses.asdict(one) for one in kept]).encode())


def decisions(application: str = "") -> list[Decision]:
    """The kept decisions of one application, or of all, oldest first."""
    found = [Decision(**one) for raw in _list(f"decisions/{application}") for one in json.loads(raw)]
    return sorted(found, key=lambda one: one.at)


def order(application: str, slices: Mapping[str, int]) -> None:
    """Say how many slices scaling wants of each of an application's models."""
    _put(f"ordered/{application}", json.dumps(slices).encode())


def ordered() -> dict[str, int]:
    """How many slices scaling wants, by model; a model with a fixed number is not in it."""
    found: dict[str, int] = {}
    for raw in _list("ordered/"):
        found |= json.loads(raw)
    return found


def _dump(one: "Entry | Wanted | Release | Demand") -> bytes:
    return json.dumps(dataclasses.asdict(one)).encode()


def _get(key: str) -> bytes | None:
    return internal_kv._internal_kv_get(key, namespace=_NAMESPACE)  # type: ignore[no-any-return]  # noqa: SLF001


def _put(key: str, value: bytes) -> None:
    internal_kv._internal_kv_put(key.encode(), value, overwrite=True, namespace=_NAMESPACE)  # noqa: SLF001


def _delete(key: str) -> None:
    internal_kv._internal_kv_del(key.encode(), namespace=_NAMESPACE)  # noqa: SLF001


def _list(prefix: str) -> list[bytes]:
    keys = internal_kv._internal_kv_list(prefix.encode(), namespace=_NAMESPACE)  # noqa: SLF001
    values = (internal_kv._internal_kv_get(key, namespace=_NAMESPACE) for key in keys)  # noqa: SLF001
    return [value for value in values if value is not None]


class Publisher:
    """A replica's entry, written on every change and every BEAT_S from a thread of its own.

    `load` is asked at each write for the fields that change all the time; `beaten` is told the entry at each beat.
    """

    def __init__(
        self,
        entry: Entry,
        load: Callable[[], dict[str, Any]] = dict,
        beaten: Callable[[Entry], None] = lambda _: None,
    ) -> None:
        self.entry = entry
        self.load = load
        self._beaten = beaten
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self.update()
        self._thread = threading.Thread(target=self._beat, name="slice-board", daemon=True)
        self._thread.start()

    def update(self, **changes: Any) -> None:
        """Change fields and write at once."""
        with self._lock:
            if self._stopped.is_set():
                return
            news = {**self.load(), **changes, "beat": self.entry.beat + 1}
            if changes.get("state", self.entry.state) is not self.entry.state:
                news["since"] = time.time()
            self.entry = dataclasses.replace(self.entry, **news)
            write(self.entry)

    def close(self) -> None:
        """Stop and take the entry off the board."""
        self._stopped.set()
        self._thread.join(timeout=2)
        delete(self.entry.replica)

    def _beat(self) -> None:
        while not self._stopped.wait(BEAT_S):
            try:
                self.update()
                self._beaten(self.entry)
            except Exception:
                # A slice whose thread ended here would be lost to all, though it serves.
                logger.exception("the board can't be written; the next beat tries again")


class Reader:
    """The board as one reader sees it: who no longer beats is lost, then forgotten. Pure; time is given."""

    def __init__(self) -> None:
        self._slices = _Beats()
        self._routers = _Beats()

    def live(self, entries: Iterable[Entry], now_s: float) -> tuple[list[Entry], list[str]]:
        """Entries with lost ones marked, and the replicas to delete from the board."""
        marked, forgotten = [], []
        for entry, still_s in self._slices.still([(one.replica, one) for one in entries], now_s):
            if still_s > FORGOTTEN_S:
                forgotten.append(entry.replica)
            elif still_s > STALE_S and entry.state is not State.LOST:
                reason = f"no sign of life for {still_s:.0f} s"
                marked.append(dataclasses.replace(entry, state=State.LOST, reason=reason))
            else:
                marked.append(entry)
        return marked, forgotten

    def asking(self, demands: Iterable[Demand], now_s: float) -> tuple[list[Demand], list[Demand]]:
        """Demands of routers that beat, and those to delete from the board."""
        alive, forgotten = [], []
        for demand, still_s in self._routers.still(
            [((one.router, one.model), one) for one in demands], now_s
        ):
            if still_s <= STALE_S:
                alive.append(demand)
            elif still_s > FORGOTTEN_S:
                forgotten.append(demand)
        return alive, forgotten


class _Beats:
    """For how long each beat has stood still while somebody looked; one that is seen first has not, for all that is known.

    A look that comes much later than the one before it did, as after a restart of the head, says nothing of who beat
    meanwhile: that time does not count.
    """

    def __init__(self) -> None:
        self._seen: dict[Hashable, tuple[int, float]] = {}
        self._looked_s: float | None = None
        self._period_s = 0.0

    def still(self, named: Iterable[tuple[Hashable, _Beating]], now_s: float) -> list[tuple[_Beating, float]]:
        seen, found = {}, []
        period_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        blind_s = period_s - self._period_s if period_s - self._period_s > STALE_S else 0.0
        self._looked_s, self._period_s = now_s, period_s
        for name, one in named:
            beat, since_s = self._seen.get(name, (None, now_s))
            since_s = since_s + blind_s if beat == one.beat else now_s
            seen[name] = one.beat, since_s
            found.append((one, now_s - since_s))
        self._seen = seen
        return found
