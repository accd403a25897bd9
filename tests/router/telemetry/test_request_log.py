import json
from pathlib import Path

import pytest

from serving.errors import RateLimitError, UnauthorizedError, UnknownPathError
from serving.router.telemetry.record import RequestRecord
from serving.router.telemetry.request_log import RequestLog

pytestmark = pytest.mark.unit


def test_who_has_no_key_rotates_nobodys_line_away(tmp_path: Path) -> None:
    """20,000 posts to long paths, a thousand a beat: as many filled the log once."""
    log = RequestLog(tmp_path / "requests.jsonl")
    known = RequestRecord("/v1/completions", "known", key="0123456789ab", on_end=log)
    known.failed(RateLimitError("too much"))
    known.end()
    for number in range(20_000):
        error = (UnauthorizedError, UnknownPathError)[number % 2]
        record = RequestRecord("/" + "x" * 8000, "r" * 128, on_end=log)
        record.failed(error("no"))
        record.end()
        if number % 1000 == 0:
            log.flush()
    log.close()
    assert [json.loads(line)["request_id"] for line in log.path.read_text().splitlines()] == ["known"]
    strangers = sorted(tmp_path.glob("requests.strangers*"))
    assert strangers
    assert sum(path.stat().st_size for path in strangers) < 25 << 20
    lines = [json.loads(line) for line in log.strangers.read_text().splitlines()]
    assert max(len(entry.get("path", "")) for entry in lines) == 200
    assert sum(entry.get("dropped", 0) for entry in lines) + sum("path" in entry for entry in lines) == 20_000


def test_a_stranger_of_a_service_without_keys_is_logged_as_everybody(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "requests.jsonl")
    RequestRecord("/v1/completions", "id", model="llama", on_end=log).end()
    log.close()
    assert json.loads(log.path.read_text())["request_id"] == "id"
