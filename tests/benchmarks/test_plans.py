import math

import pytest

from benchmarks.plans import KNOWN, Row, coverage, fit, left_out, rows, table, verdict
from serving.planning.known_models import CONFIGS
from serving.planning.published import PUBLISHED
from serving.planning.speed import COSTS, PARTS, SPREAD_FAMILY, Engine, spread

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def measured() -> list[Row]:
    return rows()


def test_nine_of_ten_published_rates_are_within_their_range(measured: list[Row]) -> None:
    within = [
        abs(row.off_by(COSTS))
        <= math.log(spread(Engine(row.plan.shape, row.plan.sizes, row.plan.slice, row.plan.layout)))
        for row in measured
    ]
    assert sum(within) >= 0.9 * len(within)


def test_half_of_the_published_rates_are_within_an_eighth(measured: list[Row]) -> None:
    errors = sorted(abs(math.exp(row.off_by(COSTS)) - 1) for row in measured)
    assert errors[len(errors) // 2] <= 0.125


# Rates of Qwen3.5-397B on v7x-8 (tpu-inference PR 3079), which a bare roofline missed by up to 47%.
@pytest.mark.parametrize("load", [4, 16, 64, 128])
def test_few_requests_cost_what_a_step_takes_beside_its_products(measured: list[Row], load: int) -> None:
    row = next(row for row in measured if "3079" in row.published.source and row.load == (1024, 1024, load))
    assert abs(math.exp(row.off_by(COSTS)) - 1) < 0.2


def test_no_price_is_far_from_what_is_known_of_it() -> None:
    for name, (known, _) in KNOWN.items():
        assert known / 2.5 < getattr(COSTS, name) < known * 2.5


@pytest.mark.slow
def test_the_prices_are_those_of_the_fit(measured: list[Row]) -> None:
    fitted = fit(measured)
    for name in PARTS:
        assert getattr(COSTS, name) == pytest.approx(getattr(fitted, name), rel=0.05), name


@pytest.mark.slow
def test_a_range_of_an_unseen_family_holds_nine_of_ten_of_its_rates(measured: list[Row]) -> None:
    errors = left_out(measured)
    assert sum(abs(error) <= math.log(SPREAD_FAMILY) for error in errors) >= 0.9 * len(errors)


def test_the_tables_have_every_rate_and_every_model(measured: list[Row]) -> None:
    shown = table(measured, [row.off_by(COSTS) for row in measured])
    assert shown.count("\n") == 1 + sum(len(published.rates) for published in PUBLISHED)
    assert "(a floor)" in shown
    models = coverage()
    assert all(f"| {model} |" in models for model in CONFIGS)
    assert "DeepseekV32ForCausalLM: its sparse attention" in models


def test_a_verdict_counts_what_is_near() -> None:
    said = verdict([0.0, 0.1, -0.1, math.log(2)])
    assert said.startswith("median 10% off, 3 of 4 within 15%")
