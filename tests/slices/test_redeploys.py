"""Every key of the YAML changed on a running service under load: what docs/reference/redeploy.md says that it restarts."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.leases import Leases
from support.load import load
from support.service import ROUTER_END_UNDER_LOAD_S, Service, service

from tools.redeploy_page import CHANGES, Effect, effects_of

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
BORROWS = "one chip, 3"
ONE_CHIP = {"generation": "v6e", "topology": "1x1"}
# What the load's clients can't show: they have no key and no token, and ask for a status that all may see. Capabilities are
# refused beside another user than root.
NOT_HERE = (
    "gke.capabilities",
    *(key for key in CHANGES if key.startswith("router.oidc.")),
    "router.keys_file",
    "router.keys.isolated_cache",
    "router.keys.stored",
    "router.private_status",
    "models",
    "models.pools",
)


@pytest.fixture
def running(leases: Leases) -> Iterator[Service]:
    with service(
        leases,
        slices=3,
        engine="simulated",
        slice=ONE_CHIP,
        replicas={"min": 2, "max": 2},
        router_end_s=ROUTER_END_UNDER_LOAD_S,
    ) as started:
        yield started


def changes(effect: Effect, folder: Path) -> dict[str, Any]:
    """All keys of CHANGES whose costliest effect is this, with their other values, as one change."""
    found: dict[str, Any] = {}
    for key, (preset, value) in CHANGES.items():
        if key not in NOT_HERE and max(effects_of(key)) is effect:
            found |= preset | {key: value}
    if "router.responses_store.path" in found:
        found["router.responses_store.path"] = str(folder / "responses.sqlite")
    # Three slices are there, and routers share two cores.
    bounds = {"models.replicas.max": 3, "router.replicas": 2, "models.replicas.min": 2, "budget.slices": 3}
    return {key: bounds.get(key, value) for key, value in found.items()}


def deploy(running: Service, changed: dict[str, Any]) -> None:
    raw = yaml.safe_load(running.deployment.read_text())
    for key, value in changed.items():
        *path, last = key.split(".")
        place = raw["applications"][0]["args"]
        for part in path:
            place[part] = place.get(part) or {}
            place = place[part][0] if isinstance(place[part], list) else place[part]
        place[last] = copy.deepcopy(value)
    running.deployment.write_text(yaml.safe_dump(raw))
    running.deploy()


def routers(running: Service) -> set[str]:
    return {demand.router for demand in running.records().demands}


def replicas(running: Service) -> set[str]:
    return {entry.replica for entry in running.serving()}


def test_no_key_but_an_engine_s_own_stops_a_slice_or_costs_a_request(
    running: Service, tmp_path: Path
) -> None:
    before = replicas(running)
    with load(running) as wrong:
        for effect in (Effect.NOTHING, Effect.IN_PLACE, Effect.SCALING):
            deploy(running, changes(effect, tmp_path))
            running.until_deployed()
            assert before <= replicas(running), effect
        first = routers(running)
        deploy(running, changes(Effect.ROUTERS, tmp_path))
        running.until(lambda: routers(running) and not first & routers(running), "other routers")
        running.until_deployed()
        assert before <= replicas(running)
    assert wrong == []


def test_pools_and_models_come_and_go_beside_slices_that_serve(running: Service) -> None:
    before = replicas(running)
    (model,) = yaml.safe_load(running.deployment.read_text())["applications"][0]["args"]["models"]
    pool = {key: model.pop(key) for key in ("slice", "replicas")}
    other = {"slice": {"generation": "v6e", "topology": "2x2"}, "replicas": {"min": 0, "max": 1}}
    second = {**model, **pool, "name": "second", "replicas": 1}
    steps: dict[str, list[dict[str, Any]]] = {
        "a pool more": [{**model, "pools": [pool, other]}],
        "pools in another order": [{**model, "pools": [other, pool]}],
        "a pool less": [{**model, **pool}],
        "a model more": [{**model, **pool}, second],
        "models in another order": [second, {**model, **pool}],
        "a model less": [{**model, **pool}],
    }
    with load(running) as wrong:
        for step, models in steps.items():
            deploy(running, {"models": models})
            running.until_deployed()
            assert before <= replicas(running), step
    assert wrong == []
    running.delete()
    running.until(lambda: not running.entries(), "the records to go")
    running.deploy()
    assert not before & {entry.replica for entry in running.until_serving(2)}
