import asyncio
import json
import sqlite3
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import to_json

from serving.config import ResponsesStoreSpec
from serving.errors import BadRequestError, ConfigError, PreviousResponseError
from serving.router.http import responses
from serving.router.http.response_store import ResponseStore
from serving.router.http.responses import Keeping, Kept, following, items, previous_id

pytestmark = pytest.mark.unit


def with_store(
    path: Path,
    work: Callable[[ResponseStore], Awaitable[Any]],
    clock: Callable[[], float] = lambda: 0.0,
    **spec: Any,
) -> Any:
    async def run() -> Any:
        store = ResponseStore(ResponsesStoreSpec(path=str(path), **spec), clock)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


def kept(name: str, text: str = "hello", key: str = "mine") -> tuple[Keeping, dict[str, Any]]:
    return Keeping(key, to_json([{"role": "user", "content": text}]), ""), {"id": name, "output": []}


async def names(store: ResponseStore, *asked: str, key: str = "mine") -> str:
    return "".join([name for name in asked if await store.get(key, name)])


def test_a_response_is_found_by_its_key_alone_also_by_another_router(tmp_path: Path) -> None:
    path = tmp_path / "responses"

    async def put(store: ResponseStore) -> None:
        await store.put(*kept("a"))

    async def look(store: ResponseStore) -> list[Any]:
        return [await store.get("mine", "a"), await store.get("other", "a"), await store.get("mine", "b")]

    with_store(path, put)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert with_store(path, look) == [
        Kept(b'{"id":"a","output":[]}', kept("a")[0].items),
        None,
        None,
    ]


def test_a_response_is_deleted_by_its_key_alone(tmp_path: Path) -> None:
    async def work(store: ResponseStore) -> list[bool]:
        await store.put(*kept("a"))
        return [await store.delete(key, "a") for key in ("other", "mine", "mine")]

    assert with_store(tmp_path / "responses", work) == [False, True, False]


def test_an_id_that_is_taken_keeps_its_response_and_other_keys_have_ids_of_their_own(tmp_path: Path) -> None:
    async def work(store: ResponseStore) -> list[Any]:
        for text, key in (("first", "mine"), ("second", "mine"), ("third", "other")):
            await store.put(*kept("a", text, key))
        found = [await store.get(key, "a") for key in ("mine", "other")]
        return [json.loads(each.items)[0]["content"] for each in found if each]

    assert with_store(tmp_path / "responses", work) == ["first", "third"]


def test_the_oldest_go_beyond_rows_and_bytes_and_age(tmp_path: Path) -> None:
    now_s = 0.0

    async def rows(store: ResponseStore) -> str:
        nonlocal now_s
        for name in "abcde":
            now_s += 1
            await store.put(*kept(name))
        return await names(store, *"abcde")

    async def large(store: ResponseStore) -> str:
        nonlocal now_s
        now_s += 1
        await store.put(*kept("f", "x" * 3000))
        await store.put(*kept("g", "x" * 5000))  # larger than the store: not kept, and nothing goes for it
        return await names(store, *"abcdefg")

    async def old(store: ResponseStore) -> str:
        nonlocal now_s
        now_s += 10
        before = await names(store, *"abcdef")
        await store.put(*kept("h"))
        return before + await names(store, *"abcdefh")

    path = tmp_path / "responses"
    assert with_store(path, rows, lambda: now_s, max_responses=3) == "cde"
    assert with_store(path, large, lambda: now_s, max_bytes=3200) == "def"
    assert with_store(path, old, lambda: now_s, max_age_s=10) == "ffh"


@pytest.mark.parametrize("bound", [{"max_responses": 4}, {"max_bytes": 1200}])
def test_a_key_that_keeps_much_takes_nothing_of_another_s(tmp_path: Path, bound: dict[str, int]) -> None:
    path = tmp_path / "responses"

    async def work(store: ResponseStore) -> str:
        await store.put(*kept("a", "x" * 200))
        await store.put(*kept("b", "x" * 200))
        for number in range(20):
            await store.put(*kept(f"greedy-{number}", "y" * 200, key="other"))
        return await names(store, "a", "b") + ("c" if await store.get("other", "greedy-19") else "")

    assert with_store(path, work, **bound) == "abc"


