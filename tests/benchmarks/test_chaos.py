import json
from typing import Any

import pytest

from benchmarks.chaos import AnswerError, Fault, Load, Outcome, table

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
    rows = table([Outcome("engine", requests=7, failed=1, longest_gap_s=0.25)]).splitlines()
    assert len(rows) == 3
    assert rows[0].count("|") == rows[2].count("|") == 7
    assert rows[2].endswith("| 7 | 1 | 0 | 0.2 | 0.0 |")


def test_a_fault_need_not_heal() -> None:
    Fault("x", "y", lambda _, __: None).heals(None, None)  # type: ignore[arg-type]
