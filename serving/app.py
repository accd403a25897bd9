"""From the YAML's args to a Serve application: the only place where the parts are put together."""

from collections import Counter
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.exceptions import RayServeException

from serving.config import ModelSpec, ServiceConfig, parse
from serving.engine.replica import SliceReplica
from serving.errors import PlanError, ServingError
from serving.planning import Plan, plan
from serving.router.ingress import Router
from serving.tpu import GENERATIONS

# A lost slice ends its replica itself; this is for a replica that can't even do that.
_HEALTH_PERIOD_S = 1
_HEALTH_TIMEOUT_S = 30
# A router must not die with a slice, nor take the cores that feed its chips.
_NO_TPU_HOST = {
    "ray.io/accelerator-type": f"!in({','.join(row.ray_accelerator_type for row in GENERATIONS.values())})"
}
# Beyond drain_s: two beats to leave the routers' tables, then engine and workers end.
_STOP_MARGIN_S = 20


def build(args: dict[str, Any]) -> Application:
    """The application builder that `import_path: serving.app:build` names.

    Raises RayServeException, whose message Serve shows without a traceback, where the YAML asks for what can't be.
    """
    try:
        config = parse(args)
        plans = [plan(pool) for model in config.models for pool in _pools(model)]
    except ServingError as error:
        raise RayServeException(error.message) from None
    return _application(config, plans)


def _pools(model: ModelSpec) -> list[ModelSpec]:
    """The pools of a model that hold slices from the start.

    Each runs its `min` slices: scaling up to `max`, and from zero, is not there yet.
    """
    pools = [pool for pool in model.per_pool() if pool.replicas.min]
    if not pools:
        raise PlanError(f"{model.name}: no slice to start with; set replicas.min to 1 or more in one place")
    return pools


def _application(config: ServiceConfig, plans: list[Plan]) -> Application:
    names = Counter(one.model.name for one in plans)
    pools: Counter[str] = Counter()
    slices = []
    for one in plans:
        name = one.model.name
        slices.append(_slice_deployment(one, alone=names[name] == 1).bind(one, pools[name]))
        pools[name] += 1
    router = serve.deployment(
        Router,
        name="router",
        num_replicas=config.router.replicas,
        max_ongoing_requests=10_000,
        ray_actor_options={"num_cpus": 0, "label_selector": _NO_TPU_HOST},
        logging_config={"enable_access_log": False},
    )
    return router.bind(plans, config.router, *slices)


def _slice_deployment(one: Plan, *, alone: bool) -> Any:
    pool = "" if alone else f"-{one.slice.generation}-{one.slice.topology}-{one.slice.hosts}h"
    return serve.deployment(
        SliceReplica,
        name=_deployment_name(one.model.name + pool),
        num_replicas=one.model.replicas.min,
        ray_actor_options={"num_cpus": 0},
        placement_group_bundles=one.slice.bundles(),
        placement_group_strategy="STRICT_SPREAD",
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=one.model.drain_s + _STOP_MARGIN_S,
    )


def _deployment_name(model: str) -> str:
    """Serve puts a deployment's name into paths and metrics."""
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in model)
