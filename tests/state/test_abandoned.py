"""Whose records nobody keeps any more; time is the test's."""

import pytest

from serving.state.abandoned import ABANDONED_S, LOOK_S, Abandoned

pytestmark = pytest.mark.unit
LOOKS = round(ABANDONED_S / LOOK_S)


class Reader:
    """Looks every minute."""

    def __init__(self) -> None:
        self.abandoned, self.now_s = Abandoned(), 0.0

    def look(self, beats: dict[str, int], *deployed: str, after_s: float = LOOK_S) -> list[str]:
        self.now_s += after_s
        return self.abandoned.look(beats, deployed, self.now_s)


def test_an_application_of_which_nothing_moves_is_abandoned_after_ten_minutes_and_not_before() -> None:
    reader = Reader()
    found = [reader.look({"gone": 7}) for _ in range(LOOKS + 1)]
    assert found == [[]] * LOOKS + [["gone"]]


def test_an_application_that_serve_has_is_never_abandoned_however_long_its_routers_stand_still() -> None:
    reader = Reader()
    assert not any(reader.look({"app": 7}, "app") for _ in range(100 * LOOKS))
    assert reader.look({"app": 7}) == []  # deleted now: its processes have as long to end
    assert [reader.look({"app": 7}) for _ in range(LOOKS)][-1] == ["app"]


def test_processes_that_beat_keep_the_records_of_an_application_that_serve_does_not_know() -> None:
    reader = Reader()
    assert not any(reader.look({"app": at}) for at in range(100 * LOOKS))


def test_a_reader_that_stood_still_for_hours_has_seen_nothing_meanwhile() -> None:
    """As a controller whose store did not answer, or whose host was paused."""
    reader = Reader()
    reader.look({"app": 7})
    assert reader.look({"app": 7}, after_s=36_000.0) == []
    assert reader.look({"app": 7}) == []


def test_a_look_that_lacked_the_application_begins_anew() -> None:
    reader = Reader()
    for _ in range(LOOKS):
        reader.look({"app": 7})
    reader.look({})
    assert not any(reader.look({"app": 7}) for _ in range(LOOKS))
