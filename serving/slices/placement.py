"""Serve places a slice replica on one whole slice, or waits for one.

Serve makes a replica's placement group itself and can't say "all bundles on one slice"; Ray's core can, with
`topology_strategy`. Serve restarts every replica when anything in the YAML changes; a slice takes minutes to load, so here slices
and routers restart only where they would be made differently. Serve picks the replica to stop by its node; here the slice that costs
least to drain goes. A deployments/*.yaml names `install` in `controller_options` as the controller callback. It runs inside
the Serve controller before the scheduler is made. It replaces three functions: they create groups, read a deployment's
version, and pick the replicas to stop. Only this module uses these private names of Ray Serve:

- `ray.serve._private.default_impl._default_create_placement_group` (its header promises stability to extensions)
- `ray.serve._private.application_state.deploy_args_to_deployment_info`, and `version`, `deployment_config.user_config`
  and `replica_config.placement_group_bundles` of its result
- `ray.serve._private.deployment_scheduler.DeploymentScheduler._get_replicas_to_stop` and `_running_replicas`
- the fields of `ray.serve._private.common.CreatePlacementGroupRequest` that this module reads
- `ray.serve.context._get_global_client`, for the address that the front door listens on
- `ray._private.worker.global_worker.node`, for the folder of Ray's logs
"""

import contextlib
import functools
import inspect
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from serving.errors import ExtensionPointError
from serving.slices import abandoned, controller, quarantine, recovery, refused
from serving.slices.rollout import cost_to_drain
from serving.state.gcs import Store
from serving.state.records import Release, SliceState, Snapshot, deployment
from serving.timings import TIMINGS
from serving.tpu import POD_TYPE_LABEL, POOL_LABEL, SLICE_LABEL, pool_label, serves_pool

logger = logging.getLogger("ray.serve")

NODE_LABEL = "ray.io/node-id"
CALLBACK = "serving.slices.placement.install"
_ASK_EVERY_S = 1.0
_REPLICA = "SERVE_REPLICA::"  # Serve begins the names of replicas and their groups with this
_NAMESPACE = "serve"
VERSION = "version"  # in the user_config of a deployment that says itself when its replicas are made anew
_EXTENSION_POINT = "_default_create_placement_group"
_VERSION_POINT = "deploy_args_to_deployment_info"
_STOP_POINT = "_get_replicas_to_stop"


@dataclass(frozen=True)
class Without:
    """Where a replica is not placed: on these slices, which are in quarantine, and on hosts of these pools, by their label."""

    slices: frozenset[str] = frozenset()
    pools: frozenset[str] = frozenset()

    def suffices(self, wanted: "Without") -> bool:
        """Whether a group that waits with this may wait on. What is left out for a pool that is gone does no harm."""
        return self.slices == wanted.slices and self.pools >= wanted.pools


_ANYWHERE = Without()


def is_slice(bundles: Sequence[Mapping[str, float]]) -> bool:
    """Whether bundle 0 asks for a slice's head resource, which only worker 0 of a slice has."""
    return bool(bundles) and _pod_type(bundles[0]) is not None


def _pod_type(bundle: Mapping[str, float]) -> str | None:
    """v6e-16 of a bundle that holds TPU-v6e-16-head."""
    heads = (name for name in bundle if name.startswith("TPU-") and name.endswith("-head"))
    return next((name.removeprefix("TPU-").removesuffix("-head") for name in heads), None)


def create_slice_group(
    bundles: Sequence[Mapping[str, float]],
    *,
    name: str,
    lifetime: str | None = None,
    without: Without = _ANYWHERE,
) -> Any:
    """One placement group over all hosts of one slice: atomic, and pending until a whole slice is free.

    Hosts without a pool's label are not left out for any pool: clusters made by hand, and those of older manifests, have none.

    Ray's autoscaler does not know that the bundles need one slice. Without the selector it puts all but the first on any
    host with the chips, also of another pool. It then orders less than a slice, which KubeRay rounds down to none.
    """
    selector = {POD_TYPE_LABEL: _pod_type(bundles[0])}
    for label, values in {SLICE_LABEL: without.slices, POOL_LABEL: without.pools}.items():
        if values:
            selector[label] = f"!in({','.join(sorted(values))})"
    return ray.util.placement_group(
        [dict(bundle) for bundle in bundles],
        name=name,
        lifetime=lifetime,
        bundle_label_selector=[selector] * len(bundles),
        topology_strategy={SLICE_LABEL: "STRICT_PACK", NODE_LABEL: "STRICT_SPREAD"},
    )


