"""Keys and their accounts: who is told of which, and when."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from support.servers import PATIENCE_S
from support.simulated_engine import small_plan

from serving.config import RouterSpec
from serving.router.admission.accounts import Accounts
from serving.router.admission.controller import AdmissionController
from serving.router.admission.shares import KeyUse
from serving.router.http.auth import Key, KeyFile, new
from serving.router.scheduling.slice_table import SliceTable
from serving.state.records import Demand

pytestmark = pytest.mark.unit

BEAT_S = 0.5


class Keys(KeyFile):
    """Keys that a test sets."""

    def __init__(self, keys: Sequence[Key]) -> None:
        super().__init__(None, stored=True)
        self.have(keys)

    def have(self, keys: Sequence[Key]) -> None:
        self.take("1", [key.model_dump(exclude_none=True) | {"hashes": []} for key in keys])


def key(name: str, **limits: Any) -> Key:
    return Key(name=name, sha256=sha256(name.encode()).hexdigest(), **{"concurrency": 4, **limits})


class Router:
    """One router's accounts, and how they hear of another's."""

    def __init__(self, name: str, keys: Sequence[Key]) -> None:
        self.name, self.now_s = name, 0.0
        self.keys = Keys(keys)
        self.keys.refresh()
        self.accounts = Accounts(self.keys, None, 0.0)

    def beat(self, *others: "Router") -> set[str]:
        """Of which keys it tells the others now."""
        list(self.begin_beat(*others))
        return set(self.accounts.uses(self.now_s))

    def begin_beat(self, *others: "Router") -> Iterator[None]:
        said = [Demand(other.name, "llama", keys=other.accounts.uses(self.now_s)) for other in others]
        self.now_s += BEAT_S
        return self.accounts.others(said, self.name, self.now_s, self.now_s)


def test_of_many_keys_that_nobody_uses_others_are_told_by_and_by() -> None:
    """Of 32,000 at once, each beat of each router took seconds."""
    keys = [key(f"key {number}") for number in range(400)]
    one, two = Router("one", keys), Router("two", keys)
    known: set[str] = set()
    for beats in range(1, 9):
        told = one.beat(two)
        two.beat(one)
        assert len(told) <= 50 * (beats + 1)
        known |= told
    assert known == {every.id for every in keys}


def test_a_key_that_is_used_is_told_of_at_once() -> None:
    keys = [key(f"key {number}") for number in range(100)]
    one, last = Router("one", keys), keys[-1]
    assert last.id not in one.accounts.uses(0.0)
    one.accounts.arriving([(b"authorization", f"Bearer {last.name}".encode())], 0.0, 0.0)
    assert last.id in one.accounts.uses(0.0)


def test_of_keys_that_are_read_anew_only_those_are_told_of_that_changed() -> None:
    keys = [key(f"key {number}") for number in range(100)]
    one = Router("one", keys)
    for _ in range(30):
        one.beat()
    assert not one.accounts.uses(one.now_s)
    kept, used, gone = keys[:98], keys[98], keys[99]
    for asking in (used, gone):
        one.accounts.arriving([(b"authorization", f"Bearer {asking.name}".encode())], one.now_s, 0.0)
    changed, rolled, came = key("key 0", concurrency=5), key("key 1", concurrency=4), key("came")
    rolled = rolled.model_copy(update={"sha256": sha256(b"another").hexdigest()})
    one.keys.have([changed, rolled, *kept[2:], used, came])
    assert one.accounts.refresh(one.now_s)
    assert set(one.accounts.uses(one.now_s)) == {changed.id, rolled.id, used.id, came.id}
    assert one.accounts.of(changed, one.now_s, 0.0).key.concurrency == 5


def test_requests_go_on_while_a_beat_looks_at_many_keys() -> None:
    """With 2,000 keys in use each beat held them up for a tenth of a second."""
    keys = [key(f"key {number}", requests_per_minute=60) for number in range(400)]
    one, two = Router("one", keys), Router("two", keys)
    for every in keys:
        two.accounts.arriving([(b"authorization", f"Bearer {every.name}".encode())], 0.0, 0.0).arrive(0.0)
    steps = 0
    for _ in one.begin_beat(two):
        one.accounts.arriving([(b"authorization", f"Bearer {keys[steps].name}".encode())], one.now_s, 0.0)
        steps += 1
    assert steps >= 3 * len(keys) / 50
    # Each of them knows of the request at the other router.
    levels = {use.requests_left for use in map(KeyUse.of, one.accounts.uses(one.now_s).values())}
    assert len(one.accounts.uses(one.now_s)) == len(keys)
    assert max(levels) < 60


def test_what_changes_between_the_steps_of_a_beat_stays_changed() -> None:
    keys = [key(f"key {number}") for number in range(200)]
    one, two = Router("one", keys), Router("two", keys)
    for every in keys:
        two.accounts.arriving([(b"authorization", f"Bearer {every.name}".encode())], 0.0, 0.0)
    steps = one.begin_beat(two)
    next(steps)
    one.keys.have(keys[:100])
    assert one.accounts.refresh(one.now_s)
    list(steps)
    assert set(one.accounts.uses(one.now_s)) == {every.id for every in keys[:100]}


async def test_a_changed_file_is_parsed_beside_the_event_loop(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(new("first")[1])
    parsed_on: list[threading.Thread] = []

    class File(KeyFile):
        def _parse(self, text: str | bytes, where: str) -> Any:
            parsed_on.append(threading.current_thread())
            return super()._parse(text, where)

    keys, one, changed = File(path), small_plan(), asyncio.Event()
    keys.tell = lambda _kind, _what: changed.set()
    table = SliceTable({one.model.name: 1}, {one.model.name: str(one.slice)})
    gate = AdmissionController(RouterSpec(), [one], table, keys)
    parsed_on.clear()
    path.write_text(new("second")[1])
    running = asyncio.create_task(gate.run(0.01))
    async with asyncio.timeout(PATIENCE_S):
        await changed.wait()
    running.cancel()
    assert [known.name for known in keys.ring.keys] == ["second"]
    assert len(parsed_on) == 1
    assert parsed_on[0] is not threading.current_thread()
