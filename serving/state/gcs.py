"""The store: Ray's key-value store in the GCS, and the one door to it.

The GCS is the one process that a Ray cluster can't do without. A record there outlives replica, router and Serve
controller, and no reader has to ask a process that may be busy or dead. A put or get takes 0.2 ms.

A key is APPLICATION/KIND/NAME, so that one listing gives the records of one application alone. A replica's phase and a
deployment's release belong to no application in their key: their names are unique in the cluster.
"""

import dataclasses
import json
import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping
from urllib.parse import quote

from ray._raylet import AuthenticationTokenLoader, Config, GcsClient  # type: ignore[attr-defined]  # compiled

from serving import environment
from serving.errors import ClusterError
from serving.state.records import (
    DecisionRecord,
    Demand,
    Release,
    SliceFailures,
    SliceRecord,
    Snapshot,
    Suspicion,
    Wanted,
    dump,
)

_CONNECT_TIMEOUT_S = 5
_NAMESPACE = b"tpu-serving"
CLAIM_S = 30.0  # of a process that ended without giving back what it had


_TOKEN = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def show_token(variables: Mapping[str, str]) -> None:
    """Have this process show the cluster's token that these variables name. Ray itself reads them only when it is loaded."""
    environment.write({name: variables.get(name) for name in _TOKEN})
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


class Store:
    """The records of the cluster at one address."""

    def __init__(self, address: str) -> None:
        """Does not join the cluster as a driver; raises ClusterError where nobody listens."""
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
        """All records of one application, or of all: two calls, however many records there are."""
        prefix = b"" if application is None else f"{_name(application)}/".encode()
        kinds: defaultdict[str, list[tuple[str, bytes]]] = defaultdict(list)
        for key, value in self._list(prefix):
            owner, _, rest = key.partition("/")
            kind, _, _ = rest.partition("/")
            kinds[kind].append((owner, value))
        decisions = [DecisionRecord(**fields) for _, raw in kinds["decisions"] for fields in json.loads(raw)]
        return Snapshot(
            slices=tuple(SliceRecord.load(raw) for _, raw in kinds["slice"]),
            demands=tuple(Demand(**json.loads(raw)) for _, raw in kinds["demand"]),
            wanted=tuple(
                sorted(
                    (Wanted(**json.loads(raw)) for _, raw in kinds["wanted"]), key=lambda wanted: wanted.model
                )
            ),
            decisions=tuple(sorted(decisions, key=lambda decision: decision.at)),
            ordered={owner: json.loads(raw) for owner, raw in kinds["ordered"]},
            suspicions={
                record["router"]: {name: Suspicion(**fields) for name, fields in record["suspicions"].items()}
                for record in (json.loads(raw) for _, raw in kinds["suspicions"])
            },
            slice_failures=tuple(SliceFailures(**json.loads(raw)) for _, raw in kinds["slice-failures"]),
        )

    def slices(self, application: str | None = None) -> list[SliceRecord]:
        """Every slice replica's record, in no order."""
        return list(self.read(application).slices)

    def put_slice(self, record: SliceRecord) -> None:
        self._put(_slice_key(record), dump(record))

    def delete_slice(self, record: SliceRecord) -> None:
        self._delete(_slice_key(record))
        self._delete(_phase_key(record.replica))
        self._delete(_verdict_key(record.replica))

    def put_phase(self, replica: str, phase: str) -> None:
        """What a replica's engine is doing; written by the engine's own process."""
        self._put(_phase_key(replica), phase.encode())

    def phase(self, replica: str) -> str:
        """What the replica's engine reported last; empty where it reported nothing."""
        return (self._get(_phase_key(replica)) or b"").decode()

    def put_wanted(self, wanted: Wanted) -> None:
        self._put(_key(wanted.application, "wanted", wanted.model), dump(wanted))

    def delete_wanted(self, application: str, model: str) -> None:
        self._delete(_key(application, "wanted", model))

    def put_release(self, deployment: str, release: Release) -> None:
        """Keep what Serve is to run of a deployment (as `records.deployment` names it)."""
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
        raw = json.dumps([dataclasses.asdict(decision) for decision in kept]).encode()
        self._put(_key(application, "decisions", "all"), raw)

    def put_ordered(self, application: str, slices: Mapping[str, int]) -> None:
        """Replace how many slices scaling wants of each of an application's models."""
        self._put(_key(application, "ordered", "all"), json.dumps(slices).encode())

    def put_suspicions(self, application: str, router: str, suspicions: Mapping[str, Suspicion]) -> None:
        """Replace a router's suspicions; an empty mapping deletes its record."""
        key = _key(application, "suspicions", router)
        if not suspicions:
            self._delete(key)
            return
        fields = {name: dataclasses.asdict(suspicion) for name, suspicion in suspicions.items()}
        self._put(key, json.dumps({"router": router, "suspicions": fields}).encode())

    def put_verdict(self, replica: str, reason: str) -> None:
        """Tell a replica that its slice gives wrong tokens."""
        self._put(_verdict_key(replica), reason.encode())

    def verdict(self, replica: str) -> str:
        """Why the replica's slice is wrong; empty where nobody said so."""
        return (self._get(_verdict_key(replica)) or b"").decode()

    def put_slice_failures(self, failed: SliceFailures) -> None:
        self._put(_failed_key(failed), dump(failed))

    def delete_slice_failures(self, failed: SliceFailures) -> None:
        self._delete(_failed_key(failed))

    def claim(self, application: str, what: str, by: str, now: float) -> bool:
        """Take something that only one may have at a time; a claim older than CLAIM_S counts no more."""
        key, value = _key(application, "claim", what), json.dumps({"by": by, "at": now}).encode()
        if self._client.internal_kv_put(key.encode(), value, False, _NAMESPACE):
            return True
        known = json.loads(self._get(key) or b'{"by": "", "at": 0}')
        if known["by"] != by and now - known["at"] < CLAIM_S:
            return False
        self._put(key, value)
        return True

    def unclaim(self, application: str, what: str) -> None:
        self._delete(_key(application, "claim", what))

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


def _failed_key(failed: SliceFailures) -> str:
    return _key(failed.application, "slice-failures", f"{failed.slice}/{failed.host}")


def _verdict_key(replica: str) -> str:
    return _key("", "verdict", replica)


def _release_key(deployment: str) -> str:
    return _key("", "release", deployment)