def install() -> None:
    """Make the Serve controller of this process place slice replicas on whole slices.

    Raises ExtensionPointError where Ray lacks a name that this needs.
    """
    from ray.serve._private import default_impl  # noqa: PLC0415  only the controller needs it, and has it loaded

    default = _extension_point(default_impl)

    def create(request: Any) -> Any:
        if not is_slice(request.bundles):
            return default(request)
        without = waiting.left_out_of_new(request.name, request.bundles)
        group = create_slice_group(request.bundles, name=request.name, lifetime="detached", without=without)
        waiting.add(request.name, request.bundles, group, without)
        return group

    waiting = _Waiting(lambda: _store())
    threading.Thread(target=waiting.run, name="quarantine", daemon=True).start()
    setattr(default_impl, _EXTENSION_POINT, create)
    _version_by_engine()
    _stop_the_cheapest(_store)
    _roll_in_waves()
    _let_starts_go_on(waiting)
    _delete_abandoned_records()


@dataclass(frozen=True)
class _Asked:
    """A placement group that Serve asked for, by its bundles, and what it leaves out."""

    bundles: Sequence[Mapping[str, float]]
    group: Any
    without: Without


class _Waiting:
    """Replicas that wait for a slice. A group can't change what it leaves out: it ends with its replica, and Serve
    starts another one.

    Of a replica that waits when a controller comes back Serve starts another one after 30 s.
    """

    def __init__(self, store: Callable[[], Store]) -> None:
        self._store = store
        self._asked: dict[str, _Asked] = {}
        self._ended: set[str] = set()

    def has_ended(self, name: str) -> bool:
        """Whether the replica was ended here, because another one is to leave out other slices. Said once."""
        ended = name in self._ended
        self._ended.discard(name)
        return ended

    def add(self, name: str, bundles: Sequence[Mapping[str, float]], group: Any, without: Without) -> None:
        self._asked[name] = _Asked(bundles, group, without)

    def left_out_of_new(self, name: str, bundles: Sequence[Mapping[str, float]]) -> Without:
        """What is left out for a new replica; nothing where the store can't be read."""
        try:
            return self.left_out_of_each({name: bundles})[name]
        except Exception:
            logger.exception("the store can't be read: no slice is left out for %s", name)
            return _ANYWHERE

    def left_out_of_each(self, replicas: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Without]:
        """What is left out for replicas, by name."""
        store = self._store()
        snapshot, nodes, now = store.read(), ray.nodes(), store.now()
        releases = {owner: store.release(owner) for owner in {_deployment_of(name) for name in replicas}}
        return {
            name: left_out(snapshot, nodes, _pod_type(bundles[0]) or "", releases[_deployment_of(name)], now)
            for name, bundles in replicas.items()
        }

    def run(self) -> None:
        while True:
            time.sleep(TIMINGS.quarantine_look_s)
            try:
                self._store().tell_time()
                self.look()
            except Exception:
                logger.exception("waiting replicas can't be looked at; trying again")

    def look(self) -> None:
        """Remove groups that still wait and leave out something else than they should."""
        known = dict(self._asked)
        if not known:
            return
        table = ray.util.placement_group_table().values()
        pending = {group["name"] for group in table if group["state"] == "PENDING"}
        for name in known.keys() - pending:
            del self._asked[name]
        waiting = {name: asked for name, asked in known.items() if name in pending}
        without = self.left_out_of_each({name: asked.bundles for name, asked in waiting.items()})
        for name, asked in waiting.items():
            if not asked.without.suffices(without[name]):
                logger.info("%s waits for a slice, and others are left out than before: asking anew", name)
                del self._asked[name]
                self._ended.add(name)
                ray.util.remove_placement_group(asked.group)
                _end(name)  # Ray leaves an actor waiting for a group that is gone


