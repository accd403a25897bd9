"""What `/v1/responses` remembers, where the YAML names a store (`router.responses_store`): stored responses, and what follows on one."""

import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from serving.errors import (
    BadRequestError,
    PreviousResponseError,
    StorageError,
    TooLargeError,
    UnknownItemError,
    UnknownResponseError,
)
from serving.router.admission.controller import AdmissionController
from serving.router.admission.seat import Answer
from serving.router.admission.visit import Visit
from serving.router.forwarding.seat import Seat
from serving.router.http import responses
from serving.router.http.downstream import Downstream
from serving.router.http.keeper import Keeper
from serving.router.http.parsing import Parsing
from serving.router.http.response_store import ResponseStore
from serving.router.http.responses import Keeping, Kept
from serving.router.http.visits import asked_by

logger = logging.getLogger("ray.serve")


class Conversations:
    """The conversations of every key, each its own."""

    def __init__(self, admission: AdmissionController, parsing: Parsing, store: ResponseStore | None) -> None:
        self._admission = admission
        self._parsing = parsing
        self._responses = store

    def router(self) -> APIRouter:
        router = APIRouter()
        router.add_api_route("/v1/responses/{name}", self.response, methods=["GET"])
        router.add_api_route("/v1/responses/{name}", self.delete_response, methods=["DELETE"])
        router.add_api_route("/v1/responses/{name}/input_items", self.input_items, methods=["GET"])
        router.add_api_route("/v1/responses/{name}/cancel", self.cancel_response, methods=["POST"])
        return router

    async def response(self, request: Request, name: str) -> Response:
        """A response that is stored, for the key that asked for it (`router.responses_store`)."""
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            raise BadRequestError("stream: a stored response is given whole; leave it out.")
        return await self._of_stored(request, name, lambda kept: kept.response)

    async def delete_response(self, request: Request, name: str) -> JSONResponse:
        """Forget a stored response."""
        async with asked_by(self._admission, request) as visit:
            if not (self._responses and await self._responses.delete(visit.account.key.sha256, name)):
                raise self._unknown_response()
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def input_items(self, request: Request, name: str) -> Response:
        """The items that a stored response answers, those of earlier responses among them."""
        return await self._of_stored(
            request, name, lambda kept: responses.listed(kept.items, request.query_params)
        )

    async def cancel_response(self, request: Request, name: str) -> JSONResponse:
        """Always an error: only responses in the background can be cancelled, and none runs there."""
        await self._of_stored(request, name, lambda kept: kept.response)
        raise BadRequestError(
            "Only a response in the background can be cancelled, and this service runs none there."
        )

    async def with_items(
        self, visit: Visit, fields: dict[str, Any], body: bytes
    ) -> tuple[dict[str, Any], bytes]:
        """A request for /v1/responses with the items that it only names; raises UnknownItemError, and as `following`."""
        if not (named := responses.references(fields)):
            return fields, body
        if self._responses is None:
            raise UnknownItemError(
                "input has an item_reference, and this service stores no responses (router.responses_store); send the item itself."
            )
        key, most_bytes = visit.account.key.sha256, self._admission.spec.max_body_bytes
        if (size_bytes := await self._responses.holders_bytes(key, named)) > 2 * most_bytes:
            raise self._conversation_too_large(size_bytes)
        await self._admission.bodies.add(visit, size_bytes)
        put_in = partial(responses.with_items, fields, await self._responses.holders(key, named))
        fields, body = await self._parsing.run(put_in, len(body) + size_bytes, visit.owner)
        if len(body) > most_bytes:
            raise self._conversation_too_large(len(body))
        return fields, body

    async def following(
        self, visit: Visit, fields: Mapping[str, Any], body: bytes
    ) -> tuple[bytes, Keeping | None]:
        """The body of /v1/responses with the conversation before it, and what to keep its answer with.

        Raises PreviousResponseError, and for a conversation as for a body of its size.
        """
        before = responses.previous_id(fields)
        most_bytes = self._admission.spec.max_body_bytes
        if before:
            # What a response says of its request, tools and all, is stored with it and not sent again.
            previous = await self._kept_response(visit, before, 2 * most_bytes)
            if previous is None:
                raise PreviousResponseError(
                    "The response of previous_response_id is not stored here (none of more than 1 MiB is), or it is another key's; send the whole "
                    "conversation in input."
                    if self._responses
                    else "This service stores no responses (router.responses_store); send the whole conversation in input."
                )
            join = partial(responses.following, fields, previous)
            body, items = await self._parsing.run(join, len(body) + previous.size_bytes, visit.owner)
            if len(body) > most_bytes:
                raise self._conversation_too_large(len(body))
        elif self._responses:
            items = await self._parsing.run(partial(responses.items, fields), len(body), visit.owner)
        if self._responses is None or fields.get("store") is False:
            return body, None
        return body, Keeping(visit.account.key.sha256, items, before)

    async def keep(self, answer: Answer, keeping: Keeping, client: Downstream, seat: Seat) -> None:
        """Answer a request, and keep the response before its client has its end."""
        assert self._responses is not None  # noqa: S101  what is kept has a store
        keeper = Keeper(client, keeping.previous_id)
        await answer(keeper, seat)
        if keeper.response:
            try:
                await self._responses.put(keeping, keeper.response)
            except StorageError as error:
                logger.warning("a response is not kept: %s", error.message)
            except Exception:  # whatever the file or the answer is like: the client has its answer
                logger.exception("router.responses_store: a response is not kept")
        keeper.finish()

    async def _of_stored(self, request: Request, name: str, look: Callable[[Kept], bytes]) -> Response:
        """What `look` finds in a stored response, as JSON."""
        async with asked_by(self._admission, request) as visit:
            if kept := await self._kept_response(visit, name, math.inf):
                body = await self._parsing.run(partial(look, kept), kept.size_bytes, visit.owner)
                return Response(body, media_type="application/json")
        raise self._unknown_response()

    async def _kept_response(self, visit: Visit, name: str, most_bytes: float) -> Kept | None:
        """A stored response, held as a body of the key's is; raises TooLargeError and OverloadedError."""
        sha256 = visit.account.key.sha256
        if self._responses is None or (size_bytes := await self._responses.size_bytes(sha256, name)) is None:
            return None
        if size_bytes > most_bytes:
            raise self._conversation_too_large(size_bytes)
        await self._admission.bodies.add(visit, size_bytes)
        return await self._responses.get(sha256, name)

    def _unknown_response(self) -> UnknownResponseError:
        if self._responses:
            return UnknownResponseError(
                "No response of this id is stored here (none of more than 1 MiB is), or it is another key's."
            )
        return UnknownResponseError("This service stores no responses (router.responses_store).")

    def _conversation_too_large(self, size_bytes: int) -> TooLargeError:
        return TooLargeError(
            f"The conversation that the request goes on from has {size_bytes} bytes with it, and this service takes "
            f"{self._admission.spec.max_body_bytes} (router.max_body_bytes); begin a new one."
        )
