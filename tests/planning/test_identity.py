"""What may never change by accident: the key of a pool and the version of an engine, which restart slices when they do."""

from pathlib import Path

import pytest

from serving.config import load
from serving.errors import PlanError
from serving.planning import plan
from serving.planning.service import plan_service
from serving.tpu import Slice

pytestmark = pytest.mark.unit

LLAMA = Path(__file__).parents[2] / "deployments" / "llama.yaml"
POOLS = LLAMA.with_name("llama-70b-pools.yaml")


def test_the_engine_of_a_shipped_deployment_keeps_its_version() -> None:
    (model,) = load(LLAMA).services["llama"].models
    assert (plan(model).pool, plan(model).version) == ("v6e-2x4-2h-on-demand", "c413a6edd06e243b")


def test_rewording_a_slice_for_people_restarts_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    (model,) = load(LLAMA).services["llama"].models
    before = plan(model)
    monkeypatch.setattr(Slice, "__str__", lambda _: "two hosts of four chips")
    assert (plan(model).pool, plan(model).version) == (before.pool, before.version)


def test_pools_keep_their_keys_in_any_order() -> None:
    (service,) = load(POOLS).services.values()
    (model,) = service.models
    keys = [plan(pool).pool for pool in model.per_pool()]
    turned = model.model_copy(update={"pools": tuple(reversed(model.pools))})
    assert [plan(pool).pool for pool in turned.per_pool()] == list(reversed(keys))
    assert len(set(keys)) == len(keys)


def test_two_pools_that_nothing_tells_apart_are_refused() -> None:
    (service,) = load(POOLS).services.values()
    (model,) = service.models
    twice = model.model_copy(update={"pools": (model.pools[0], model.pools[0])})
    with pytest.raises(PlanError, match="the same slice bought in the same way"):
        plan_service(service.model_copy(update={"models": (twice,)}))
