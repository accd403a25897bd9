"""Serve places a slice replica on one whole slice, or waits for one.

Serve makes a replica's placement group itself and offers no way to say "all bundles on one slice". Ray's core can:
`topology_strategy`. Serve also restarts every replica when anything in the YAML changes; a slice that takes minutes to
load is restarted only where its engine would start otherwise. And of several replicas Serve stops one by its
node; here the slice that costs least to drain goes. `install` is the controller callback that a deployments/*.yaml names in
`controller_options`; it runs inside the Serve controller before its scheduler is made and replaces the function that
creates groups, the one that reads a deployment's version, and the one that picks who stops.
Private names of Ray Serve are used in this module alone:

- `ray.serve._private.default_impl._default_create_placement_group` (its header promises stability to extensions)
- `ray.serve._private.application_state.deploy_args_to_deployment_info`, and `version`, `deployment_config.user_config`
  and `replica_config.placement_group_bundles` of what it returns
- `ray.serve._private.deployment_scheduler.DeploymentScheduler._get_replicas_to_stop` and `_running_replicas`
- the fields of `ray.serve._private.common.CreatePlacementGroupRequest` that it reads
- `ray.serve.context._get_global_client`, for the address that the front door listens on
"""

import contextlib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from serving.errors import ExtensionPointError
from serving.slices.rollout import cost_to_drain
from serving.state.gcs import Store
from serving.state.records import Release, SliceRecord, deployment
from serving.tpu import POD_TYPE_LABEL

logger = logging.getLogger("ray.serve")

SLICE_LABEL = "ray.io/tpu-slice-name"
WORKER_LABEL = "ray.io/tpu-worker-id"
NODE_LABEL = "ray.io/node-id"
CALLBACK = "serving.slices.placement.install"
_REPLICA = "SERVE_REPLICA::"  # what Serve's names of replicas and their groups begin with
_NAMESPACE = "serve"
_EXTENSION_POINT = "_default_create_placement_group"
_VERSION_POINT = "deploy_args_to_deployment_info"
_STOP_POINT = "_get_replicas_to_stop"


def is_slice(bundles: Sequence[Mapping[str, float]]) -> bool:
    """Whether bundle 0 asks for a slice's head resource, which only worker 0 of a slice has."""
    return bool(bundles) and _pod_type(bundles[0]) is not None


def _pod_type(bundle: Mapping[str, float]) -> str | None:
    """v6e-16 of a bundle that holds TPU-v6e-16-head."""
    heads = (name for name in bundle if name.startswith("TPU-") and name.endswith("-head"))
    return next((name.removeprefix("TPU-").removesuffix("-head") for name in heads), None)


def create_slice_group(
    bundles: Sequence[Mapping[str, float]], *, name: str, lifetime: str | None = None
) -> Any:
    """One placement group over all hosts of one slice: atomic, and pending for as long as no slice is whole and free.

    Ray's autoscaler knows nothing of the one slice. Without the selector it puts all bundles but the first on whatever host
    has the chips, of another pool too, and then orders less than a slice, which KubeRay rounds down to none.
    """
    return ray.util.placement_group(
        [dict(bundle) for bundle in bundles],
        name=name,
        lifetime=lifetime,
        bundle_label_selector=[{POD_TYPE_LABEL: _pod_type(bundles[0])}] * len(bundles),
        topology_strategy={SLICE_LABEL: "STRICT_PACK", NODE_LABEL: "STRICT_SPREAD"},
    )


def is_waiting(deployment: str) -> bool:
    """Whether a replica of this deployment, named `application#deployment`, waits for a slice."""
    groups = ray.util.placement_group_table().values()
    name = f"{_REPLICA}{deployment}#"
    return any(group["state"] == "PENDING" and group["name"].startswith(name) for group in groups)


def install() -> None:
    """Make the Serve controller of this process place slice replicas on whole slices.

    Raises ExtensionPointError where Ray lacks what this rests on.
    """
    from ray.serve._private import default_impl  # noqa: PLC0415  the controller has it loaded; nobody else needs it

    default = _extension_point(default_impl)

    def create(request: Any) -> Any:
        if not is_slice(request.bundles):
            return default(request)
        return create_slice_group(request.bundles, name=request.name, lifetime="detached")

    setattr(default_impl, _EXTENSION_POINT, create)
    _version_by_engine()
    _stop_the_cheapest(lambda: _store().slices())


def _version_by_engine() -> None:
    from ray.serve._private import application_state  # noqa: PLC0415  as above

    read = _existing(application_state, _VERSION_POINT, "slices are kept while their engine does not change")

    def read_slice(*args: Any, **kwargs: Any) -> Any:
        info = read(*args, **kwargs)
        if is_slice(info.replica_config.placement_group_bundles or ()):
            says = info.deployment_config.user_config
            info.version = says["version"]
            _store().put_release(
                deployment(kwargs["app_name"], kwargs["deployment_name"]),
                Release(says["version"], says["pool"]),
            )
        return info

    setattr(application_state, _VERSION_POINT, read_slice)


def _store() -> Store:
    """The store of the cluster that this process has joined."""
    return Store(ray.get_runtime_context().gcs_address)


def _stop_the_cheapest(slices: Callable[[], list[SliceRecord]]) -> None:
    from ray.serve._private.deployment_scheduler import DeploymentScheduler  # noqa: PLC0415  as above

    default = _existing(
        DeploymentScheduler, _STOP_POINT, "the slice that costs least to drain is stopped first"
    )

    def to_stop(scheduler: Any, deployment_id: Any, most: int, *args: Any, **kwargs: Any) -> set[Any]:
        chosen: set[Any] = default(scheduler, deployment_id, most, *args, **kwargs)
        running: set[Any] = chosen & scheduler._running_replicas[deployment_id].keys()  # noqa: SLF001
        if not running:
            return chosen  # what waits for hardware or still starts costs nothing
        name = deployment(deployment_id.app_name, deployment_id.name)
        try:
            costs = {one.tag: cost_to_drain(one) for one in slices() if one.deployment == name}
        except Exception:
            logger.exception("the store can't be read: Serve's own choice of %s stops", name)
            return chosen
        known = [one for one in scheduler._running_replicas[deployment_id] if one.unique_id in costs]  # noqa: SLF001
        if len(known) < len(running):
            return chosen  # these are no slices
        cheapest: set[Any] = set(sorted(known, key=lambda one: costs[one.unique_id])[: len(running)])
        return (chosen - running) | cheapest

    setattr(DeploymentScheduler, _STOP_POINT, to_stop)


def end_replica(deployment: str, tag: str) -> None:
    """End one that has fallen silent, so that Serve starts another: Ray takes a minute to call a host dead that is stopped."""
    with contextlib.suppress(ValueError):  # it has ended by itself
        ray.kill(ray.get_actor(f"{_REPLICA}{deployment}#{tag}", namespace=_NAMESPACE))


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
    """What this Ray has under a private name; raises ExtensionPointError where it lacks it."""
    found: Callable[..., Any] | None = getattr(owner, name, None)
    if found is None:
        raise ExtensionPointError(
            f"Ray {ray.__version__} has no {owner.__name__}.{name}, through which {purpose}; install ray[serve]==2.60.0"
        )
    return found
