import pytest
from support.controlled_fleet import ControlledFleet, Model, pool

from serving.scaling.steadiness import Steadiness

pytestmark = [
    pytest.mark.unit,
    pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20"),  # Ray's
]


@pytest.mark.parametrize("rate", [20.0, 20.7, 37.5, 38.9])
def test_no_slice_comes_and_goes_at_a_load_near_a_whole_number_of_them(rate: float) -> None:
    fleet = ControlledFleet([Model("m", (pool("x"),), rate=rate)], budget=None, hardware=20, start_s=3)
    fleet.run(1200)
    assert len({wanted["m-x"] for wanted in fleet.targets[-300:]}) == 1


def went_and_came_back(before: Steadiness, at_s: float, after_s: float = 20.0) -> Steadiness:
    fewer = before.decided(before.asked - 1, at_s, 30.0)
    return fewer.decided(before.asked, at_s + after_s, 30.0)


def test_a_slice_that_was_needed_again_goes_later_each_time() -> None:
    steady = Steadiness(asked=4).needing(3.02)
    assert steady.needing(2.98).kept == 2.98
    once = went_and_came_back(steady, 0.0)
    assert (once.needing(2.98).kept, once.needing(2.9).kept) == (3.02, 3.0)
    again = went_and_came_back(once, 1000.0)
    assert again.needing(2.9).kept == 3.02
    often = again
    for time_s in range(2000, 50_000, 1000):
        often = went_and_came_back(often, time_s)
    assert often.needing(2.75).kept == 3.02
    assert often.needing(2.5).kept == 2.8


def test_a_slice_that_is_needed_again_much_later_went_in_time() -> None:
    steady = Steadiness(asked=4).needing(3.02)
    assert went_and_came_back(steady, 0.0, after_s=301.0).band == 0.0


def test_what_was_learned_at_one_load_holds_for_no_other() -> None:
    learned = went_and_came_back(Steadiness(asked=4).needing(3.02), 0.0)
    assert learned.needing(5.0).needing(4.9).kept == 4.9
    assert learned.needing(1.0).kept == 1.0


def test_a_clock_that_is_put_on_makes_nothing_older() -> None:
    fewer = Steadiness(asked=4).needing(3.02).decided(3, 10.0, 30.0).moved(3600.0)
    assert fewer.decided(4, 3620.0, 30.0).band > 0
