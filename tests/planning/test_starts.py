from pathlib import Path

import pytest

from serving import config
from serving.planning import plan
from serving.planning.starts import PUBLISHED_STARTS, Phase, PhaseTime, compilations, start_time

pytestmark = pytest.mark.unit
DEPLOYMENTS = Path(__file__).parents[2] / "deployments"
SEQUENTIAL, MANY = 1, 180  # vCPUs


@pytest.mark.parametrize(("vcpus", "at_once"), [(None, 8), (4, 1), (24, 3), (180, 16), (224, 16)])
def test_a_host_compiles_as_many_programs_at_once_as_its_cpus_allow(vcpus: int | None, at_once: int) -> None:
    assert compilations(vcpus) == at_once


def test_a_range_is_that_of_the_published_starts_and_says_how_few_they_are() -> None:
    assert start_time("a/model", 0, SEQUENTIAL).compile == PhaseTime(209.4, 630, 5)
    assert start_time("a/model", 0, MANY).compile == PhaseTime(94.1, 400, 3)
    warm = start_time("a/model", 0, SEQUENTIAL).compile_warm
    assert warm.starts == 1
    assert warm.low_s < 135.1 < warm.high_s


def test_a_start_from_the_cache_is_never_slower_than_one_without() -> None:
    for vcpus in (SEQUENTIAL, MANY):
        start = start_time("a/model", 10**10, vcpus)
        for cold, warm in zip(start.range_s(warm=False), start.range_s(warm=True), strict=True):
            assert warm < cold


def test_weights_from_a_bucket_take_the_published_rate_and_downloads_are_not_known() -> None:
    size = PUBLISHED_STARTS[2].bytes
    for model in ("gs://bucket/gpt-oss", "/weights/gpt-oss"):
        weights = start_time(model, int(size), MANY).weights
        assert weights
        assert (round(weights.low_s, 2), round(weights.high_s, 2), weights.starts) == (23.34, 25.35, 2)
    assert start_time("openai/gpt-oss-120b", int(size), MANY).weights is None


def test_a_published_start_that_no_range_is_made_of_lies_within_it() -> None:
    """Gemma 4 31B on v6e 2x4 takes "about 10 minutes", one program after the other (tpu-recipes, trillium/vLLM/Gemma4)."""
    (service,) = config.load(DEPLOYMENTS / "gemma-4-31b-v6e-8.yaml").services.values()
    planned = plan(service.models[0])
    low, high = start_time("gs://bucket/gemma", planned.checkpoint_bytes, SEQUENTIAL).range_s(warm=False)
    assert low < 600 < high


def test_every_warm_start_has_the_cold_one_of_the_same_engine() -> None:
    cold = {(start.model, start.source) for start in PUBLISHED_STARTS if start.phase is Phase.COMPILE}
    warm = {(start.model, start.source) for start in PUBLISHED_STARTS if start.phase is Phase.COMPILE_WARM}
    assert warm <= cold
