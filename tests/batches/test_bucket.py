"""Files in a bucket: what fsspec's file systems of clouds can do is enough, and what they can't for a while loses nothing."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.batches import filling_router, line, owner
from support.bucket import URL, Bucket
from support.servers import until
from support.simulated_engine import serving

from serving.batches import desk
from serving.batches.files import Folder
from serving.config import StoreSpec
from serving.errors import StorageError

if TYPE_CHECKING:
    import openai


@pytest.fixture(autouse=True)
def bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bucket, "objects", {})
    monkeypatch.setattr(Bucket, "trouble", lambda _: None)


@pytest.fixture(params=["bucket", "local"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    return Folder(URL if request.param == "bucket" else str(tmp_path))


@pytest.mark.unit
def test_content_is_read_by_lines_of_a_bounded_length_by_place_and_in_parts(folder: Folder) -> None:
    text = b"one\ntwo\n" * 1000
    writing = folder.write("a")
    writing.write(text[:100])
    writing.write(text[100:])
    writing.close()
    assert writing.bytes == len(text)
    with folder.read("a", 4) as file:
        assert (file.readline(100), file.readline(2), file.readline(100)) == (b"two\n", b"on", b"e\n")
        file.seek(4)
        assert file.read(3) == b"two"
    assert b"".join(folder.pieces("a", range(2, 7000))) == text[2:7000]
    folder.delete("a")
    folder.delete("a")
    with pytest.raises(StorageError) as gone:
        folder.read("a")
    assert isinstance(gone.value.__cause__, FileNotFoundError)


@pytest.mark.unit
@pytest.mark.parametrize("status", [401, 403, 503])
def test_clients_read_that_a_bucket_refuses_and_not_what_it_says(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class HttpError(Exception):
        code = status

    words = (
        "https://storage.example/b/private: sa@private.example does not have storage.objects.create access"
    )
    for trouble in (HttpError(words), OSError(f"Forbidden: {words}")):

        def refuse(_: str, trouble: Exception = trouble) -> None:
            raise trouble

        monkeypatch.setattr(Bucket, "trouble", refuse)
        writing = Folder(URL).write("a")
        with pytest.raises(StorageError) as refused:
            writing.close()
        assert "private" not in refused.value.message
        lasts = status != 503 or isinstance(trouble, OSError)
        assert refused.value.status == (500 if lasts else 503)
        writing.discard()


@pytest.fixture
def api(tmp_path: Path) -> "Iterator[openai.OpenAI]":
    import openai

    store = StoreSpec(folder=str(tmp_path), files=URL)
    with (
        serving() as (upstream, _),
        owner(store) as keeper,
        filling_router(keeper.place, upstream) as (address, _),
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=20) as client,
    ):
        yield client


def custom_ids(api: "openai.OpenAI", lines: int) -> list[str]:
    """What a batch of so many lines has in its output."""
    text = "\n".join(line(f"r{at}") for at in range(lines)).encode()
    file = api.files.create(file=text, purpose="batch")
    made = api.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="1h")
    until(lambda: api.batches.retrieve(made.id).status in ("completed", "failed"), "the batch is over")
    over = api.batches.retrieve(made.id)
    assert over.output_file_id, over
    rows = api.files.content(over.output_file_id).text.splitlines()
    return [json.loads(row)["custom_id"] for row in rows]


@pytest.mark.http
def test_a_batch_in_a_bucket_is_answered(api: "openai.OpenAI") -> None:
    """Each failed as no lines of JSON."""
    assert custom_ids(api, 20) == [f"r{at}" for at in range(20)]


@pytest.mark.http
def test_a_bucket_that_fails_for_a_while_loses_no_line_and_holds_up_no_loop(
    api: "openai.OpenAI", monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch failed where one piece of its input could not be read; half a file was given up in the store's event loop."""
    monkeypatch.setattr(desk, "_UNREAD_S", 0.1)
    calls, in_loop = Counter[str](upload=-1), []  # the input's comes through

    def fail(call: str) -> None:
        calls[call] += 1
        with contextlib.suppress(RuntimeError):
            in_loop.append((call, asyncio.get_running_loop()))
        if call == "delete" or 0 < calls[call] < 4:
            raise TimeoutError("the bucket does not answer")

    monkeypatch.setattr(Bucket, "trouble", fail)
    assert custom_ids(api, 20) == [f"r{at}" for at in range(20)]
    assert min(calls["upload"], calls["download"], calls["info"]) > 4
    assert not in_loop
