"""OpenAI's own client on /v1/files and /v1/batches: a router that fills, the database's owner, a simulated engine."""

import contextlib
import errno
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.batches import batch_service, filling_router, folder, line, owner
from support.servers import PATIENCE_S, until
from support.simulated_engine import MODEL, serving

from serving.batches.files import Writing
from serving.config import BatchSpec
from serving.errors import StorageError
from serving.router.http.auth import KeyFile, new
from serving.secret import KEY_HEADER

pytestmark = pytest.mark.http

CHAT = "/v1/chat/completions"


def client(address: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)


def over(api: openai.OpenAI, name: str, timeout_s: float = PATIENCE_S) -> Any:
    """The batch once it is over."""
    deadline = time.monotonic() + timeout_s
    while True:
        batch = api.batches.retrieve(name)
        if batch.status in ("completed", "failed", "expired", "cancelled"):
            return batch
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)


def upload(api: openai.OpenAI, lines: list[str]) -> str:
    return api.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch").id


def results(api: openai.OpenAI, file: str | None) -> list[Any]:
    return [json.loads(text) for text in api.files.content(file).text.splitlines()] if file else []


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with batch_service(tmp_path) as router:
        yield router


def test_a_batch_has_one_result_a_line_and_malformed_lines_fail_alone(address: str) -> None:
    api = client(address)
    lines = [line(f"r{at}") for at in range(20)]
    lines[3] = "{"
    lines[5] = line("r4")  # twice
    lines[7] = line("other", model="no-such-model")
    lines[9] = line("other2", n=1000)
    lines[11] = line("other3", url="/v1/completions")
    name = upload(api, lines)
    file = api.files.retrieve(name)
    assert (file.purpose, file.filename, file.bytes) == ("batch", "in.jsonl", len("\n".join(lines)))
    assert api.files.content(name).text == "\n".join(lines)
    made = api.batches.create(
        input_file_id=name, endpoint=CHAT, completion_window="24h", metadata={"job": "one"}
    )
    assert (made.status, made.metadata) == ("validating", {"job": "one"})
    batch = over(api, made.id)
    assert batch.status == "completed", batch
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (20, 15, 5)
    answered = results(api, batch.output_file_id)
    of_lines = [row["response"]["body"]["usage"] for row in answered]
    assert batch.model == MODEL
    assert (batch.usage.input_tokens, batch.usage.output_tokens, batch.usage.total_tokens) == tuple(
        sum(usage[name] for usage in of_lines)
        for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    )
    assert batch.usage.output_tokens == 4 * len(answered)
    assert [row["custom_id"] for row in answered] == [
        f"r{at}" for at in range(20) if at not in (3, 5, 7, 9, 11)
    ]
    for row in answered:
        assert row["error"] is None
        assert row["response"]["status_code"] == 200
        assert row["response"]["body"]["choices"][0]["message"]["content"]
    refused = results(api, batch.error_file_id)
    assert [(row["error"] or {}).get("line") for row in refused] == [4, 6, 8, None, 12]
    assert [(row["error"] or {}).get("code") for row in refused] == [
        "invalid_json_line",
        "duplicate_custom_id",
        "model_not_found",
        None,
        "mismatched_url",
    ]
    assert refused[3]["response"]["status_code"] == 400
    assert [entry.id for entry in api.batches.list().data] == [made.id]
    assert {entry.purpose for entry in api.files.list().data} == {"batch", "batch_output"}


def test_a_batch_of_every_endpoint(address: str) -> None:
    api = client(address)
    for url, body in (
        ("/v1/completions", {"prompt": "hello", "messages": None}),
        ("/v1/embeddings", {"input": "hello", "messages": None, "max_tokens": None}),
        ("/v1/responses", {"input": "hello", "messages": None, "max_tokens": None}),
    ):
        fields = json.loads(line("one", url=url, **body))
        fields["body"] = {name: value for name, value in fields["body"].items() if value is not None}
        made = api.batches.create(
            input_file_id=upload(api, [json.dumps(fields)]), endpoint=url, completion_window="1h"
        )
        batch = over(api, made.id)
        assert batch.status == "completed"
        assert batch.request_counts.total == 1
        if url != "/v1/embeddings":
            assert batch.request_counts.completed == 1
        else:  # the simulated engine has none; what it says is in the file of errors
            assert results(api, batch.error_file_id)[0]["response"]["status_code"] in (400, 404, 501)


