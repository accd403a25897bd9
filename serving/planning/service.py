"""A service as a whole: every model on each of its pools, and what keeps them from being one service."""

from collections.abc import Iterable, Sequence

from serving.config import ServiceConfig
from serving.errors import ConfigError, PlanError
from serving.planning import prices
from serving.planning.checkpoints import Hub, no_hub
from serving.planning.plan import Plan, plan


def plan_service(config: ServiceConfig, hub: Hub = no_hub) -> list[list[Plan]]:
    """By model its pools, the preferred first; raises ConfigError for a model that does not fit and for what `check` refuses."""
    prices.check(config.prices)
    plans = [[plan(pool, hub, prices=config.prices) for pool in model.per_pool()] for model in config.models]
    check(config, plans)
    return plans


def every_plan(services: Iterable[ServiceConfig], hub: Hub = no_hub) -> list[Plan]:
    """Of all models of these services on all their pools; raises as `plan_service` does."""
    return [made for config in services for pools in plan_service(config, hub) for made in pools]


def check(config: ServiceConfig, plans: Sequence[Sequence[Plan]]) -> None:
    """Raises ConfigError where plans that fit one by one can't be served together."""
    for pools in plans:
        _check_pools(pools)
    every = [made for pools in plans for made in pools]
    _check_names(every)
    _check_dollars(config, every)


def deployment_name(made: Plan) -> str:
    """A name of model and pool that fits the paths and metrics that Serve puts it into; Ray's metrics take ASCII alone."""
    name = f"{made.model.name}-{made.pool}"
    return "".join(
        letter if letter.isascii() and (letter.isalnum() or letter in "-_.") else "-" for letter in name
    )


def _check_pools(pools: Sequence[Plan]) -> None:
    keys = [made.pool for made in pools]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise PlanError(
            f"{pools[0].model.name}: two pools are {twice}: the same slice bought in the same way; make them one with the sum of their "
            "replicas, or give them other `capacity`"
        )


def _check_names(plans: Sequence[Plan]) -> None:
    """Raises PlanError where a name means two things."""
    models = {made.model.name for made in plans}
    owners: dict[str, str] = {}
    for made in plans:
        for adapter in made.adapters:
            if adapter in models or owners.setdefault(adapter, made.model.name) != made.model.name:
                raise PlanError(f"{made.model.name}: adapter {adapter!r} has the name of another; rename it")
    deployments: dict[str, str] = {}
    for made in plans:
        name = deployment_name(made)
        other = deployments.setdefault(name, made.model.name)
        if other != made.model.name:
            raise PlanError(
                f"models {other!r} and {made.model.name!r} would share the Serve deployment {name!r}; rename one"
            )


def _check_dollars(config: ServiceConfig, plans: Sequence[Plan]) -> None:
    """Raises ConfigError where the budget does not pay for the slices that the service starts with."""
    budget = config.budget.dollars_per_hour
    least = sum(
        made.model.replicas.min * prices.slice_hour(made.model.slice, made.slice, config.prices)
        for made in plans
    )
    if budget is not None and round(least - budget, 6) > 0:
        raise ConfigError(
            f"budget.dollars_per_hour is {budget:g}, and replicas.min of all pools cost {least:.2f} USD an hour; raise one or lower the other"
        )
