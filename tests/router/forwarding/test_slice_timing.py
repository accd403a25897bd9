import math
from dataclasses import dataclass
from typing import Any

import pytest

from serving.router.forwarding.slice_timing import (
    KEPT,
    LEAST_KNOWN,
    RENEWED,
    TIMES_NORMAL,
    SliceTiming,
)
from serving.router.forwarding.stalls import Stream, stalled
from serving.router.http.protocol import InferenceRequest
from serving.state.records import SliceRecord, SliceState
from serving.timings import TIMINGS

pytestmark = pytest.mark.unit
ASKED = InferenceRequest("llama", "/v1/completions", b"{}", {})


def timing(gap_s: float = 0.2, first_s: float = 0.5, count: int = LEAST_KNOWN) -> SliceTiming:
    made = SliceTiming()
    for _ in range(count):
        made.gap("a", gap_s)
        made.first("a", first_s)
    return made


def test_silence_is_judged_by_the_slice_s_own_gaps() -> None:
    assert timing(0.2).silence_s("a", reading=False) == pytest.approx(0.2 * TIMES_NORMAL)
    assert timing(0.5).silence_s("a", reading=False) == pytest.approx(0.5 * TIMES_NORMAL)
    assert timing(0.001).silence_s("a", reading=False) == TIMINGS.shortest_stall_s


def test_of_an_unknown_slice_nothing_is_concluded_for_long() -> None:
    assert SliceTiming().silence_s("a", reading=False) == TIMINGS.unknown_stall_s
    assert timing(count=LEAST_KNOWN - 1).silence_s("a", reading=False) == TIMINGS.unknown_stall_s


def test_while_a_prompt_is_read_a_slice_may_be_as_silent_as_its_slow_first_tokens() -> None:
    assert timing(0.01, first_s=0.1).silence_s("a", reading=True) == TIMINGS.shortest_prefill_stall_s
    assert timing(0.01, first_s=20).silence_s("a", reading=True) == 60


def test_only_the_latest_are_kept_and_only_of_slices_there_are() -> None:
    made = timing(5.0, count=10 * KEPT)
    for _ in range(KEPT + RENEWED):
        made.gap("a", 0.2)
    assert made.silence_s("a", reading=False) == pytest.approx(4)
    made.settle([], 0.0)
    assert made._slices == {}


@dataclass
class Response:
    """Nobody reads it here."""

    content: Any = None


def stream(replica: str = "a", *, heard: float = 0.0, asked: float = 1.0, **more: Any) -> Stream:
    entry = SliceRecord(replica, "llama", SliceState.SERVING, "serving", "v6e 2x4")
    return Stream(
        entry, ASKED, Response(), asked, heard_s=heard, **({"trial": False, "watched": True} | more)
    )  # type: ignore[arg-type]


def found(streams: list[Stream], now_s: float, in_flight: int | None = None) -> list[Stream]:
    return stalled(streams, timing(), lambda _: len(streams) if in_flight is None else in_flight, now_s)


def test_silence_while_a_client_takes_its_time_is_not_the_slice_s() -> None:
    slow = stream(heard=10, telling=True)
    assert found([slow], 100) == []
    others = [stream(heard=10), stream(heard=10.1)]
    assert found([slow, *others], 14.2) == others  # nor does it hide that the slice is
    slow.delivered(100)
    assert found([slow], 101) == []
    assert found([slow], 105) == [slow]


def test_a_slice_that_has_gone_silent_loses_its_streams() -> None:
    streams = [stream(heard=10), stream(heard=10.1)]
    assert found(streams, 14) == []
    assert found(streams, 14.2) == streams


def test_a_stream_that_waits_while_others_go_on_has_not_stalled() -> None:
    assert found([stream(heard=10), stream(heard=29.9)], 30) == []


def test_a_prompt_being_read_is_no_stall_whether_streamed_or_not() -> None:
    assert found([stream(heard=10), stream()], 19) == []
    assert found([stream(heard=10)], 19, in_flight=2) == []
    assert found([stream(heard=10)], 19) != []
    assert len(found([stream(heard=10), stream(asked=10)], 20.5)) == 2