def test_files_can_be_listed_page_by_page_and_deleted(address: str) -> None:
    api = client(address)
    names = [upload(api, [line("a")]) for _ in range(5)]
    assert [entry.id for entry in api.files.list(limit=2, order="asc")] == names
    assert [entry.id for entry in api.files.list(limit=2)] == names[::-1]
    assert api.files.delete(names[0]).deleted
    with pytest.raises(openai.NotFoundError, match="No file of this id"):
        api.files.retrieve(names[0])
    assert [entry.id for entry in api.files.list(order="asc")] == names[1:]


def test_a_part_of_a_file_can_be_asked_for_and_its_size(address: str) -> None:
    """What a broken download goes on with."""
    api = client(address)
    text = line("a").encode()
    name = upload(api, [line("a")])
    with api.files.with_streaming_response.content(name, extra_headers={"Range": "bytes=10-"}) as answer:
        assert answer.status_code == 206
        assert b"".join(answer.iter_bytes(7)) == text[10:]
    url, last = f"{address}/v1/files/{name}/content", len(text) - 1
    for asked, part in (("bytes=0-0", text[:1]), ("bytes=-5", text[-5:]), (f"bytes=5-{2 * last}", text[5:])):
        answer = httpx.get(url, headers={"Range": asked})
        assert (answer.status_code, answer.content) == (206, part)
        start = text.index(part)
        assert answer.headers["content-range"] == f"bytes {start}-{start + len(part) - 1}/{len(text)}"
    answer = httpx.get(url, headers={"Range": f"bytes={len(text)}-"})
    assert (answer.status_code, answer.headers["content-range"]) == (416, f"bytes */{len(text)}")
    assert answer.json()["error"]["code"] == "range_not_satisfiable"
    for headers in ({"Range": "bytes=0-1,3-4"}, {"Range": "bytes=0-1", "If-Range": '"other"'}):
        answer = httpx.get(url, headers=headers)
        assert (answer.status_code, answer.content) == (200, text)
    answer = httpx.request("HEAD", url)
    assert (answer.status_code, answer.content) == (200, b"")
    assert (answer.headers["content-length"], answer.headers["accept-ranges"]) == (str(len(text)), "bytes")
    assert httpx.request("HEAD", f"{address}/v1/files/none/content").status_code == 404


def test_a_batch_that_is_cancelled_keeps_what_it_has(address: str) -> None:
    api = client(address)
    name = upload(api, [line(f"r{at}", max_tokens=1000) for at in range(3000)])
    made = api.batches.create(input_file_id=name, endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="cancel the batch first"):
        api.files.delete(name)
    assert api.batches.cancel(made.id).status == "cancelling"
    batch = over(api, made.id)
    assert batch.status == "cancelled"
    rows = results(api, batch.output_file_id) + results(api, batch.error_file_id)
    assert len(rows) == batch.request_counts.total
    assert api.files.delete(name).deleted
    with pytest.raises(openai.NotFoundError):
        api.batches.cancel("batch_none")


def test_a_store_and_a_router_that_go_and_come_back_lose_and_double_nothing(tmp_path: Path) -> None:
    """The router that ends tells nobody what it had, as one that is killed."""
    places: list[tuple[str, str]] = []
    lines = [line(f"r{at}", max_tokens=200) for at in range(300)]

    def place() -> tuple[str, str]:
        return places[-1]

    with serving() as (upstream, _), contextlib.ExitStack() as over_all:
        first = over_all.enter_context(filling_router(place, upstream, name="first"))[0]
        with owner(folder(tmp_path)) as keeper:
            places.append(keeper.place())
            api = client(first)
            made = api.batches.create(
                input_file_id=upload(api, lines), endpoint=CHAT, completion_window="24h"
            )
            until(lambda: done(api, made.id) > 20, "some results")
        with pytest.raises(openai.InternalServerError, match="can't be reached now"):
            api.batches.retrieve(made.id)
        with owner(folder(tmp_path)) as keeper:
            places.append(keeper.place())
            with filling_router(place, upstream, name="second", graceful=False) as (second, _):
                until(lambda: done(client(second), made.id) > 80, "some more results")
            batch = over(api, made.id)
            assert (batch.status, batch.request_counts.completed) == ("completed", 300)
            assert [row["custom_id"] for row in results(api, batch.output_file_id)] == [
                f"r{at}" for at in range(300)
            ]


