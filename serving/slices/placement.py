"""Serve places a slice replica on one whole slice, or waits for one.

Serve makes a replica's placement group itself and offers no way to say "all bundles on one slice". Ray's core can:
`topology_strategy`. `install` is the controller callback that a deployments/*.yaml names in `controller_options`; it
runs inside the Serve controller before its scheduler is made and replaces the one function that creates groups.
Private names of Ray Serve are used in this module alone:

- `ray.serve._private.default_impl._default_create_placement_group` (its header promises stability to extensions)
- the fields of `ray.serve._private.common.CreatePlacementGroupRequest` that it reads
- `ray.serve.context._get_global_client`, for the address that the front door listens on
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from serving.errors import ExtensionPointError

SLICE_LABEL = "ray.io/tpu-slice-name"
WORKER_LABEL = "ray.io/tpu-worker-id"
NODE_LABEL = "ray.io/node-id"
CALLBACK = "serving.slices.placement.install"
_EXTENSION_POINT = "_default_create_placement_group"


def is_slice(bundles: Sequence[Mapping[str, float]]) -> bool:
    """Whether bundle 0 asks for a slice's head resource, which only worker 0 of a slice has."""
    return bool(bundles) and any(name.startswith("TPU-") and name.endswith("-head") for name in bundles[0])


def create_slice_group(
    bundles: Sequence[Mapping[str, float]], *, name: str, lifetime: str | None = None
) -> Any:
    """One placement group over all hosts of one slice: atomic, and pending for as long as no slice is whole and free."""
    return ray.util.placement_group(
        [dict(bundle) for bundle in bundles],
        name=name,
        lifetime=lifetime,
        topology_strategy={SLICE_LABEL: "STRICT_PACK", NODE_LABEL: "STRICT_SPREAD"},
    )


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


def http_host() -> str:
    """The host of `http_options` of the Serve this process runs in; blocks."""
    from ray.serve.context import _get_global_client  # noqa: PLC0415  as above

    return str(_get_global_client().http_config.host)


def _extension_point(module: Any) -> Callable[[Any], Any]:
    default = getattr(module, _EXTENSION_POINT, None)
    if default is None:
        raise ExtensionPointError(
            f"Ray {ray.__version__} has no {module.__name__}.{_EXTENSION_POINT}, through which replicas are put on whole "
            "TPU slices; install ray[serve]==2.60.0"
        )
    if "topology_strategy" not in inspect.signature(ray.util.placement_group).parameters:
        raise ExtensionPointError(
            f"ray.util.placement_group of Ray {ray.__version__} takes no topology_strategy, which keeps a group on one "
            "TPU slice; install ray[serve]==2.60.0"
        )
    return default  # type: ignore[no-any-return]
