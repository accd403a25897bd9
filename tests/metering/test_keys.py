"""Keys of the store: made and ended by the command line, taken up by routers that run."""

import asyncio
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.batches import filling_router, folder, owner
from support.servers import until
from support.simulated_engine import MODEL, serving

from serving.cli.main import main
from serving.config import parse
from serving.database.database import Database
from serving.errors import ConfigError, StoreAwayError, UnauthorizedError
from serving.metering.keys import InForce, KeyTable
from serving.metering.service import Metering
from serving.router.http.auth import Key, KeyFile, KeyRing, new

NOW_S = 1_795_348_800.0
Out = pytest.CaptureFixture[str]


def shows(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {key}".encode())]


def hash_of(line: str) -> str:
    return line.partition("sha256: ")[2][:64]


def entry(name: str, key: str, *hashes: str, **limits: Any) -> dict[str, Any]:
    return {"name": name, "sha256": key, "hashes": list(hashes or (key,)), **limits}


@pytest.fixture
def store(tmp_path: Path) -> str:
    async def make() -> None:
        await (await Database.open(str(tmp_path / "store.sqlite"))).close()

    asyncio.run(make())
    return str(tmp_path)


def in_force(store: str, now_s: float) -> InForce:
    async def read() -> InForce:
        database = await Database.open(f"{store}/store.sqlite")
        try:
            return await KeyTable(database).in_force(now_s)
        finally:
            await database.close()

    return asyncio.run(read())


def ring_of(store: str, now_s: float = NOW_S) -> KeyRing:
    keys = KeyFile(None, stored=True)
    found = in_force(store, now_s)
    keys.take(found.version, found.entries)
    assert keys.refresh()
    return keys.ring


def made(capsys: Out, *arguments: str) -> str:
    assert main(["keys", *arguments]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    return err.strip().rpartition(" ")[2]


@pytest.mark.unit
def test_keys_are_added_rolled_and_revoked_in_the_store(store: str, capsys: Out) -> None:
    at = ["--store", store]
    first = made(capsys, "add", "team", "--tokens-per-day", "1000", "--weight", "0.5", *at)
    other = made(capsys, "add", "other", *at)
    key = ring_of(store).holder(shows(first))
    assert (key.name, key.tokens_per_day, key.weight, key.concurrency) == ("team", 1000, 0.5, None)
    second = made(capsys, "roll", "team", "--grace", "0", *at)
    ring = ring_of(store, 2 * NOW_S)
    with pytest.raises(UnauthorizedError):
        ring.holder(shows(first))
    rolled = ring.holder(shows(second))
    assert rolled == key  # what it used, its files and its batches are its own still
    assert ring.owner(key.sha256) == key
    assert main(["keys", "list", *at]) == 0
    out = capsys.readouterr().out
    assert [line.split()[2] for line in out.splitlines()] == ["other", "team"]
    assert f"{key.id}  " in out
    assert "tokens_per_day=1000" in out
    assert made(capsys, "revoke", "team", *at) == ""
    ring = ring_of(store)
    with pytest.raises(UnauthorizedError):
        ring.holder(shows(second))
    with pytest.raises(UnauthorizedError, match="no longer"):
        ring.owner(key.sha256)
    assert ring.holder(shows(other)).name == "other"


@pytest.mark.unit
def test_the_secret_before_lets_in_for_its_grace(store: str, capsys: Out) -> None:
    first = made(capsys, "add", "team", "--store", store)
    second = made(capsys, "roll", "team", "--store", store)
    soon, late = ring_of(store, NOW_S), ring_of(store, 2 * NOW_S)
    assert soon.holder(shows(first)) == soon.holder(shows(second)) == late.holder(shows(second))
    with pytest.raises(UnauthorizedError):
        late.holder(shows(first))
    assert in_force(store, NOW_S).version != in_force(store, 2 * NOW_S).version


@pytest.mark.unit
def test_the_store_has_no_key_and_no_name_twice(store: str, capsys: Out) -> None:
    key = made(capsys, "add", "team", "--store", store)
    made(capsys, "roll", "team", "--store", store)
    with closing(sqlite3.connect(f"{store}/store.sqlite")) as connection:
        assert key not in "\n".join(connection.iterdump())
    for arguments, says in (
        (["add", "team"], "there is a key named 'team'"),
        (["roll", "nobody"], "no key named 'nobody'"),
        (["revoke", "nobody"], "no key named 'nobody'"),
        (["add", "x", "--weight", "0"], "weight: Input should be greater"),
    ):
        assert main(["keys", *arguments, "--store", store]) == 1
        assert says in capsys.readouterr().err


@pytest.mark.unit
@pytest.mark.parametrize(
    "name", ["a\nb", "a\tb", "\x1b[2Jx", "a\u2028b", "a\u202eb", "a\0", " a", "a ", "\udcff"]
)
def test_a_name_that_would_break_a_terminal_s_line_is_refused(store: str, capsys: Out, name: str) -> None:
    for arguments in (["add", name, "--store", store], ["new", name]):
        assert main(["keys", *arguments]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert "control characters" in err
        assert len(err.splitlines()) == 1
        assert err.isascii()


@pytest.mark.unit
def test_keys_that_an_older_or_newer_version_left_are_listed_a_line_each(store: str, capsys: Out) -> None:
    async def leave() -> None:
        database = await Database.open(f"{store}/store.sqlite")
        await KeyTable(database).add("two\nlines", "a" * 64, {}, NOW_S)
        await KeyTable(database).add("newer", "b" * 64, {"dogs_per_day": 3}, NOW_S)
        await database.close()

    asyncio.run(leave())
    assert main(["keys", "list", "--store", store]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{'b' * 12}  2026-11-22  newer  dogs_per_day=3",
        f"{'a' * 12}  2026-11-22  'two\\nlines'",
    ]
    assert main(["keys", "revoke", "two\nlines", "--store", store]) == 0


@pytest.mark.unit
def test_the_files_keys_stay_and_go_before_those_of_the_store(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    (in_file, line), (stored, stored_line) = new("team"), new("team")
    path.write_text(line)
    keys = KeyFile(path, stored=True)
    assert keys.ring.holder(shows(in_file)).name == "team"
    with pytest.raises(StoreAwayError):
        keys.ring.holder(shows(stored))
    third, third_line = new("third")
    keys.take("1", [entry("team", hash_of(stored_line)), entry("third", hash_of(third_line), concurrency=3)])
    assert keys.refresh()
    assert not keys.refresh()
    assert [key.name for key in keys.ring.keys] == ["team", "third"]
    assert keys.ring.holder(shows(third)) == Key(name="third", sha256=hash_of(third_line), concurrency=3)
    with pytest.raises(UnauthorizedError):
        keys.ring.holder(shows(stored))
    path.write_text(f"{line}\n{new('fourth')[1]}")
    assert keys.refresh()
    assert [key.name for key in keys.ring.keys] == ["team", "fourth", "third"]


@pytest.mark.unit
def test_nobody_comes_in_while_the_store_has_not_said_who_may_and_when_it_says_nobody() -> None:
    keys = KeyFile(None, stored=True)
    with pytest.raises(StoreAwayError, match="not known yet"):
        keys.ring.holder(shows("sk-x"))
    with pytest.raises(StoreAwayError):
        keys.ring.owner("a" * 64)
    with pytest.raises(UnauthorizedError):
        keys.ring.holder([])
    keys.take("1", [])
    keys.refresh()
    with pytest.raises(UnauthorizedError):
        keys.ring.holder(shows("sk-x"))


@pytest.mark.unit
def test_stored_keys_want_a_store() -> None:
    model = {"name": "m", "model": "x", "slice": {"generation": "v6e", "topology": "1x1"}}
    with pytest.raises(ConfigError, match=r"router\.keys\.stored: there is no store"):
        parse({"models": [model], "router": {"keys": {"stored": True}}})
    with pytest.raises(ConfigError, match=r"router\.keys\.stored wants"):
        KeyFile(None, adds_up=False, stored=True)


@pytest.fixture(scope="module")
def upstream() -> Iterator[str]:
    with serving() as (address, _):
        yield address


@pytest.mark.http
def test_a_running_router_takes_up_keys_within_seconds(tmp_path: Path, upstream: str, capsys: Out) -> None:
    spec = folder(tmp_path)

    def status(key: str) -> int:
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 4}
        return httpx.post(
            f"{address}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}
        ).status_code

    with (
        owner(spec) as keeper,
        filling_router(keeper.place, upstream, keys=KeyFile(None, stored=True)) as (address, _),
    ):
        at = ["--store", str(spec.folder)]
        key = made(capsys, "add", "team", "--tokens-per-day", "10", *at)
        until(lambda: status(key) == 200, "the key lets in")
        until(lambda: status(key) == 429, "its budget holds")
        rolled = made(capsys, "roll", "team", "--grace", "0", *at)
        until(lambda: (status(key), status(rolled)) == (401, 429), "it is rolled, with what it used")
        made(capsys, "revoke", "team", *at)
        until(lambda: status(rolled) == 401, "it is revoked")


@pytest.mark.unit
@pytest.mark.parametrize("grace", ["nan", "inf", "-5", "a day"])
def test_a_grace_is_a_number_of_seconds(store: str, capsys: Out, grace: str) -> None:
    made(capsys, "add", "team", "--store", store)
    with pytest.raises(SystemExit):
        main(["keys", "roll", "team", f"--grace={grace}", "--store", store])
    assert "no number of seconds" in capsys.readouterr().err


@pytest.mark.unit
def test_a_revoked_key_is_out_though_the_calendar_was_put_back(store: str, capsys: Out) -> None:
    at = ["--store", store]
    made(capsys, "add", "team", *at)
    calendar = [NOW_S]

    async def looked() -> list[int]:
        database = await Database.open(f"{store}/store.sqlite")
        metering, found = Metering(database, lambda: calendar[0]), []
        try:
            for back_s in (0.0, 3600.0):
                calendar[0] -= back_s
                metering._read_s -= 2.0  # the time between two reads
                found.append(len((await metering._keys_in_force()).entries))
                if not back_s:
                    await metering.keys.revoke("team")
        finally:
            await database.close()
        return found

    assert asyncio.run(looked()) == [1, 0]


@pytest.mark.unit
def test_a_stored_key_of_another_version_keeps_no_other_from_being_revoked() -> None:
    keys = KeyFile(None, stored=True)
    told: list[tuple[str, Mapping[str, Any]]] = []
    keys.tell = lambda what, fields: told.append((what, fields))
    first, other = "a" * 64, "b" * 64
    keys.take("1", [entry("first", first), entry("other", other, dogs_per_day=3)])
    keys.refresh()
    assert [key.name for key in keys.ring.keys] == ["first"]
    assert told[0][0] == "keys_refused"
    assert "stored key 'other': dogs_per_day" in told[0][1]["problem"]
    keys.take("2", [entry("other", other, dogs_per_day=3)])
    keys.refresh()
    assert keys.ring.keys == ()