def done(api: openai.OpenAI, name: str) -> int:
    try:
        counts = api.batches.retrieve(name).request_counts
    except openai.APIError:
        return 0
    return counts.completed if counts else 0


@pytest.mark.parametrize("may_scale", [False, True])
def test_what_scaling_hears_of_batches_is_what_the_yaml_says(tmp_path: Path, *, may_scale: bool) -> None:
    spec = BatchSpec(may_scale=may_scale)
    with (
        serving() as (upstream, _),
        owner(folder(tmp_path), spec) as keeper,
        filling_router(keeper.place, upstream, batch=spec) as (address, core),
    ):
        api = client(address)
        name = upload(api, [line(f"r{at}", max_tokens=1000) for at in range(60)])
        made = api.batches.create(input_file_id=name, endpoint=CHAT, completion_window="1h")

        def count(what: str) -> float:
            return float(getattr(core.demands()[0], what))

        until(lambda: count("expected" if may_scale else "filling") > 0, "the batch in the router's record")
        batch = over(api, made.id)
        assert batch.request_counts.completed == 60
        answers = [row["response"]["body"]["usage"] for row in results(api, batch.output_file_id)]
        written = sum(usage["completion_tokens"] for usage in answers)
        assert (count("filled"), count("filled_output_tokens")) == ((60, 0) if may_scale else (0, written))
        assert (count("arrived"), count("in_flight"), count("held")) == (0, 0, 0)
        if not may_scale:
            assert count("expected") == 0