def test_a_file_of_an_earlier_version_is_counted_by_key(tmp_path: Path) -> None:
    path = tmp_path / "responses"

    async def put(store: ResponseStore) -> None:
        for name in "abc":
            await store.put(*kept(name, key="other"))
        await store.put(*kept("mine"))

    async def one_more(store: ResponseStore) -> str:
        await store.put(*kept("d", key="other"))
        return await names(store, "mine") + await names(store, *"abcd", key="other")

    with_store(path, put)
    with sqlite3.connect(path) as file:
        file.executescript("DROP TRIGGER came_of_key; DROP TRIGGER went_of_key; DROP TABLE of_keys")
    file.close()
    assert with_store(path, one_more, max_responses=3) == "minecd"


def test_a_file_that_can_not_be_opened_says_which_key_to_change(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "file"):
        with pytest.raises(ConfigError, match=r"router\.responses_store: .* can't be opened"):
            ResponseStore(ResponsesStoreSpec(path=str(path)))
    (tmp_path / "text").write_text("no database, and longer than the head of one" * 100)
    with pytest.raises(ConfigError, match="not a database"):
        ResponseStore(ResponsesStoreSpec(path=str(tmp_path / "text")))


def test_a_conversation_goes_on_with_all_that_came_before() -> None:
    user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "One"}]}
    assert json.loads(items({"input": "One"})) == [user]
    answer = {"type": "message", "role": "assistant"}
    body, whole = following(
        {"input": [{"role": "user", "content": "Two"}], "model": "m", "previous_response_id": "r"},
        Kept(to_json({"output": [answer]}), items({"input": "One"})),
    )
    assert json.loads(whole) == [user, answer, {"role": "user", "content": "Two"}]
    assert json.loads(body) == {"input": json.loads(whole), "model": "m"}


def test_a_conversation_may_have_nothing_new_in_it() -> None:
    body, whole = following({"previous_response_id": "r"}, Kept(b"{}", b"[ ]"))
    assert (json.loads(body), whole) == ({"input": []}, b"[]")


def test_an_input_that_is_neither_text_nor_a_list_is_refused() -> None:
    with pytest.raises(BadRequestError, match="input is neither a text nor a list"):
        items({"input": {"role": "user"}})


def test_what_is_no_id_is_refused() -> None:
    assert previous_id({"previous_response_id": None}) == previous_id({}) == ""
    with pytest.raises(PreviousResponseError, match="is no text"):
        previous_id({"previous_response_id": 7})
    with pytest.raises(BadRequestError, match="no conversations"):
        previous_id({"conversation": "conv_1"})


def test_input_items_come_in_pages_each_with_an_id() -> None:
    conversation = [
        {"role": "user", "content": "a"},
        {"type": "function_call_output", "id": "own"},
        "odd",
    ]

    def listed(query: dict[str, str], of: list[Any] = conversation) -> Any:
        return json.loads(responses.listed(to_json(of), query))

    page = listed({})
    assert [item["id"] for item in page["data"]] == ["item_2", "own", "item_0"]
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("item_2", "item_0", False)
    page = listed({"order": "asc", "limit": "1", "after": "item_0"})
    assert page["data"] == [{"type": "function_call_output", "id": "own"}]
    assert page["has_more"]
    assert listed({}, []) == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }
    for query in ({"limit": "0"}, {"limit": "x"}, {"order": "up"}, {"after": "nothing"}):
        with pytest.raises(BadRequestError):
            listed(query)


def test_an_item_without_an_id_gets_none_that_a_client_chose() -> None:
    conversation = [{"id": "item_2"}, {"id": "item_2_2"}, {}, {"id": "item_2_2_2"}, {"id": "item_2"}]
    page = json.loads(responses.listed(to_json(conversation), {"order": "asc"}))
    names = [item["id"] for item in page["data"]]
    assert names == ["item_2", "item_2_2", "item_2_2_2", "item_3", "item_4"]


def test_pages_of_items_come_to_an_end_where_a_client_sent_one_again() -> None:
    """As with a whole conversation beside previous_response_id: openai's pager asked for the same page for ever."""
    once, again = {"id": "msg_1", "role": "assistant"}, {"role": "user", "content": "again"}
    conversation = [
        {"role": "user", "content": "first"},
        once,
        again,
        once,
        {"role": "user", "content": "last"},
    ]
    found: list[Any] = []
    query = {"order": "asc", "limit": "2"}
    for _ in range(3):
        page = json.loads(responses.listed(to_json(conversation), query))
        found += page["data"]
        query["after"] = page["last_id"]
    assert not page["has_more"]
    assert [item.get("content") for item in found] == ["first", None, "again", None, "last"]
    assert len({item["id"] for item in found}) == len(found)
