import json
from typing import Any

import pytest

from benchmarks.chaos import AnswerError, Load, Outcome, joined, table
from benchmarks.faults import FAULTS, Left

pytestmark = pytest.mark.unit


class Response:
    """A streamed answer in the pieces that come off a socket."""

    def __init__(self, *events: Any, end: str = "[DONE]") -> None:
        data = [f"data: {json.dumps(event)}\n\n".encode() for event in events] + [f"data: {end}\n\n".encode()]
        self._data = b"".join(data)
        self.content = self

    async def iter_any(self) -> Any:
        for start in range(0, len(self._data), 7):
            yield self._data[start : start + 7]


def event(**more: Any) -> dict[str, Any]:
    return {"id": "a", "created": 1, "text": "x"} | more


async def read(*events: Any, end: str = "[DONE]") -> Any:
    return await Load("", "")._read(Response(*events, end=end))  # type: ignore[arg-type]


async def test_an_answer_is_what_differs_in_no_run() -> None:
    assert await read(event(), event(text="y")) == await read(
        event(id="b", created=2), event(id="b", created=3, text="y")
    )


@pytest.mark.parametrize(
    ("events", "end"),
    [
        ([event()], "{}"),
        ([event(), {"error": {"message": "lost"}}], "[DONE]"),
        ([event(), event(id="b")], "[DONE]"),
    ],
    ids=["cut off", "an error", "two answers"],
)
async def test_what_is_no_whole_answer_counts_as_failed(events: list[Any], end: str) -> None:
    with pytest.raises(AnswerError):
        await read(*events, end=end)


def test_the_table_has_a_row_for_each_fault_and_a_column_for_each_figure() -> None:
    left = Left(groups=1, processes=("ray::sentinel",), ports=(("127.77.1.1", 8000), ("127.77.1.2", 8000)))
    rows = table(
        [Outcome("engine", requests=7, failed=1, longest_gap_s=0.25, detected_s=1.5, left=left)]
    ).splitlines()
    assert len(rows) == 3
    assert rows[0].count("|") == rows[2].count("|") == 9
    assert rows[2].endswith("| 1.5 | 7 | 1 | 0 | 0.2 | - | 1, 1, 2 |")
    assert table([Outcome("head")]).endswith("| - | - |")


def test_every_loss_of_a_slice_is_a_fault() -> None:
    taking = {fault.name for fault in FAULTS if fault.takes_slice}
    assert taking == {
        "engine", "worker", "first-worker", "far-worker", "sentinel", "replica", "host", "first-host", "hung-host", "hung-first-host", "cable", "preempted", "notice", "poison",
            "corrupt",
    }  # fmt: skip


def test_what_a_real_engine_wrote_is_compared_joined() -> None:
    one = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
        {"choices": [{"delta": {"content": "ab"}, "finish_reason": "length"}]},
        {"choices": [], "usage": {"completion_tokens": 2}},
    ]
    other = [
        {"choices": [{"text": "a", "finish_reason": None}]},
        {"choices": [{"text": "b", "finish_reason": "length"}], "usage": {"completion_tokens": 2}},
    ]
    assert joined(one) == joined(other) == ["ab", "length", {"completion_tokens": 2}]
    assert joined(one[:1]) != joined(one)