def test_waiting_for_a_first_token_is_no_stall_but_on_trial() -> None:
    assert found([stream(asked=1)], 1000) == []
    (trial,) = streams = [stream(asked=1, trial=True)]
    assert found(streams, 2.9) == []
    assert found(streams, 3.1) == [trial]


def test_what_can_t_go_on_elsewhere_stays() -> None:
    stays = stream(heard=10, movable=False)
    goes = stream(heard=10)
    assert found([stays, goes], 30) == [goes]


def report(beat: int, **load: float) -> SliceRecord:
    return SliceRecord("a", "llama", SliceState.SERVING, "serving", "v6e 2x4", beat=beat, **load)  # type: ignore[arg-type]


def test_another_router_s_prompt_is_no_stall_either() -> None:
    """A slice reads a prompt that only its own record tells of: ten seconds, not two."""
    known = timing(0.01)
    known.settle([report(1, running=2, reading=1, output_tokens=7)], 10)
    late = stream(heard=10)
    assert stalled([late], known, lambda _: 1, 19.9) == []
    assert stalled([late], known, lambda _: 1, 20.1) == [late]
    known.settle([report(2, running=1, output_tokens=7)], 20.2)
    assert stalled([late], known, lambda _: 1, 20.3) == [late]


def test_a_stream_that_waits_while_another_router_s_go_on_has_not_stalled() -> None:
    known = timing(0.01)
    late = stream(heard=10)
    for beat in range(1, 30):  # other routers' streams get tokens
        known.settle([report(beat, running=4, output_tokens=100 * beat)], 10 + beat / 2)
        assert stalled([late], known, lambda _: 1, 10.2 + beat / 2) == []
    for beat in range(30, 40):  # and now nobody does
        known.settle([report(beat, running=4, output_tokens=2900)], 10 + beat / 2)
    assert stalled([late], known, lambda _: 1, 24.5 + 2.2) == [late]


def test_what_an_engine_that_hangs_reports_hides_no_stall() -> None:
    """Its record beats on from a thread; it is cut half a beat later than by this router's own streams alone."""
    known = timing(0.01)
    late = stream(heard=10)
    for beat in range(1, 9):
        known.settle([report(beat, running=4, output_tokens=min(beat, 2))], 9 + beat / 2)
    assert stalled([late], known, lambda _: 1, 12.1) == [late]


def test_a_slice_that_compiles_keeps_its_streams_and_its_trial() -> None:
    """Another slice would have to compile the same program for them."""
    known = timing(0.01)
    late, trial = stream(heard=10), stream(asked=10, trial=True)
    for beat in range(1, 80):
        known.settle([report(beat, running=2, compiling_s=beat / 2, output_tokens=7)], 10 + beat / 2)
        assert stalled([late, trial], known, lambda _: 2, 10.4 + beat / 2) == []
    for beat in range(80, 90):  # it compiles no more, and still gives nothing
        known.settle([report(beat, running=2, output_tokens=7)], 10 + beat / 2)
    assert stalled([late, trial], known, lambda _: 2, 49.5 + TIMINGS.shortest_prefill_stall_s + 0.1) == [
        late,
        trial,
    ]


def test_who_came_before_a_silence_or_to_an_idle_slice_has_not_seen_it_work() -> None:
    known = timing(0.01)
    assert known.worked_since_s("a") == -math.inf
    for beat in range(1, 30):
        known.settle([report(beat, output_tokens=beat)], 10 + beat / 2)
    assert known.worked_since_s("a") == 19.5  # ten beats before the last one
    for beat in range(30, 90):  # a program is compiled, and gives two tokens
        known.settle([report(beat, output_tokens=29 + max(0, beat - 87))], 10 + beat / 2)
    assert known.worked_since_s("a") == 20.5


def test_other_slices_are_none_of_its_business() -> None:
    here, there = stream(heard=10), stream("b", heard=10)
    assert stalled([here, there], timing(), lambda _: 1, 30) == [here]
