"""The store: Ray's key-value store in the GCS, and the one door to it.

The GCS is the one process that a Ray cluster can't do without. A record there outlives replica, router and Serve
controller, and no reader has to ask a process that may be busy or dead. A put or get takes 0.2 ms. `serving.state.key_names` says
which record has which key.
"""

import contextlib
import dataclasses
import json
import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ray._raylet import AuthenticationTokenLoader, Config, GcsClient  # type: ignore[attr-defined]  # compiled

from serving import environment
from serving.errors import ClusterError
from serving.state import board, key_names
from serving.state.board import Board
from serving.state.clock import SharedClock
from serving.state.records import (
    BatchRecord,
    DecisionRecord,
    Demand,
    RefusedDeploy,
    Release,
    Rollout,
    SliceFailures,
    SliceRecord,
    Snapshot,
    StartRecord,
    Suspicion,
    UsageRecord,
    Wanted,
    dump,
    known_fields,
)

_Record = TypeVar("_Record")
_CONNECT_TIMEOUT_S = 5
_NAMESPACE = b"tpu-serving"
# After so many beats a slice writes its whole record anew: a store that came back may have lost its last writes.
_RENEWED_BEATS = 60
# What a reader lists; phases, releases, claims and slices' fixed parts are read by name.
_LISTED = frozenset(
    (
        *(b"beat", b"demand", b"wanted", b"decisions", b"ordered", b"suspicions", b"slice-failures"),
        *(b"rollout", b"refused-deploy", b"batches", b"usage"),
    )
)
_MOVING = frozenset((b"beat", b"demand"))

_TOKEN = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def show_token(variables: Mapping[str, str]) -> None:
    """Have this process show the cluster's token that these variables name. Ray itself reads them only when it is loaded."""
    environment.write({name: variables.get(name) for name in _TOKEN})
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@dataclass(frozen=True)
class Found:
    """What a look at the store found. `beats` and `fixed` are by slice, for the reader's board; `others` lacks slices."""

    beats: Mapping[str, bytes]
    fixed: Mapping[str, bytes]
    others: Snapshot