def _deployment_of(replica: str) -> str:
    """The deployment of a replica by its full name."""
    return replica.removeprefix(_REPLICA).rpartition("#")[0]


def left_out(
    snapshot: Snapshot, nodes: Sequence[Mapping[str, Any]], pod_type: str, release: Release | None, now: float
) -> Without:
    """What is left out for a replica of a release, by the store's time. `nodes` are Ray's.

    Of pools that the YAML has no more, hosts may be there still: their labels say so.
    """
    release = release or Release("", "")
    slices = slices_left_out(snapshot, pod_type, release.version, now, release.pool, nodes)
    if not release.pool:
        return Without(slices)
    labels = {
        node["Labels"].get(POOL_LABEL, "")
        for node in nodes
        if node["Alive"] and node["Labels"].get(POD_TYPE_LABEL) == pod_type
    }
    others = labels | {pool_label(pool) for pool in release.other_pools}
    return Without(slices, frozenset(others - {"", pool_label(release.pool)}))


def slices_left_out(
    snapshot: Snapshot,
    pod_type: str,
    version: str,
    now: float,
    pool: str = "",
    nodes: Sequence[Mapping[str, Any]] | None = None,
) -> frozenset[str]:
    """The slices of this type that no engine of this version and pool is to be placed on now, by the store's time; `nodes` are Ray's."""
    if not snapshot.slice_failures:
        return frozenset()
    held = {entry.slice for entry in snapshot.slices if entry.state is not SliceState.LOST}
    hosts = [
        (node["Labels"], node["NodeManagerAddress"])
        for node in (ray.nodes() if nodes is None else nodes)
        if node["Alive"]
    ]
    known = quarantine.of_hosts_there(
        snapshot.slice_failures, {(labels.get(SLICE_LABEL, ""), address) for labels, address in hosts}
    )
    there = {
        labels[SLICE_LABEL]
        for labels, _ in hosts
        if labels.get(POD_TYPE_LABEL) == pod_type
        and (not pool or serves_pool(labels.get(POOL_LABEL, ""), pool))
    }
    return quarantine.left_out(known, there - held, pod_type, version, now)


def _version_by_engine() -> None:
    from ray.serve._private import application_state  # noqa: PLC0415  as above

    read = _existing(application_state, _VERSION_POINT, "slices are kept while their engine does not change")

    def read_slice(*args: Any, **kwargs: Any) -> Any:
        info = read(*args, **kwargs)
        settings = info.deployment_config.user_config
        if isinstance(settings, dict) and VERSION in settings:
            info.version = settings[VERSION]
        if is_slice(info.replica_config.placement_group_bundles or ()):
            _store().put_release(
                deployment(kwargs["app_name"], kwargs["deployment_name"]),
                Release(settings[VERSION], settings["pool"], tuple(settings.get("other_pools", ()))),
            )
        return info

    setattr(application_state, _VERSION_POINT, read_slice)


def _roll_in_waves() -> None:
    from ray.serve._private import application_state, deployment_state  # noqa: PLC0415  as above

    for name in controller.STATE_POINTS:
        _existing(
            deployment_state.DeploymentState,
            name,
            "a changed engine rolls in waves, and starts are tried again",
        )
    _existing(
        application_state.ApplicationState, controller.DELETE_POINT, "a pool's slices go once others serve"
    )
    _existing(application_state.ApplicationState, refused.POINT, "status says what Serve refused to deploy")
    refused.install(application_state.ApplicationState, _store)
    controller.install(
        deployment_state.DeploymentState,
        application_state.ApplicationState,
        is_slice,
        _store,
        _Placed(time.monotonic).has_hardware,
    )


def _let_starts_go_on(waiting: _Waiting) -> None:
    from ray.serve._private import deployment_state  # noqa: PLC0415  as above

    purpose = "slices that start outlive the controller"
    wrapper, state = deployment_state.ActorReplicaWrapper, deployment_state.DeploymentState
    _existing(wrapper, recovery.READY_POINT, purpose)
    _existing(state, recovery.STARTUP_POINT, purpose)
    recovery.install(wrapper, state, lambda: _store().slices(), placed_anew=waiting.has_ended)