def test_what_is_one_key_s_is_nobody_else_s(tmp_path: Path) -> None:
    made = [new(name) for name in ("first", "second")]
    ring = KeyFile(None, "\n".join(entry for _, entry in made))
    with (
        serving() as (upstream, _),
        owner(folder(tmp_path)) as keeper,
        filling_router(keeper.place, upstream, keys=ring) as (address, _),
    ):
        first, second = (client(address, key) for key, _ in made)
        name = upload(first, [line("a")])
        batch = over(
            first, first.batches.create(input_file_id=name, endpoint=CHAT, completion_window="24h").id
        )
        assert batch.request_counts.completed == 1
        for ask in (
            lambda: second.files.retrieve(name),
            lambda: second.files.content(name),
            lambda: second.files.delete(name),
            lambda: second.files.content(batch.output_file_id),
            lambda: second.batches.retrieve(batch.id),
            lambda: second.batches.cancel(batch.id),
            lambda: second.batches.create(input_file_id=name, endpoint=CHAT, completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                ask()
        owner_s = {KEY_HEADER: ring.ring.keys[0].sha256}
        with pytest.raises(openai.NotFoundError):
            second.files.retrieve(name, extra_headers=owner_s)
        port, token = keeper.place()
        assert httpx.get(f"{port}/v1/files", headers=owner_s).status_code == 401
        shown = {**owner_s, "authorization": f"Bearer {token}"}
        assert [entry["id"] for entry in httpx.get(f"{port}/v1/files", headers=shown).json()["data"]][
            -1
        ] == name
        assert second.files.list().data == []
        assert second.batches.list().data == []
        with pytest.raises(openai.AuthenticationError):
            client(address, "sk-other").files.list()


def test_limits_are_told_with_what_to_change(tmp_path: Path) -> None:
    limits = BatchSpec(max_file_bytes=2000, max_lines=3, max_open=1, max_key_bytes=4000)
    with (
        serving() as (upstream, _),
        owner(folder(tmp_path), limits) as keeper,
        filling_router(keeper.place, upstream) as (address, _),
    ):
        api = client(address)
        with pytest.raises(openai.APIStatusError, match=r"batch\.max_file_bytes") as refused:
            api.files.create(file=b"x" * 300_000, purpose="batch")
        assert refused.value.status_code == 413
        with pytest.raises(openai.BadRequestError, match="purpose has to be batch"):
            api.files.create(file=b"x", purpose="fine-tune")
        name = upload(api, [line(f"r{at}") for at in range(4)])
        for wrong, words in (
            ({"completion_window": "24 hours"}, "as 24h"),
            ({"completion_window": "99d"}, r"batch\.max_window_s"),
            ({"endpoint": "/v1/images"}, "endpoint has to be one of"),
            ({"metadata": {"a": 1}}, "metadata has to be"),
            ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "seconds has to be from"),
        ):
            fields: Any = {"input_file_id": name, "endpoint": CHAT, "completion_window": "24h", **wrong}
            with pytest.raises(openai.BadRequestError, match=words):
                api.batches.create(**fields)
        made = api.batches.create(input_file_id=name, endpoint=CHAT, completion_window="24h")
        batch = over(api, made.id)
        assert batch.status == "failed"
        assert batch.errors.data[0].code == "too_many_lines"
        empty = api.batches.create(input_file_id=upload(api, [""]), endpoint=CHAT, completion_window="24h")
        assert over(api, empty.id).errors.data[0].code == "empty_file"
        for _ in range(6):
            upload(api, [line(f"r{at}") for at in range(4)])
            if sum(entry.bytes for entry in api.files.list().data) >= 4000:
                break
        with pytest.raises(openai.APIStatusError, match=r"batch\.max_key_bytes"):
            upload(api, ["x"])


def test_without_a_place_for_them_files_are_refused() -> None:
    from support.fronts import front

    with front() as router:
        with pytest.raises(openai.APIStatusError, match="store") as refused:
            client(router.address).files.list()
        assert refused.value.status_code == 501
        assert client(router.address).models.list().data[0].id == MODEL


def test_an_upload_that_finds_no_room_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Writing.write

    def full(writing: Writing, data: bytes) -> None:
        write(writing, data[:10])
        raise StorageError("A file can't be written (No space left on device).")

    with (
        serving() as (upstream, _),
        owner(folder(tmp_path)) as keeper,
        filling_router(keeper.place, upstream) as (router, _),
    ):
        monkeypatch.setattr(Writing, "write", full)
        with pytest.raises(openai.InternalServerError, match="No space left"):
            upload(client(router), [line("a")])
        monkeypatch.undo()
        assert list((tmp_path / "store" / "files").iterdir()) == []
        assert results(client(router), upload(client(router), [line("a")]))[0]["custom_id"] == "a"


def test_an_upload_that_finds_no_room_on_its_way_is_told_so(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile.SpooledTemporaryFile, "write", full)
    with pytest.raises(openai.InternalServerError, match="No space left") as refused:
        upload(client(address), [line("a")])
    assert refused.value.status_code == 507
    monkeypatch.undo()
    assert upload(client(address), [line("a")])


def test_a_storage_that_is_away_is_asked_again_soon(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> None:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    monkeypatch.setattr(os, "fsync", away)
    with pytest.raises(openai.InternalServerError, match="Connection refused") as refused:
        upload(client(address), [line("a")])
    assert (refused.value.status_code, refused.value.response.headers["retry-after"]) == (503, "5")
    monkeypatch.undo()
    assert upload(client(address), [line("a")])


@pytest.mark.parametrize("reason", [errno.EROFS, errno.EACCES, errno.ENOENT])
def test_a_storage_that_refuses_is_not_asked_again(
    reason: int, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(openai.InternalServerError, match=os.strerror(reason)) as refused:
        upload(client(address), [line("a")])
    assert (refused.value.status_code, refused.value.code) == (500, "storage_refused")
    assert refused.value.response.headers["x-should-retry"] == "false"
    monkeypatch.undo()
    assert upload(client(address), [line("a")])


def test_content_that_is_gone_is_an_error_and_no_lost_connection(address: str, tmp_path: Path) -> None:
    name = upload(client(address), [line("a")])
    (tmp_path / "store" / "files" / name).unlink()
    with pytest.raises(openai.InternalServerError, match="can't be read") as gone:
        client(address).files.content(name)
    assert (gone.value.status_code, gone.value.response.headers["x-should-retry"]) == (500, "false")


def test_a_list_does_not_end_early_where_its_mark_was_deleted(address: str) -> None:
    api = client(address)
    names = [upload(api, [line("a")]) for _ in range(3)]
    page = api.files.list(limit=2)
    api.files.delete(names[1])
    with pytest.raises(openai.BadRequestError, match="list from the start"):
        page.get_next_page()