class Store:
    """The records of the cluster at one address."""

    def __init__(self, address: str) -> None:
        """Does not join the cluster as a driver; raises ClusterError where nobody listens."""
        self.address = address
        self.check()
        self._client = GcsClient(address=address)
        # What this process wrote of its slices: the fixed part and its revision.
        self._told: dict[str, tuple[int, SliceRecord | None]] = {}
        self._clock = SharedClock()
        self._ahead_s: float | None = None  # of the process that tells the time

    def check(self) -> None:
        """Raises ClusterError where nobody listens: Ray's client would try for 40 s, and then end the process."""
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
        except (OSError, ValueError):
            raise ClusterError(
                f"no Ray cluster answers at {self.address!r}; RAY_ADDRESS and --address name host:port of a head that runs"
            ) from None

    def cluster_versions(self) -> dict[str, str]:
        """The versions of Ray and Python that the head was started with, as `ray` and `python`."""
        metadata = json.loads(self._client.internal_kv_get(b"CLUSTER_METADATA", b"cluster") or b"{}")
        return {name: metadata.get(f"{name}_version", "") for name in ("ray", "python")}

    def read(self, application: str | None = None) -> Snapshot:
        """All records of one application, or of all: three calls, however many records there are."""
        known = Board()
        view = self.look(known, application)
        for _ in known.take(view.beats, view.fixed):
            pass
        return dataclasses.replace(view.others, slices=known.slices)

    def look(self, known: Board, application: str | None = None) -> Found:
        """What there is now, and of slices' fixed parts those that `known` lacks. Blocks; `known.take` takes it over.

        Two calls, and a third one where a slice's fixed part has changed. The time is read with them.
        """
        prefix = b"" if application is None else f"{key_names.part(application)}/".encode()
        keys = [
            key
            for key in self._client.internal_kv_keys(prefix, _NAMESPACE)
            if key.split(b"/", 2)[1] in _LISTED
        ]
        beats: dict[str, bytes] = {}
        kinds: defaultdict[str, list[tuple[str, bytes]]] = defaultdict(list)
        values = self._values([*keys, key_names.TIME])
        self._hear(values.pop(key_names.TIME, None))
        for key, value in values.items():
            owner, kind, name = key.decode().split("/", 2)
            if kind == "beat":
                beats[name] = value
            else:
                kinds[kind].append((owner, value))
        fixed = self._values([key_names.fixed(replica) for replica in known.changed(beats)])
        return Found(
            beats, {key.decode().rpartition("/")[2]: value for key, value in fixed.items()}, _others(kinds)
        )

    def now(self) -> float:
        """The cluster's time as of the last look, seconds since 1970: hosts' clocks need not agree."""
        return self._clock.now(time.monotonic(), time.time())

    def tell_time(self) -> None:
        """Say what time it is; one process of a cluster does. Its clock goes on from what was told before, and does not jump."""
        if self._ahead_s is None:
            before = self._client.internal_kv_get(key_names.TIME, _NAMESPACE)
            self._ahead_s = max(float(before or 0), time.time()) - time.monotonic()
        now = json.dumps(time.monotonic() + self._ahead_s).encode()
        self._client.internal_kv_put(key_names.TIME, now, True, _NAMESPACE)
        self._hear(now)

    def _hear(self, time_s: bytes | None) -> None:
        if time_s is not None:
            self._clock.heard(float(time_s), time.monotonic())

    def slices(self, application: str | None = None) -> list[SliceRecord]:
        """Every slice replica's record, in no order."""
        return list(self.read(application).slices)

    def put_slice(self, record: SliceRecord) -> None:
        """Write a record's beat, and the rest of it where that has changed or the store may have lost it."""
        fixed = record.fixed
        revision, last = self._told.get(record.replica, (0, None))
        if fixed != last:
            revision = time.time_ns()
            self._put_fixed(fixed, revision)
        beat = board.beat(record, revision)
        new = self._client.internal_kv_put(key_names.beat(record), beat, True, _NAMESPACE)
        if fixed == last and (new or record.beat % _RENEWED_BEATS == 0):
            self._put_fixed(fixed, revision)

    def _put_fixed(self, fixed: SliceRecord, revision: int) -> None:
        raw = board.fixed_part(fixed, revision)
        self._client.internal_kv_put(key_names.fixed(key_names.part(fixed.replica)), raw, True, _NAMESPACE)
        self._told[fixed.replica] = revision, fixed

    def delete_slice(self, record: SliceRecord) -> None:
        """Delete what is kept of a replica. One that lives after all writes it anew: it misses its beat, which goes after the rest."""
        self._told.pop(record.replica, None)
        for key in (key_names.fixed(key_names.part(record.replica)), key_names.beat(record)):
            self._client.internal_kv_del(key, False, _NAMESPACE)
        self._delete(key_names.phase(record.replica))
        self._delete(key_names.verdict(record.replica))
        self._delete(key_names.start(record.replica))
        self._delete(key_names.stop(record.replica))
        for key in self._client.internal_kv_keys(
            key_names.compiling(record.replica, "").encode(), _NAMESPACE
        ):
            self._client.internal_kv_del(key, False, _NAMESPACE)

    def put_phase(self, replica: str, phase: str) -> None:
        """What a replica's engine is doing; written by the engine's own process."""
        self._put(key_names.phase(replica), phase.encode())

    def phase(self, replica: str) -> str:
        """What the replica's engine reported last; empty where it reported nothing."""
        return (self._get(key_names.phase(replica)) or b"").decode()

    def put_start(self, replica: str, record: StartRecord) -> None:
        """What the workers of a replica's engine found once it was up."""
        self._put(key_names.start(replica), dump(record))

    def start(self, replica: str) -> StartRecord | None:
        """What they found; None where they have told nothing."""
        raw = self._get(key_names.start(replica))
        return StartRecord.of(json.loads(raw)) if raw else None

    def put_compiling(self, replica: str, worker: str, since: float | None) -> None:
        """Since when a process of a replica's engine compiles a program, by its own clock; None where it does not."""
        key = key_names.compiling(replica, worker)
        if since is None:
            self._delete(key)
        else:
            self._put(key, json.dumps(since).encode())

    def compiling(self, replica: str) -> dict[str, float]:
        """What the processes of a replica's engine that compile have told, by key; clocks of hosts need not agree."""
        keys = self._client.internal_kv_keys(key_names.compiling(replica, "").encode(), _NAMESPACE)
        return {key.decode(): json.loads(raw) for key, raw in self._values(keys).items()}

    def put_wanted(self, wanted: Wanted) -> None:
        self._put(key_names.key(wanted.application, "wanted", wanted.model), dump(wanted))

    def delete_wanted(self, application: str, model: str) -> None:
        self._delete(key_names.key(application, "wanted", model))

    def put_release(self, deployment: str, release: Release) -> None:
        """Keep what Serve is to run of a deployment (as `records.deployment` names it)."""
        self._put(key_names.release(deployment), dump(release))

    def release(self, deployment: str) -> Release | None:
        raw = self._get(key_names.release(deployment))
        if not raw:
            return None
        release = known_fields(Release, json.loads(raw))
        return dataclasses.replace(release, other_pools=tuple(release.other_pools))

    def put_refused_deploy(self, refused: RefusedDeploy) -> None:
        self._put(key_names.refused_deploy(refused.application), dump(refused))

    def delete_refused_deploy(self, application: str) -> None:
        self._delete(key_names.refused_deploy(application))

    def rollout(self, rollout: Rollout) -> Rollout | None:
        """What is kept of a roll of the same deployment."""
        raw = self._get(key_names.key(rollout.application, "rollout", rollout.deployment))
        return known_fields(Rollout, json.loads(raw)) if raw else None

    def put_rollout(self, rollout: Rollout) -> None:
        self._put(key_names.key(rollout.application, "rollout", rollout.deployment), dump(rollout))

    def delete_rollout(self, rollout: Rollout) -> None:
        self._delete(key_names.key(rollout.application, "rollout", rollout.deployment))

    def put_retry(self, rollout: Rollout) -> None:
        """Ask that a roll that stopped is tried again."""
        self._put(key_names.retry(rollout.deployment), rollout.version.encode())

    def take_retry(self, rollout: Rollout) -> bool:
        """Whether somebody asked for that since the last look; of another version it means nothing."""
        asked = self._get(key_names.retry(rollout.deployment))
        if asked is not None:
            self._delete(key_names.retry(rollout.deployment))
        return asked == rollout.version.encode()

    def put_batches(self, application: str, batches: Sequence[BatchRecord]) -> None:
        """Say of every batch that is not over how far it is."""
        rows = [dataclasses.asdict(batch) for batch in batches]
        self._put(key_names.key(application, "batches", ""), json.dumps(rows).encode())

    def put_usage(self, application: str, usage: Sequence[UsageRecord]) -> None:
        """Say what keys have used today."""
        rows = [dataclasses.asdict(of_key) for of_key in usage]
        self._put(key_names.key(application, "usage", ""), json.dumps(rows).encode())

    def delete_kept(self, application: str) -> None:
        """Forget batches and usage of an application that is gone."""
        self._delete(key_names.key(application, "batches", ""))
        self._delete(key_names.key(application, "usage", ""))

    def beats(self) -> dict[str, frozenset[tuple[bytes, bytes]]]:
        """Of every application of which anything is kept, the beats of its slices and the demands of its routers, by key."""
        keys = self._client.internal_kv_keys(b"", _NAMESPACE)
        moving = self._values([key for key in keys if key.split(b"/", 2)[1] in _MOVING])
        beats: defaultdict[str, set[tuple[bytes, bytes]]] = defaultdict(set)
        for key in keys:
            if application := key_names.application_of(key):
                beats[application] |= {(key, moving[key])} if key in moving else set()
        return {application: frozenset(of_it) for application, of_it in beats.items()}

    def keys_of(self, application: str) -> list[bytes]:
        """What is kept of an application and its slices, but for failures on hosts."""
        keys = self._client.internal_kv_keys(b"", _NAMESPACE)
        own = [
            key
            for key in keys
            if key_names.application_of(key) == application and b"/slice-failures/" not in key
        ]
        replicas = {key.split(b"/", 2)[2] for key in own if key.split(b"/", 2)[1] == b"beat"}
        of_replicas = [key for key in keys if key.startswith(b"/") and key_names.replica_of(key) in replicas]
        return own + of_replicas

    def delete_key(self, key: bytes) -> None:
        """Delete one of `keys_of`."""
        self._client.internal_kv_del(key, False, _NAMESPACE)

    def put_demand(self, demand: Demand) -> None:
        self._put(key_names.demand(demand), dump(demand))

    def delete_demand(self, demand: Demand) -> None:
        self._delete(key_names.demand(demand))

    def put_decisions(self, application: str, kept: Iterable[DecisionRecord]) -> None:
        """Replace an application's decisions: its scaler keeps the last of them."""
        raw = json.dumps([dataclasses.asdict(decision) for decision in kept]).encode()
        self._put(key_names.key(application, "decisions", "all"), raw)

    def put_ordered(self, application: str, slices: Mapping[str, int]) -> None:
        """Replace how many slices scaling wants of each of an application's models."""
        self._put(key_names.key(application, "ordered", "all"), json.dumps(slices).encode())

    def delete_scaling(self, application: str) -> None:
        """Forget what scaling decided for an application that is gone."""
        self._delete(key_names.key(application, "decisions", "all"))
        self._delete(key_names.key(application, "ordered", "all"))

    def put_suspicions(self, application: str, router: str, suspicions: Mapping[str, Suspicion]) -> None:
        """Replace a router's suspicions; an empty mapping deletes its record."""
        key = key_names.key(application, "suspicions", router)
        if not suspicions:
            self._delete(key)
            return
        fields = {name: dataclasses.asdict(suspicion) for name, suspicion in suspicions.items()}
        self._put(key, json.dumps({"router": router, "suspicions": fields}).encode())

    def put_verdict(self, replica: str, reason: str) -> None:
        """Tell a replica that its slice gives wrong tokens."""
        self._put(key_names.verdict(replica), reason.encode())

    def verdict(self, replica: str) -> str:
        """Why the replica's slice is wrong; empty where nobody said so."""
        return (self._get(key_names.verdict(replica)) or b"").decode()

    def put_stop(self, replica: str) -> None:
        """Keep that Serve stops a replica, whatever it is doing."""
        self._put(key_names.stop(replica), b"stopped")

    def ended_alone(self, record: SliceRecord) -> bool:
        """Whether nobody stopped the replica, and no other reader has taken its record away."""
        stopped = (
            self._get(key_names.stop(record.replica)) is not None
        )  # `delete_slice` deletes it after the beat
        return not stopped and self._get(key_names.beat(record).decode()) is not None

    def has_moved(self, known: SliceRecord | Demand) -> bool:
        """Whether who writes this record has beaten since it was read."""
        if isinstance(known, SliceRecord):
            raw = self._get(key_names.beat(known).decode())
            return raw is not None and board.beat_of(raw) != known.beat
        raw = self._get(key_names.demand(known))
        return raw is not None and json.loads(raw)["beat"] != known.beat

    def put_slice_failures(self, failed: SliceFailures) -> None:
        self._put(key_names.slice_failures(failed), dump(failed))

    def delete_slice_failures(self, failed: SliceFailures) -> None:
        self._delete(key_names.slice_failures(failed))

    def claim(self, application: str, what: str, by: str, now: float, until: float) -> bool:
        """Take something that only one may have at a time; `until` bounds the claim of a process that ends without giving back."""
        key, value = (
            key_names.key(application, "claim", what),
            json.dumps({"by": by, "until": until}).encode(),
        )
        if self._client.internal_kv_put(key.encode(), value, False, _NAMESPACE):
            return True
        known = self._claim(key)
        if known["by"] != by and now < known["until"]:
            return False
        self._put(key, value)
        return True

    def unclaim(self, application: str, what: str, by: str) -> None:
        """Give back what `by` has."""
        key = key_names.key(application, "claim", what)
        if self._claim(key)["by"] == by:
            self._delete(key)

    def _claim(self, key: str) -> dict[str, Any]:
        claim: dict[str, Any] = {"by": "", "until": 0.0, **json.loads(self._get(key) or b"{}")}
        return claim

    def _values(self, keys: list[bytes]) -> dict[bytes, bytes]:
        return self._client.internal_kv_multi_get(keys, _NAMESPACE) if keys else {}

    def _get(self, key: str) -> bytes | None:
        return self._client.internal_kv_get(key.encode(), _NAMESPACE)  # type: ignore[no-any-return]

    def _put(self, key: str, value: bytes) -> None:
        self._client.internal_kv_put(key.encode(), value, True, _NAMESPACE)

    def _delete(self, key: str) -> None:
        self._client.internal_kv_del(key.encode(), False, _NAMESPACE)


