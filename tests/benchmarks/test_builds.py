from functools import cache

import pytest

from benchmarks import builds
from benchmarks.pages import between

pytestmark = pytest.mark.unit

PAGE = builds.PAGE.read_text()
ROWS = builds.kept(between(PAGE, "builds"))


@cache
def every() -> dict[str, builds.Build]:
    """By key; planned when the first test asks, for that takes seconds."""
    return {build.key: build for build in builds.builds()}


def test_the_table_has_every_build_of_known_models() -> None:
    assert set(ROWS) == set(every())


@pytest.mark.parametrize("key", ROWS)
def test_planned_weights_are_within_one_percent_of_what_the_engine_lays_out(key: str) -> None:
    build = every()[key]
    assert builds.row(build, ROWS[key]) in PAGE
    if not ROWS[key].startswith("not built"):
        planned = build.plan.fit.weight_bytes / builds.GIB
        assert planned == pytest.approx(float(ROWS[key]), rel=0.01)
