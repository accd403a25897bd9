"""From the YAML's args to a Serve application: the only place where the parts are put together."""

import hashlib
import json
from dataclasses import asdict
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.exceptions import RayServeException

from serving import hub
from serving.config import ServiceConfig, parse
from serving.engine.replica import SliceReplica
from serving.errors import ServingError
from serving.planning import Plan
from serving.planning.prices import slice_hour
from serving.planning.service import deployment_name, plan_service
from serving.router.core import Served
from serving.router.ingress import Router
from serving.scaling.capacity import pool_of
from serving.scaling.policy import Settings
from serving.scaling.serve import POLICY
from serving.simulation.chip_use import chip_use
from serving.simulation.choice import engine_here
from serving.timings import TIMINGS
from serving.tpu import GENERATIONS

# A router must not die with a slice, nor take the cores that feed its chips.
_NO_TPU_HOST = {
    "ray.io/accelerator-type": f"!in({','.join(row.ray_accelerator_type for row in GENERATIONS.values())})"
}
_HEAD = "node:__internal_head__"  # Ray's resource that the head alone has
# Nothing in a router blocks. In a thread of its own, as Serve runs user code, every chunk would change threads twice.
_ONE_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
# Above zero Serve asks what to start and to stop during a roll; `rollout` answers, not this number.
_SURGES = 1


def build(args: dict[str, Any]) -> Application:
    """The application builder that `import_path: serving.app:build` names.

    Raises RayServeException where the YAML can't be served: Serve shows the message without a traceback.
    """
    try:
        config = parse(args)
        plans = plan_service(config, hub.config_of)
    except ServingError as error:
        raise RayServeException(error.message) from None
    return _application(config, plans)


def _application(config: ServiceConfig, plans: list[list[Plan]]) -> Application:
    fixed = [_settings(config, pools) for pools in plans if not _scales(pools)]
    slices = [
        _slice_deployment(config, pools, at, fixed, other_pools(pools[at], plans)).bind(
            pools[at],
            engine_here,
            chip_use,
            compares=config.router.sentinel.share > 0,
            tls=config.router.slices_tls,
        )
        for pools in plans
        for at in range(len(pools))
    ]
    every = [plan for pools in plans for plan in pools]
    router = serve.deployment(
        Router,
        name="router",
        num_replicas=config.router.replicas,
        max_ongoing_requests=10_000,
        max_surge_percent=100,
        health_check_period_s=TIMINGS.health_period_s,
        # Open answers end before their router does.
        graceful_shutdown_timeout_s=max(pools[0].model.drain_s for pools in plans) + TIMINGS.stop_margin_s,
        ray_actor_options={
            "num_cpus": 0,
            "label_selector": _NO_TPU_HOST,
            "runtime_env": {"env_vars": _ONE_LOOP},
        },
        logging_config={"enable_access_log": False},
        user_config={"version": _router_version(config, every), "slices": _slices(plans)},
    )
    served = Served(every, config.router, config.batch, config.prices)
    return router.bind(served, *slices, store=_store(config, every))


def _store(config: ServiceConfig, plans: list[Plan]) -> Application | None:
    """The one process that opens the database; none where the YAML has no place for it."""
    if config.store is None:
        return None
    from serving.batches.replica import StoreReplica  # noqa: PLC0415  it loads SQLAlchemy; builds without a store take half the time

    models = sorted({name for plan in plans for name in (plan.model.name, *plan.adapters)})
    most_line_bytes = config.router.max_body_bytes
    made_with = [
        config.store.model_dump(mode="json"),
        config.batch.model_dump(mode="json"),
        models,
        most_line_bytes,
    ]
    deployment = serve.deployment(
        StoreReplica,
        name="store",
        num_replicas=1,
        max_ongoing_requests=1000,
        health_check_period_s=TIMINGS.health_period_s,
        health_check_timeout_s=TIMINGS.health_timeout_s,
        graceful_shutdown_timeout_s=TIMINGS.stop_margin_s,
        ray_actor_options={
            "num_cpus": 0,
            "label_selector": _NO_TPU_HOST,
            # A folder is on the head's disk.
            "resources": {_HEAD: 0.001} if config.store.folder else {},
        },
        logging_config={"enable_access_log": False},
        user_config={"version": _hash(made_with)},
    )
    return deployment.bind(config.store, config.batch, models, most_line_bytes)