def _others(kinds: Mapping[str, Iterable[tuple[str, bytes]]]) -> Snapshot:
    """What was listed but beats: by kind, the application and the bytes of each record."""

    def fields(kind: str) -> list[tuple[str, Any]]:
        return [(owner, json.loads(raw)) for owner, raw in kinds.get(kind, ())]

    def records(kind: type[_Record], entries: Iterable[Mapping[str, Any]]) -> Iterator[_Record]:
        for entry in entries:
            # What another version wrote, and lacks what this one needs, is nobody's: who beats writes it anew.
            with contextlib.suppress(TypeError):
                yield known_fields(kind, entry)

    def of_kind(kind: str) -> list[Any]:
        return [record for _, record in fields(kind)]

    def all_of(kind: str) -> list[Any]:
        return [record for _, kept in fields(kind) for record in kept]

    decisions = records(DecisionRecord, all_of("decisions"))
    return Snapshot(
        demands=tuple(records(Demand, of_kind("demand"))),
        wanted=tuple(sorted(records(Wanted, of_kind("wanted")), key=lambda wanted: wanted.model)),
        decisions=tuple(sorted(decisions, key=lambda decision: decision.at)),
        ordered=dict(fields("ordered")),
        suspicions={
            record["router"]: {
                name: suspicion
                for name, of_router in record["suspicions"].items()
                for suspicion in records(
                    Suspicion, [of_router | {"before": tuple(of_router.get("before", ()))}]
                )
            }
            for _, record in fields("suspicions")
        },
        slice_failures=tuple(records(SliceFailures, of_kind("slice-failures"))),
        rollouts=tuple(records(Rollout, of_kind("rollout"))),
        refused_deploys=tuple(records(RefusedDeploy, of_kind("refused-deploy"))),
        batches=tuple(records(BatchRecord, all_of("batches"))),
        usage=tuple(records(UsageRecord, all_of("usage"))),
    )
