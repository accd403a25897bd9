"""What a changed key restarts, of what build really makes: each key of the configuration is changed in turn."""

import pytest

from tools.redeploy_page import CHANGES, LISTS, Effect, effects, effects_of, keys

pytestmark = pytest.mark.unit
RESTART = {Effect.ENGINES, Effect.POOL, Effect.MODEL}
RESTARTING = {
    "models",
    "models.name",
    "models.model",
    "models.slice.generation",
    "models.slice.topology",
    "models.slice.hosts",
    "models.slice.machine_type",
    "models.slice.capacity",
    "models.slice.reservation",
    "models.parallel.tensor",
    "models.parallel.pipeline",
    "models.parallel.data",
    "models.parallel.expert",
    "models.parallel.attention_data",
    "models.parallel.decode_context",
    "models.parallel.prefill_context",
    "models.pools",
    "models.engine",
    "models.engine_env",
}


def test_every_key_of_the_configuration_is_walked() -> None:
    assert sorted(CHANGES) == sorted(keys())


@pytest.mark.parametrize("key", CHANGES)
def test_only_what_an_engine_is_started_with_touches_slices(key: str) -> None:
    found = effects_of(key)
    assert bool(found & RESTART) == (key in RESTARTING)
    if key.startswith("gke."):
        assert found == {Effect.NOTHING}
    elif key not in RESTARTING:
        assert found != {Effect.NOTHING}


@pytest.mark.parametrize("key", ["batch.spare", "batch.ttft_p99_s", "batch.may_scale"])
def test_what_routers_read_of_batches_restarts_them_beside_the_store(key: str) -> None:
    """Routers that stayed went on at the pace of the ttft_p99_s before."""
    assert effects_of(key) == {Effect.STORE, Effect.ROUTERS}


@pytest.mark.parametrize(("what", "before", "after"), LISTS, ids=[what for what, *_ in LISTS])
def test_no_engine_restarts_where_pools_or_models_come_go_or_change_places(
    what: str, before: dict[str, object], after: dict[str, object]
) -> None:
    found = effects(before, after)
    assert Effect.ENGINES not in found
    assert bool(found & RESTART) == ("added" in what or "taken out" in what)
