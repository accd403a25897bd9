import pytest

from benchmarks import load_generator

pytestmark = pytest.mark.http


def test_locust_is_kept_busy_and_its_answers_are_counted() -> None:
    found = load_generator.measure(tokens=4, pace_s=0.0, users=4, seconds=2)
    assert found.requests > 20
    assert 0 <= found.chunks - 4 * found.requests <= 4 * 4  # four users' answers may be under way
    assert found.cpu_s > 0
