"""`/v1/files`, `/v1/batches` and `/v1/usage`: a key's own, kept by the store's process."""

import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from serving.errors import NoStoreError
from serving.router.admission.controller import AdmissionController
from serving.router.http.envelope import path_of
from serving.router.http.kept_files import Download, KeptFiles
from serving.router.http.visits import asked_by


class FilesAndBatches:
    """Settles whose request it is, and passes it on."""

    def __init__(self, admission: AdmissionController, kept: KeptFiles | None) -> None:
        """`kept`: the way to the process that keeps them, where the YAML has a place for them."""
        self._admission = admission
        self._kept = kept

    def router(self) -> APIRouter:
        router = APIRouter()
        endpoints: tuple[tuple[str, Callable[..., Any], str], ...] = (
            ("/v1/files", self.upload_file, "POST"),
            ("/v1/files", self.files, "GET"),
            ("/v1/files/{name}", self.file, "GET"),
            ("/v1/files/{name}", self.delete_file, "DELETE"),
            ("/v1/files/{name}/content", self.file_content, "GET"),
            ("/v1/batches", self.create_batch, "POST"),
            ("/v1/batches", self.batches, "GET"),
            ("/v1/batches/{name}", self.batch, "GET"),
            ("/v1/batches/{name}/cancel", self.cancel_batch, "POST"),
            ("/v1/usage", self.usage, "GET"),
        )
        for path, endpoint, method in endpoints:
            router.add_api_route(path, endpoint, methods=[method], response_model=None)
        return router

    async def upload_file(self, request: Request) -> Response:
        """Keep a file of JSON lines for a batch (`store`)."""
        return await self._of_key(request)

    async def files(self, request: Request) -> Response:
        """The key's own files, the newest first."""
        return await self._of_key(request)

    async def file(self, request: Request, name: str) -> Response:  # noqa: ARG002  the path has it
        """One of them."""
        return await self._of_key(request)

    async def delete_file(self, request: Request, name: str) -> Response:  # noqa: ARG002
        """Forget a file, unless a batch still reads it."""
        return await self._of_key(request)

    async def file_content(self, request: Request, name: str) -> Response:  # noqa: ARG002
        """What a file has in it."""
        return await self._of_key(request)

    async def create_batch(self, request: Request) -> Response:
        """Have every line of a file answered when there are free seats."""
        return await self._of_key(request)

    async def batches(self, request: Request) -> Response:
        """The key's own batches, the newest first."""
        return await self._of_key(request)

    async def batch(self, request: Request, name: str) -> Response:  # noqa: ARG002
        """One of them: how far it is, and the files of its results."""
        return await self._of_key(request)

    async def cancel_batch(self, request: Request, name: str) -> Response:  # noqa: ARG002
        """End a batch; the results that there are stay."""
        return await self._of_key(request)

    async def usage(
        self,
        request: Request,
        start: str | None = None,  # noqa: ARG002  the store reads them
        end: str | None = None,  # noqa: ARG002
    ) -> Response:
        """What the key has used by day, model and pool, from the day `start` to `end`, and how far its budgets are."""
        async with asked_by(self._admission, request) as visit:
            if self._kept is None:
                raise NoStoreError("This service adds up no usage (store).")
            answer = await self._kept.ask(
                request, path_of(request.scope), visit.account.key.id, visit.owner, self._admission.bodies
            )
            if answer.status_code != HTTPStatus.OK:
                return answer
            budgets = self._admission.budgets(visit)
            return JSONResponse(json.loads(bytes(answer.body)) | {"budgets": budgets})

    async def _of_key(self, request: Request) -> Response:
        """Ask the process that keeps files and batches, for the key that asks here."""
        async with AsyncExitStack() as visiting:
            visit = await visiting.enter_async_context(asked_by(self._admission, request))
            if self._kept is None:
                raise NoStoreError("This service keeps no files and runs no batches (store).")
            key = visit.account.key.sha256
            response = await self._kept.ask(
                request, path_of(request.scope), key, visit.owner, self._admission.bodies
            )
            if isinstance(response, Download):  # its client is here until all is sent
                response.ending.push_async_callback(visiting.pop_all().aclose)
            return response
