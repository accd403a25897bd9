"""Real engines on two slices of one host: an answer that is cut off goes on as if nothing had happened."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from service import MODEL, Service, leftovers, service

pytestmark = pytest.mark.engine

HELLO = [{"role": "user", "content": "Tell me a story"}]
GREEDY = {"temperature": 0, "stream": True, "max_tokens": 300, "ignore_eos": True}
USAGE = {"include_usage": True, "continuous_usage_stats": True}
ASKS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HELLO, "stream_options": USAGE}),
    (
        "/v1/chat/completions",
        {"messages": HELLO, "logprobs": True, "top_logprobs": 1, "stop": ["never said at all"]},
    ),
    ("/v1/completions", {"prompt": "A slice is", "logprobs": 1, "stream_options": USAGE}),
    ("/v1/completions", {"prompt": [5, 99, 300], "min_tokens": 280, "return_token_ids": True}),
]


@pytest.fixture(scope="module")
def running(short_directory: Path) -> Iterator[Service]:
    one_chip = {"generation": "v6e", "topology": "1x1"}
    with service(short_directory, slices=2, slice=one_chip, replicas=2, stall_s=60) as started:
        yield started
    assert leftovers(started.cluster.id) == []


def stream(running: Service, path: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """All events but for what differs from one run to the next."""
    fields = {"model": MODEL, **GREEDY, **fields}
    with httpx.stream("POST", f"{running.address}{path}", json=fields, timeout=180) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]", lines[-1:]
    events = [json.loads(line) for line in lines]
    assert not (errors := [event for event in events if "error" in event]), (path, fields, errors)
    assert len({(event.pop("id"), event.pop("created")) for event in events}) == 1
    return [_rounded(event) for event in events]


def _rounded(found: Any) -> Any:
    """Logprobs of one batch and of another differ in their last bits."""
    if isinstance(found, dict):
        return {name: _rounded(each) for name, each in found.items()}
    if isinstance(found, list):
        return [_rounded(each) for each in found]
    return round(found, 3) if isinstance(found, float) else found


def test_greedy_answers_are_what_they_would_have_been(running: Service) -> None:
    with ThreadPoolExecutor(len(ASKS)) as pool:
        undisturbed = [one.result() for one in [pool.submit(stream, running, *ask) for ask in ASKS]]
        asked = [pool.submit(stream, running, *ask) for ask in ASKS]
        running.until(
            lambda: [entry.running for entry in running.serving()] == [2, 2], 60, "two streams on each slice"
        )
        before = {entry.replica: entry.output_tokens for entry in running.serving()}
        running.until(
            lambda: all(e.output_tokens > before[e.replica] + 60 for e in running.serving()), 60, "tokens"
        )
        victim = running.serving()[0]
        engine = next(
            process
            for process in running.cluster.processes(victim.slice, 0)
            if "EngineCore" in " ".join(process.cmdline())
        )
        engine.kill()
        killed = time.monotonic()
        assert not any(one.done() for one in asked)
        answers = [one.result() for one in asked]
        print(f"all answered {time.monotonic() - killed:.1f} s after the engine was killed")
    for answer, expected in zip(answers, undisturbed, strict=True):
        assert answer == expected
