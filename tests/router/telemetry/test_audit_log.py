import json
from pathlib import Path
from typing import Any

import pytest

from serving.errors import ConfigError, RateLimitError, UnauthorizedError
from serving.router.http.auth import KeyFile, new, parse
from serving.router.telemetry.audit_log import AuditLog
from serving.router.telemetry.record import RequestRecord

pytestmark = pytest.mark.unit


def lines(log: AuditLog) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.path.read_text().splitlines()]


def test_keys_that_come_go_and_change_are_told_of_by_their_digits(tmp_path: Path) -> None:
    path, log = tmp_path / "keys.yaml", AuditLog(tmp_path / "audit.jsonl")
    (_, first), (_, second), (_, third) = new("first"), new("second", concurrency=1), new("third")
    path.write_text(f"{first}\n{second}")
    keys = KeyFile(path)
    keys.tell = log.tell
    path.write_text(f"{second.replace('concurrency: 1', 'concurrency: 200')}\n{third}")
    assert keys.refresh()
    path.write_text("")
    with pytest.raises(ConfigError):
        keys.refresh()
    log.close()
    changed, refused = lines(log)
    ids = [parse(line, "file").keys[0].id for line in (first, second, third)]
    assert changed.pop("time")
    assert changed == {"event": "keys", "added": [ids[2]], "removed": [ids[0]], "changed": [ids[1]]}
    assert (refused["event"], "is empty" in refused["problem"]) == ("keys_refused", True)
    text = log.path.read_text()
    assert "first" not in text
    assert parse(third, "file").keys[0].sha256 not in text


def test_refusals_are_added_up_so_that_nobody_fills_the_log(tmp_path: Path) -> None:
    now_s = 1000.0
    log = AuditLog(tmp_path / "audit.jsonl", clock=lambda: now_s)
    for number in range(20_000):
        record = RequestRecord(
            "/v1/completions", "id", key="none" if number % 2 else "0123456789ab", on_end=log
        )
        record.failed((RateLimitError, UnauthorizedError)[number % 2]("no"))
        record.end()
        log.flush()
    assert not log.path.exists()
    now_s = 1060.0
    log.flush()
    told = [{name: value for name, value in line.items() if name != "time"} for line in lines(log)]
    assert told == [
        {"event": "refused", "key": "0123456789ab", "code": "rate_limit_exceeded", "requests": 10_000},
        {"event": "refused", "key": "none", "code": "invalid_api_key", "requests": 10_000},
    ]


def test_what_was_answered_is_not_told_of(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    record = RequestRecord("/v1/completions", "id", on_end=log)
    record.answered(200, streamed=False)
    record.end()
    log.close()
    assert not log.path.exists()
