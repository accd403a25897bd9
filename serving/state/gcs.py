"""The store: Ray's key-value store in the GCS, and the one door to it.

The GCS is the one process that a Ray cluster can't do without. A record there outlives replica, router and Serve
controller, and nobody has to ask a process that may be busy or dead. A put or get takes 0.2 ms.

A key is APPLICATION/KIND/NAME, so that one listing gives all of an application and nothing of another. What every process
of one cluster shares (a replica's phase, a deployment's release) has names of its own that no two applications share.
"""

import dataclasses
import json
import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping
from urllib.parse import quote

from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled

from serving.errors import ClusterError
from serving.state.records import (
    DecisionRecord,
    Demand,
    Release,
    SliceRecord,
    Snapshot,
    Suspicion,
    Wanted,
    dump,
)

_CONNECT_TIMEOUT_S = 5
_NAMESPACE = b"tpu-serving"


class Store:
    """The records of the cluster at one address."""

    def __init__(self, address: str) -> None:
        """Without joining the cluster as a driver; raises ClusterError where nobody listens."""
        self.address = address
        self.check()
        self._client = GcsClient(address=address)

    def check(self) -> None:
        """Raises ClusterError where nobody listens: Ray's client would try for 40 s, and then end the process."""
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
        except (OSError, ValueError):
            raise ClusterError(
                f"no Ray cluster answers at {self.address!r}; an address is host:port of its head"
            ) from None

    def read(self, application: str | None = None) -> Snapshot:
        """All records of one application, or of every one: two calls, however many records there are."""
        prefix = b"" if application is None else f"{_name(application)}/".encode()
        kinds: defaultdict[str, list[tuple[str, bytes]]] = defaultdict(list)
        for key, value in self._list(prefix):
            owner, _, rest = key.partition("/")
            kind, _, _ = rest.partition("/")
            kinds[kind].append((owner, value))
        decisions = [DecisionRecord(**one) for _, raw in kinds["decisions"] for one in json.loads(raw)]
        return Snapshot(
            slices=tuple(SliceRecord.load(raw) for _, raw in kinds["slice"]),
            demands=tuple(Demand(**json.loads(raw)) for _, raw in kinds["demand"]),
            wanted=tuple(
                sorted((Wanted(**json.loads(raw)) for _, raw in kinds["wanted"]), key=lambda one: one.model)
            ),
            decisions=tuple(sorted(decisions, key=lambda one: one.at)),
            ordered={owner: json.loads(raw) for owner, raw in kinds["ordered"]},
            suspicions={
                told["router"]: {name: Suspicion(**one) for name, one in told["suspicions"].items()}
                for told in (json.loads(raw) for _, raw in kinds["suspicions"])
            },
        )

    def slices(self, application: str | None = None) -> list[SliceRecord]:
        """Every slice replica's record, in no order."""
        return list(self.read(application).slices)

    def put_slice(self, record: SliceRecord) -> None:
        self._put(_slice_key(record), dump(record))

    def delete_slice(self, record: SliceRecord) -> None:
        self._delete(_slice_key(record))
        self._delete(_phase_key(record.replica))

    def put_phase(self, replica: str, phase: str) -> None:
        """What a replica's engine is doing; written by the engine's own process."""
        self._put(_phase_key(replica), phase.encode())

    def phase(self, replica: str) -> str:
        """What the replica's engine said last; empty where it said nothing."""
        return (self._get(_phase_key(replica)) or b"").decode()

    def put_wanted(self, wanted: Wanted) -> None:
        self._put(_key(wanted.application, "wanted", wanted.model), dump(wanted))

    def delete_wanted(self, application: str, model: str) -> None:
        self._delete(_key(application, "wanted", model))

    def put_release(self, deployment: str, release: Release) -> None:
        """What was asked for last of a deployment (as `records.deployment` names it)."""
        self._put(_release_key(deployment), dump(release))

    def release(self, deployment: str) -> Release | None:
        raw = self._get(_release_key(deployment))
        return Release(**json.loads(raw)) if raw else None

    def put_demand(self, demand: Demand) -> None:
        self._put(_demand_key(demand), dump(demand))

    def delete_demand(self, demand: Demand) -> None:
        self._delete(_demand_key(demand))

    def put_decisions(self, application: str, kept: Iterable[DecisionRecord]) -> None:
        """Replace an application's decisions: its scaler keeps the last of them."""
        raw = json.dumps([dataclasses.asdict(one) for one in kept]).encode()
        self._put(_key(application, "decisions", "all"), raw)

    def put_ordered(self, application: str, slices: Mapping[str, int]) -> None:
        """Replace how many slices scaling wants of each of an application's models."""
        self._put(_key(application, "ordered", "all"), json.dumps(slices).encode())

    def put_suspicions(self, application: str, router: str, suspicions: Mapping[str, Suspicion]) -> None:
        """Replace whom a router suspects; an empty mapping takes its record out of the store."""
        key = _key(application, "suspicions", router)
        if not suspicions:
            self._delete(key)
            return
        said = {name: dataclasses.asdict(one) for name, one in suspicions.items()}
        self._put(key, json.dumps({"router": router, "suspicions": said}).encode())

    def _list(self, prefix: bytes) -> Iterable[tuple[str, bytes]]:
        keys = self._client.internal_kv_keys(prefix, _NAMESPACE)
        values = self._client.internal_kv_multi_get(keys, _NAMESPACE) if keys else {}
        return ((key.decode(), value) for key, value in values.items())

    def _get(self, key: str) -> bytes | None:
        return self._client.internal_kv_get(key.encode(), _NAMESPACE)  # type: ignore[no-any-return]

    def _put(self, key: str, value: bytes) -> None:
        self._client.internal_kv_put(key.encode(), value, True, _NAMESPACE)

    def _delete(self, key: str) -> None:
        self._client.internal_kv_del(key.encode(), False, _NAMESPACE)


def _name(part: str) -> str:
    """A name as one part of a key: model names have slashes."""
    return quote(part, safe="")


def _key(application: str, kind: str, name: str) -> str:
    return f"{_name(application)}/{kind}/{_name(name)}"


def _slice_key(record: SliceRecord) -> str:
    return _key(record.application, "slice", record.replica)


def _demand_key(demand: Demand) -> str:
    return _key(demand.application, "demand", f"{demand.router}/{demand.model}")


def _phase_key(replica: str) -> str:
    return _key("", "phase", replica)


def _release_key(deployment: str) -> str:
    return _key("", "release", deployment)
