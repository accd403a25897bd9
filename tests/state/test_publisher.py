import pytest
from support.servers import until

from serving.state.publisher import Publisher
from serving.state.records import SliceRecord, SliceState
from serving.timings import Timings

pytestmark = pytest.mark.unit


class FailingStore:
    """Takes every record but one."""

    def __init__(self) -> None:
        self.beats: list[int] = []

    def put_slice(self, record: SliceRecord) -> None:
        if record.beat == 2:
            raise ConnectionError("the head restarts")
        self.beats.append(record.beat)

    def delete_slice(self, record: SliceRecord) -> None:
        self.beats.append(-record.beat)

    def now(self) -> float:
        return 1e9


def test_a_beat_that_cannot_be_written_is_followed_by_the_next() -> None:
    store = FailingStore()
    record = SliceRecord("a", "llama", SliceState.SERVING, "serving", "v6e 2x4")
    publisher = Publisher(store, record, timings=Timings(beat_s=0.001))
    until(lambda: len(store.beats) > 3, "beats")
    publisher.close()
    assert store.beats[:3] == [1, 3, 4]
    assert store.beats[-1] == -publisher.record.beat


def test_a_change_of_state_that_cannot_be_written_fails_nothing_and_is_in_the_next_beat() -> None:
    """A slice that had loaded for minutes did not serve, and one that was to leave did not."""
    told: list[SliceState] = []
    away = True

    class Away(FailingStore):
        def put_slice(self, record: SliceRecord) -> None:
            if away:
                raise ConnectionError("the head restarts")
            told.append(record.state)

    def load() -> dict[str, str]:
        if away:
            raise ConnectionError("the head restarts")
        return {"phase": "ready"}

    starts = SliceRecord("a", "llama", SliceState.STARTING, "loading", "v6e 2x4")
    publisher = Publisher(Away(), starts, timings=Timings(beat_s=0.001))
    publisher.load = load
    publisher.update(state=SliceState.SERVING)
    assert told == []
    away = False
    until(lambda: told, "a beat")
    publisher.close()
    assert told[0] is SliceState.SERVING
    assert (
        publisher.record.since == 1e9
    )  # the cluster's time: by an own clock that is ahead, engines would always die early
    assert publisher.record.phase == "ready"
