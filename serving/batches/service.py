"""OpenAI's Files and Batch API, as routers ask it for their clients, and the lines that routers take and bring back.

A router has settled whose request it is: the header `x-serving-key` has the hash of the key.
"""

import asyncio
import json
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from sqlalchemy import Row
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException
from starlette.types import Message, Receive

from serving import bounded_json, secret
from serving.asgi import check_form
from serving.batches import lines, ranges
from serving.batches.desk import Desk
from serving.batches.files import PIECE_BYTES, Folder
from serving.batches.ledger import Ledger
from serving.batches.lifecycle import Event, State
from serving.batches.storage_calls import StorageCalls
from serving.config import BatchSpec, StoreSpec
from serving.database.database import Database
from serving.errors import (
    BadRequestError,
    RangeError,
    RateLimitError,
    StorageError,
    TooLargeError,
    UnknownBatchError,
    UnknownFileError,
)
from serving.paging import limit_of, newest_first

logger = logging.getLogger("ray.serve")

_FORM_BYTES = 64 << 10  # of a form beside its file
_LEAST_EXPIRY_S = 3600
_MOST_METADATA = 16
_MOST_FILES = 10_000  # that one key has uploaded
_UNITS = {"m": 60, "h": 3600, "d": 86400}


class Batches:
    """The part of the database's owner that keeps files and batches."""

    def __init__(
        self,
        database: Database,
        store: StoreSpec,
        spec: BatchSpec,
        models: Collection[str],
        most_line_bytes: int,
        calendar: Callable[[], float] = time.time,
        owner: str = "",
    ) -> None:
        """`owner` names the service among those that share the database: its next process goes on at once. Raises ConfigError."""
        self._spec = spec
        self._calendar = calendar
        self.ledger = Ledger(database, owner or uuid.uuid4().hex)
        self._folder = Folder(store.files_at)
        self._calls = StorageCalls()
        self.desk = Desk(
            self.ledger, self._folder, spec, models, most_line_bytes, calls=self._calls, calendar=calendar
        )

    def routes(self) -> APIRouter:
        routes = APIRouter()
        for path, handler, method in (
            ("/v1/files", self.upload, "POST"),
            ("/v1/files", self.list_files, "GET"),
            ("/v1/files/{name}", self.file, "GET"),
            ("/v1/files/{name}", self.delete_file, "DELETE"),
            ("/v1/files/{name}/content", self.content, "GET"),
            ("/v1/files/{name}/content", self.content, "HEAD"),
            ("/v1/batches", self.create, "POST"),
            ("/v1/batches", self.list_batches, "GET"),
            ("/v1/batches/{name}", self.batch, "GET"),
            ("/v1/batches/{name}/cancel", self.cancel, "POST"),
            ("/lines/take", self.take, "POST"),
            ("/lines/commit", self.commit, "POST"),
        ):
            routes.add_api_route(path, handler, methods=[method], response_model=None)
        return routes

    async def start(self) -> None:
        await self.desk.tick()
        self._running = asyncio.create_task(self.desk.run())

    async def close(self) -> None:
        self._running.cancel()
        await self.desk.close()

    async def upload(self, request: Request) -> Response:
        key = _key(request)
        full = TooLargeError(
            f"This key's files have {self._spec.max_key_bytes} bytes already (batch.max_key_bytes), or are {_MOST_FILES}; "
            "delete some."
        )
        if await self.ledger.bytes_of(key) >= self._spec.max_key_bytes:
            raise full
        too_large = TooLargeError(
            f"The file is larger than {self._spec.max_file_bytes} bytes, the most this service takes (batch.max_file_bytes)."
        )
        check_form(request.headers.get("content-type", ""))
        limited = Request(
            request.scope, _limited(request.receive, self._spec.max_file_bytes + _FORM_BYTES, too_large)
        )
        form = await _form(limited)
        try:
            file, purpose = form.get("file"), form.get("purpose")
            if not isinstance(file, UploadFile):
                raise BadRequestError("file: the form has none; send a file of JSON lines.")
            if purpose != "batch":
                raise BadRequestError("purpose has to be batch: this service keeps files for batches alone.")
            if (file.size or 0) > self._spec.max_file_bytes:
                raise too_large
            now_s = self._calendar()  # a slow client's file is as old as its end
            expires_s = now_s + self._expiry(
                form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
            )
            fields: dict[str, Any] = {
                "id": f"file-{uuid.uuid4().hex}",
                "key": key,
                "filename": (file.filename or "file")[:512]
                .replace("\0", "")
                .encode("utf-8", "replace")
                .decode(),
                "purpose": "batch",
                "bytes": file.size or 0,
                "created_s": now_s,
                "expires_s": expires_s,
            }
            # Others of the key may have come meanwhile.
            if not await self.ledger.add_upload(fields, self._spec.max_key_bytes, _MOST_FILES):
                raise full
            try:
                size = await self._copy(file, fields["id"])
            except BaseException:
                await self.desk.content.clear([fields["id"]])
                raise
        finally:
            await form.close()
        await self.ledger.store_file(fields["id"], size)
        return JSONResponse(_file(await self._file_of(key, fields["id"])))

    async def list_files(self, request: Request) -> Response:
        query = _query(request)
        limit, newest = limit_of(query.get("limit"), 10_000, 10_000), newest_first(query.get("order"))
        rows = await self.ledger.files(
            _key(request),
            self._calendar(),
            purpose=query.get("purpose"),
            after_id=query.get("after"),
            limit=limit,
            newest=newest,
        )
        return _page([_file(row) for row in rows], limit)

    async def file(self, request: Request, name: str) -> Response:
        return JSONResponse(_file(await self._file_of(_key(request), name)))

    async def delete_file(self, request: Request, name: str) -> Response:
        await self._file_of(_key(request), name)
        if not await self.ledger.delete_file(name):
            raise BadRequestError("A batch that is not over reads this file; cancel the batch first.")
        try:
            await self._calls.call(name, self._folder.delete, name)
            await self.ledger.forget_file(name)
        except StorageError as error:  # nobody can read it any more
            logger.warning("a file that was deleted is swept later: %s", error.message)
        return JSONResponse({"id": name, "object": "file", "deleted": True})

    async def content(self, request: Request, name: str) -> Response:
        row = await self._file_of(_key(request), name)
        status, size = HTTPStatus.OK, row.bytes
        headers = {"accept-ranges": "bytes", "content-type": "application/octet-stream"}
        try:
            # No answer has a validator, so none is what If-Range names.
            asked = None if "if-range" in request.headers else request.headers.get("range")
            if part := ranges.part(asked, size):
                status = HTTPStatus.PARTIAL_CONTENT
                headers["content-range"] = f"bytes {part.start}-{part.stop - 1}/{size}"
        except RangeError as error:
            headers = {"content-range": f"bytes */{size}"}
            return JSONResponse(error.openai_body(), status_code=error.status, headers=headers)
        part = part or range(size)
        headers["content-length"] = str(len(part))
        if request.method == "HEAD":
            return Response(status_code=status, headers=headers)
        pieces = await self._calls.call(name, self._folder.pieces, name, part)
        return StreamingResponse(self._one_by_one(name, pieces), status_code=status, headers=headers)

    async def create(self, request: Request) -> Response:
        key, now_s = _key(request), self._calendar()
        fields = await _fields(request)
        endpoint = fields.get("endpoint")
        if endpoint not in lines.ENDPOINTS:
            raise BadRequestError(f"endpoint has to be one of {', '.join(lines.ENDPOINTS)}.")
        if not isinstance(fields.get("input_file_id"), str):
            raise BadRequestError("input_file_id has to be the id of a file; upload one at /v1/files.")
        file = await self._file_of(key, fields["input_file_id"])
        if file.purpose != "batch":
            raise BadRequestError("input_file_id: the file's purpose is not batch.")
        window = fields.get("completion_window")
        name = f"batch_{uuid.uuid4().hex}"
        taken = await self.ledger.add_batch(
            {
                "id": name,
                "key": key,
                "endpoint": endpoint,
                "input_file_id": file.id,
                "completion_window": window,
                "metadata": _metadata(fields.get("metadata")),
                "created_s": now_s,
                "expires_s": now_s + self._window_s(window),
                "output_expires_after_s": self._output_expiry(fields.get("output_expires_after")),
            },
            self._spec.max_open,
        )
        if taken is None:
            raise UnknownFileError("The input file was deleted meanwhile.")
        if not taken:
            raise RateLimitError(
                f"This key has {self._spec.max_open} batches that are not over (batch.max_open); wait for one, or cancel one."
            )
        return JSONResponse(_batch(await self._batch_of(key, name)))

    async def list_batches(self, request: Request) -> Response:
        query = _query(request)
        limit = limit_of(query.get("limit"), 20, 100)
        rows = await self.ledger.batches(_key(request), after_id=query.get("after"), limit=limit)
        return _page([_batch(row) for row in rows], limit)

    async def batch(self, request: Request, name: str) -> Response:
        return JSONResponse(_batch(await self._batch_of(_key(request), name)))

    async def cancel(self, request: Request, name: str) -> Response:
        key = _key(request)
        row = await self._batch_of(key, name)
        row = await self.ledger.happen(name, Event.CANCEL, self._calendar(), key=key) or row
        if row.state not in (State.CANCELLING, State.CANCELLED):
            raise BadRequestError(
                f"The batch is {State(row.state).shown}; only one that is validating or in progress can be cancelled."
            )
        return JSONResponse(_batch(row))

    async def take(self, request: Request) -> Response:
        asked = await _json(request)
        holding = [(batch, line) for batch, line in asked["holding"]]
        taken = await self.desk.take(asked["router"], asked["wants"], holding)
        return Response(await asyncio.to_thread(json.dumps, taken), media_type="application/json")

    async def commit(self, request: Request) -> Response:
        await self.desk.commit((await _json(request))["results"])
        return JSONResponse({})

    async def _copy(self, file: UploadFile, name: str) -> int:
        writing = await self._calls.call(name, self._folder.write, name)
        try:
            while piece := await asyncio.to_thread(file.file.read, PIECE_BYTES):
                await self._calls.call(name, writing.write, piece)
            await self._calls.call(name, writing.close)
        except BaseException:
            await self.desk.content.discard(name, writing)
            raise
        return writing.bytes

    async def _one_by_one(self, name: str, pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
        while piece := await self._calls.call(name, next, pieces, b""):
            yield piece

    async def _file_of(self, key: str, name: str) -> Row[Any]:
        row = await self.ledger.file(key, _text(name), self._calendar())
        if row is None:
            raise UnknownFileError("No file of this id is there, or it is another key's.")
        return row

    async def _batch_of(self, key: str, name: str) -> Row[Any]:
        row = await self.ledger.batch(key, _text(name))
        if row is None:
            raise UnknownBatchError("No batch of this id is there, or it is another key's.")
        return row

    def _expiry(self, anchor: Any, seconds: Any) -> float:
        if anchor is None and seconds is None:
            return self._spec.max_age_s
        if anchor != "created_at":
            raise BadRequestError("expires_after: anchor has to be created_at.")
        if isinstance(seconds, bool) or not re.fullmatch(r"[0-9]{1,9}", str(seconds)):
            raise BadRequestError("expires_after: seconds has to be a whole number.")
        if not _LEAST_EXPIRY_S <= int(seconds) <= self._spec.max_age_s:
            raise BadRequestError(
                f"expires_after: seconds has to be from {_LEAST_EXPIRY_S} to {self._spec.max_age_s:.0f} (batch.max_age_s)."
            )
        return int(seconds)

    def _output_expiry(self, asked: Any) -> int | None:
        if asked is None:
            return None
        if not isinstance(asked, dict):
            raise BadRequestError("output_expires_after has to be an object with anchor and seconds.")
        return int(self._expiry(asked.get("anchor", ""), asked.get("seconds", "")))

    def _window_s(self, window: Any) -> int:
        match = re.fullmatch(r"([0-9]{1,6})([mhd])", window) if isinstance(window, str) else None
        seconds = int(match[1]) * _UNITS[match[2]] if match else 0
        if not 0 < seconds <= self._spec.max_window_s:
            raise BadRequestError(
                f"completion_window has to be a time as 24h, at most {self._spec.max_window_s / 3600:g}h (batch.max_window_s)."
            )
        return seconds


def _key(request: Request) -> str:
    return request.headers[secret.KEY_HEADER]


async def _form(request: Request) -> FormData:
    """Raises BadRequestError, StorageError and what `receive` raises."""
    try:
        return await request.form(max_files=1, max_fields=16, max_part_size=_FORM_BYTES)
    except (MultiPartException, KeyError) as error:
        raise BadRequestError(f"The request body is no form with a file: {error}") from None
    except OSError as error:  # until it is whole, a file is among the temporary ones
        raise StorageError.of(f"The file finds no room on its way ({error.strerror}).", error) from None
    except Exception as error:
        if isinstance(error.__cause__ or error.__context__, MultiPartException):
            raise BadRequestError("The request body is no form with a file.") from None
        raise


def _query(request: Request) -> dict[str, str]:
    return {name: _text(value) for name, value in request.query_params.items()}


def _text(asked: str) -> str:
    """Without zero bytes, which no text of PostgreSQL has, and no id."""
    return asked.replace("\0", "\ufffd")


async def _fields(request: Request) -> dict[str, Any]:
    """What a client asks; raises TooLargeError and BadRequestError."""
    too_large = TooLargeError(
        f"The request body is larger than {_FORM_BYTES} bytes, the most of a batch's fields."
    )
    return bounded_json.read(
        await Request(request.scope, _limited(request.receive, _FORM_BYTES, too_large)).body()
    )


async def _json(request: Request) -> dict[str, Any]:
    """What a router asks."""
    try:
        fields = await request.json()
    except (ValueError, RecursionError):
        raise BadRequestError("The request body is not JSON.") from None
    if not isinstance(fields, dict):
        raise BadRequestError("The request body has to be an object.")
    return fields


def _limited(receive: Receive, most_bytes: int, too_large: TooLargeError) -> Receive:
    """Raises TooLargeError once more than so many bytes have come."""
    taken = 0

    async def limited() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > most_bytes:
            raise too_large
        return message

    return limited


def _metadata(given: Any) -> dict[str, str] | None:
    if given is None:
        return None
    if (
        not isinstance(given, dict)
        or len(given) > _MOST_METADATA
        or not all(
            isinstance(value, str) and len(value) <= 512 and len(name) <= 64 for name, value in given.items()
        )
    ):
        raise BadRequestError(
            f"metadata has to be an object of at most {_MOST_METADATA} texts, each of at most 512 characters under a name of 64."
        )
    return given


def _page(entries: list[dict[str, Any]], limit: int) -> Response:
    shown = entries[:limit]
    return JSONResponse(
        {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(entries) > limit,
        }
    )


def _file(row: Row[Any]) -> dict[str, Any]:
    return {
        "id": row.id,
        "object": "file",
        "bytes": row.bytes,
        "created_at": int(row.created_s),
        "expires_at": None if row.expires_s is None else int(row.expires_s),
        "filename": row.filename,
        "purpose": row.purpose,
        "status": "processed",
    }


def _batch(row: Row[Any]) -> dict[str, Any]:
    def since(*states: State) -> int | None:
        times = [row.times[state.value] for state in states if state.value in row.times]
        return int(times[0]) if times else None

    return {
        "id": row.id,
        "object": "batch",
        "endpoint": row.endpoint,
        "errors": row.errors,
        "input_file_id": row.input_file_id,
        "completion_window": row.completion_window,
        "model": row.model,
        "status": State(row.state).shown,
        "output_file_id": row.output_file_id,
        "error_file_id": row.error_file_id,
        "created_at": int(row.created_s),
        "in_progress_at": since(State.IN_PROGRESS),
        "expires_at": int(row.expires_s),
        "finalizing_at": since(State.FINALIZING, State.EXPIRING),
        "completed_at": since(State.COMPLETED),
        "failed_at": since(State.FAILED),
        "expired_at": since(State.EXPIRED),
        "cancelling_at": since(State.CANCELLING),
        "cancelled_at": since(State.CANCELLED),
        "request_counts": {"total": row.total, "completed": row.completed, "failed": row.failed},
        "usage": None if row.usage is None else _usage(Counter(row.usage)),
        "metadata": row.metadata,
    }


def _usage(tokens: Mapping[str, int]) -> dict[str, Any]:
    """The tokens of a batch's answers, in OpenAI's shape."""
    read, written = tokens["input_tokens"], tokens["output_tokens"]
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": tokens["cached_tokens"]},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": tokens["reasoning_tokens"]},
        "total_tokens": read + written,
    }