def _slices(plans: list[list[Plan]]) -> dict[str, int | None]:
    """By model, the fixed number of slices; None where the number scales."""
    return {
        pools[0].model.name: None if _scales(pools) else sum(pool.model.replicas.min for pool in pools)
        for pools in plans
    }


def _router_version(config: ServiceConfig, plans: list[Plan]) -> str:
    """A hash of everything a router is made with; what slices or scaling alone read does not change it."""
    made_with = [
        config.router.model_dump(mode="json"),
        [config.store is not None, config.batch.model_dump(include={"spare", "ttft_p99_s", "may_scale"})],
        # What a slice costs is part of usage alone.
        config.store and [slice_hour(plan.model.slice, plan.slice, config.prices) for plan in plans],
        *(
            [
                plan.version,
                plan.pool,
                plan.most_sequences,
                plan.fit.max_model_len,
                plan.model.model_dump(mode="json", include={"queue", "slo"}),
            ]
            for plan in sorted(plans, key=lambda plan: plan.model.name)  # in which pools keep their order
        ),
    ]
    return _hash(made_with)


def _hash(made_with: list[Any]) -> str:
    return hashlib.sha256(json.dumps(made_with, sort_keys=True).encode()).hexdigest()[:16]


def _scales(pools: list[Plan]) -> bool:
    return any(pool.model.replicas.scales for pool in pools)


def _settings(config: ServiceConfig, pools: list[Plan]) -> Settings:
    """What scaling is told of one model."""
    return Settings(
        model=pools[0].model.name,
        pools=tuple(pool_of(plan, slice_hour(plan.model.slice, plan.slice, config.prices)) for plan in pools),
        ttft_s=pools[0].model.slo.ttft_s,
        itl_s=pools[0].model.slo.itl_s,
        cool_down_s=pools[0].model.cool_down_s,
    )


def other_pools(plan: Plan, plans: list[list[Plan]]) -> list[str]:
    """The keys of the service's pools whose slices Ray takes for ones of this plan, though they are bought in another way."""
    return sorted(
        {
            other.pool
            for pools in plans
            for other in pools
            if other.slice.pod_type == plan.slice.pod_type and other.pool != plan.pool
        }
    )


def _slice_deployment(
    config: ServiceConfig, pools: list[Plan], at: int, fixed: list[Settings], others: list[str]
) -> Any:
    """The slices of one pool of a model. `fixed`: models with a fixed number; `others`: pools on whose hosts no slice is placed, by key."""
    plan = pools[at]
    return serve.deployment(
        SliceReplica,
        name=deployment_name(plan),
        ray_actor_options={"num_cpus": 0},
        placement_group_bundles=plan.slice.bundles(),
        placement_group_strategy="STRICT_SPREAD",
        health_check_period_s=TIMINGS.health_period_s,
        health_check_timeout_s=TIMINGS.health_timeout_s,
        graceful_shutdown_timeout_s=plan.model.drain_s + TIMINGS.stop_margin_s,
        **_count(config, pools, at, fixed),
        max_surge_percent=_SURGES,
        # `model`, `judged` and `tls` change without a restart; the rest is for the controller (see serving.slices.controller).
        user_config={
            "version": plan.version,
            "pool": plan.pool,
            "other_pools": others,
            "name": plan.model.name,
            "rollout": {**plan.model.rollout.model_dump(), "surge_s": plan.model.surge_s},
            "model": plan.model.model_dump(include={"drain_s", "stall_s", "start_s"}),
            "judged": config.router.sentinel.share > 0,
            "tls": config.router.slices_tls,
            "budget": config.budget.model_dump(),
            "dollars_per_hour": slice_hour(plan.model.slice, plan.slice, config.prices),
        },
    )


def _count(config: ServiceConfig, pools: list[Plan], at: int, fixed: list[Settings]) -> dict[str, Any]:
    """How many slices: a fixed number, or the policy's within bounds. The policy keeps the delays itself."""
    counts = pools[at].model.replicas
    if not counts.scales:
        return {"num_replicas": counts.min}
    return {
        "autoscaling_config": {
            "min_replicas": counts.min,
            "max_replicas": counts.max,
            "upscale_delay_s": 0,
            "downscale_delay_s": 0,
            "downscale_to_zero_delay_s": 0,
            "policy": {
                "policy_function": POLICY,
                "policy_kwargs": {
                    "pool": pools[at].pool,
                    "settings": asdict(_settings(config, pools)),
                    "budget": config.budget.model_dump(),
                    "fixed": [asdict(model) for model in fixed],
                },
            },
        }
    }
