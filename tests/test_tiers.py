"""Modules of which a tier has no test are not imported, and no other is left out."""

import pytest
from support.tiers import can_match

pytestmark = pytest.mark.unit

QUICK = "not cluster and not engine and not slow"
UNIT = "pytestmark = pytest.mark.unit"
SLOW_CLUSTER = "pytestmark = [pytest.mark.cluster, pytest.mark.slow]"
BOTH = "@pytest.mark.unit\n@pytest.mark.slow\n@pytest.mark.http"


@pytest.mark.parametrize(
    ("expression", "modules"),
    [
        ("", {UNIT, SLOW_CLUSTER, BOTH}),
        ("unit and not slow", {UNIT, BOTH}),
        (QUICK, {UNIT, BOTH}),
        ("(cluster or engine) and not slow", {SLOW_CLUSTER}),
        ("slow", {SLOW_CLUSTER, BOTH}),
        ("engine", set()),
    ],
)
def test_a_module_is_left_out_if_the_expression_selects_none_of_its_tests(
    expression: str, modules: set[str]
) -> None:
    assert {module for module in (UNIT, SLOW_CLUSTER, BOTH) if can_match(expression, module)} == modules


def test_a_module_whose_markers_stand_elsewhere_is_imported() -> None:
    assert can_match("unit", "from support.somewhere import pytestmark")