def _delete_abandoned_records() -> None:
    from ray.serve._private.application_state import ApplicationState  # noqa: PLC0415  as above

    records = abandoned.AbandonedRecords(lambda: _store(), abandoned.applications(ApplicationState))
    threading.Thread(target=records.run, name="abandoned-records", daemon=True).start()


class _Placed:
    """Which replicas have their placement group, by one question for all of them in a while."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._created: frozenset[str] = frozenset()
        self._asked_s = -math.inf

    def has_hardware(self, replica: str) -> bool:
        """Of a replica by its full name; one that is not known to have any counts as waiting."""
        if replica not in self._created and self._clock() - self._asked_s >= _ASK_EVERY_S:
            self._asked_s = self._clock()
            table = ray.util.placement_group_table().values()
            self._created = frozenset(group["name"] for group in table if group["state"] == "CREATED")
        return replica in self._created


@functools.cache
def _store() -> Store:
    """The store of the cluster that this process has joined."""
    return Store(ray.get_runtime_context().gcs_address)


def _stop_the_cheapest(store: Callable[[], controller.RolloutStore]) -> None:
    from ray.serve._private.deployment_scheduler import DeploymentScheduler  # noqa: PLC0415  as above

    default = _existing(
        DeploymentScheduler, _STOP_POINT, "the slice that costs least to drain is stopped first"
    )

    def to_stop(scheduler: Any, deployment_id: Any, most: int, *args: Any, **kwargs: Any) -> set[Any]:
        chosen: set[Any] = default(scheduler, deployment_id, most, *args, **kwargs)
        running: set[Any] = chosen & scheduler._running_replicas[deployment_id].keys()  # noqa: SLF001
        controller.tell_stopped(store, {replica.unique_id for replica in chosen - running})
        if not running:
            return chosen  # replicas that wait for hardware or still start cost nothing
        name = deployment(deployment_id.app_name, deployment_id.name)
        try:
            costs = {
                entry.tag: cost_to_drain(entry) for entry in store().slices() if entry.deployment == name
            }
        except Exception:
            logger.exception("the store can't be read: Serve's own choice of %s stops", name)
            return chosen
        running_ids = scheduler._running_replicas[deployment_id]  # noqa: SLF001
        known = [replica for replica in running_ids if replica.unique_id in costs]
        if len(known) < len(running):
            return chosen  # not a deployment of slices
        cheapest: set[Any] = set(sorted(known, key=lambda replica: costs[replica.unique_id])[: len(running)])
        return (chosen - running) | cheapest

    setattr(DeploymentScheduler, _STOP_POINT, to_stop)


def session_logs() -> Path:
    """The folder of Ray's logs on this host."""
    return Path(ray._private.worker.global_worker.node.get_session_dir_path()) / "logs"  # noqa: SLF001


def end_replica(deployment: str, tag: str) -> None:
    """End a silent replica, so that Serve starts another: Ray takes a minute to call a stopped host dead."""
    _end(f"{_REPLICA}{deployment}#{tag}")


def _end(replica: str) -> None:
    with contextlib.suppress(ValueError):  # it has ended by itself
        ray.kill(ray.get_actor(replica, namespace=_NAMESPACE))


def http_host() -> str:
    """The host of `http_options` of the Serve this process runs in; blocks."""
    from ray.serve.context import _get_global_client  # noqa: PLC0415  as above

    return str(_get_global_client().http_config.host)


def _extension_point(module: Any) -> Callable[[Any], Any]:
    default = _existing(module, _EXTENSION_POINT, "replicas are put on whole TPU slices")
    if "topology_strategy" not in inspect.signature(ray.util.placement_group).parameters:
        raise ExtensionPointError(
            f"ray.util.placement_group of Ray {ray.__version__} takes no topology_strategy, which keeps a group on one "
            "TPU slice; install ray[serve]==2.60.0"
        )
    return default


def _existing(owner: Any, name: str, purpose: str) -> Callable[..., Any]:
    """Ray's function of a private name; raises ExtensionPointError where Ray has none."""
    function: Callable[..., Any] | None = getattr(owner, name, None)
    if function is None:
        raise ExtensionPointError(
            f"Ray {ray.__version__} has no {owner.__name__}.{name}, through which {purpose}; install ray[serve]==2.60.0"
        )
    return function
