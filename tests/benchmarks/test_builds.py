import pytest

from benchmarks import builds
from benchmarks.pages import between
from serving.planning.known_models import CONFIGS

pytestmark = pytest.mark.unit

ROWS = builds.kept(between(builds.PAGE.read_text(), "builds"))
EVERY = {build.key: build for build in builds.builds([*CONFIGS])}


def test_the_table_has_every_build_of_known_models() -> None:
    assert set(ROWS) == set(EVERY)


@pytest.mark.parametrize("key", EVERY)
def test_planned_weights_are_within_one_percent_of_what_the_engine_lays_out(key: str) -> None:
    assert builds.row(EVERY[key], ROWS[key]) in builds.PAGE.read_text()
    if not ROWS[key].startswith("not built"):
        planned = EVERY[key].plan.fit.weight_bytes / builds.GIB
        assert planned == pytest.approx(float(ROWS[key]), rel=0.01)
