"""One error tree. A message says what was asked, what there is, and what to change.

Errors cross process borders (Ray pickles them), so every class takes its message alone and rebuilds from it.
`status`, `code` and `param` are what an HTTP client sees; `kind` is OpenAI's `type` field. A docstring says when an error is
raised and, in a paragraph of its own, what to do about it: docs/reference/errors.md is written from them.
"""

import errno
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ClassVar

_NO_ROOM = frozenset((errno.ENOSPC, errno.EDQUOT, "SQLITE_FULL", "53100"))
# Of files and of SQLite, what stays until somebody mends it.
_REFUSALS = (PermissionError, FileNotFoundError, NotADirectoryError, IsADirectoryError)
_LASTING = frozenset(
    (errno.EROFS, "SQLITE_READONLY", "SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_PERM", "SQLITE_ERROR")
)


class ServingError(Exception):
    """Base of every error this project raises on purpose.

    Read the message; where a client gets one of these with status 500, the routers' log has its traceback
    and request id.
    """

    status: ClassVar[HTTPStatus] = HTTPStatus.INTERNAL_SERVER_ERROR
    code: ClassVar[str] = "internal_error"
    kind: ClassVar[str] = "server_error"
    param: ClassVar[str | None] = None

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def openai_body(self) -> dict[str, Any]:
        """The error as OpenAI clients parse it."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


class ConfigError(ServingError):
    """The YAML says something it may not say.

    Change the key that the message names, and ask `serving plan FILE` again.
    """

    status = HTTPStatus.BAD_REQUEST
    code = "invalid_config"
    kind = "invalid_request_error"


class TopologyError(ConfigError):
    """The slice asked for does not exist.

    Take one of the topologies or machines that the message lists.
    """

    code = "invalid_topology"


class PlanError(ConfigError):
    """The model does not go onto the slice as asked.

    Take one of the ways out that the message lists: a smaller format, a larger slice or fewer tokens.
    """

    code = "impossible_plan"


class ExtensionPointError(ServingError):
    """A library lacks the function this project builds on.

    Install the version that the message names; the lock has the versions that were tried together.
    """

    code = "unsupported_version"


class CompileError(ServingError):
    """The TPU's compiler can't be asked about a plan here.

    Do what the message says: install libtpu, or compile another layout. `serving plan FILE` needs neither.
    """

    code = "not_compilable_here"


class PlacementError(ServingError):
    """A replica's placement group is not one whole slice.

    See whether `controller_options` of the YAML has the callback `serving.slices.placement.install`, and
    whether the hosts carry TPU labels.
    """

    code = "not_one_slice"


class SliceLostError(ServingError):
    """A slice can no longer answer: a host, its engine or a worker is gone.

    Nothing, if it passes: the slice is replaced. Ask again; if it lasts, `serving status` says what is
    waited for.
    """

    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = "slice_lost"


class EngineStartError(ServingError):
    """The engine did not come up on its slice.

    Read the replica's log for the engine's own words; an engine option or the checkpoint is the usual
    cause.
    """

    code = "engine_start_failed"


class UnfitHostError(EngineStartError):
    """A host of a slice was found unfit before an engine was started there.

    Do what the message says on the host that it names: end what holds its chips, free disk or memory, mend its network.
    """

    code = "unfit_host"


class WrongTokensError(EngineStartError):
    """A slice that has just started answers a fixed prompt otherwise than two slices that serve.

    Look for a bad chip or a damaged copy of the weights on its hosts; the slice is in quarantine meanwhile.
    """

    code = "wrong_tokens"


class QuarantinedError(ServingError):
    """A slice is left out because engines failed there.

    Nothing: the replica goes to another slice. `serving slices release NAME` lets the slice be tried at once.
    """

    code = "slice_quarantined"


class ClusterError(ServingError):
    """No Ray cluster answers at an address.

    Give `--address HOST:PORT` of the head, or set RAY_ADDRESS.
    """

    code = "no_cluster"


class StorageError(ServingError):
    """The database or the storage of files can't be reached now.

    Try again shortly. Where this stays so, bring the server back or mend what the message names. What was stored stays.
    """

    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = "storage_failed"

    @classmethod
    def of(cls, message: str, cause: Exception) -> "StorageError":
        """StorageFullError where there is no room, StorageRefusedError where trying again is no use, as the cause says it."""
        cause = getattr(cause, "orig", None) or cause  # SQLAlchemy's
        says = (
            getattr(cause, "errno", None),
            getattr(cause, "sqlite_errorname", None),
            getattr(cause, "sqlstate", None),
        )
        if not _NO_ROOM.isdisjoint(says):
            return StorageFullError(message)
        refused = isinstance(cause, _REFUSALS) or not _LASTING.isdisjoint(says)
        return (StorageRefusedError if refused else StorageError)(message)


class StorageFullError(StorageError):
    """The database or the folder of files takes nothing more.

    Make room on the disk. What was stored stays, and batches go on when there is room.
    """

    status = HTTPStatus.INSUFFICIENT_STORAGE
    code = "storage_full"


class StorageRefusedError(StorageError):
    """The database or the storage of files refuses what is asked of it, or has lost what it had.

    Trying again is no use. Give the service's user its rights back, or what is gone; the log of the store's process has the reason.
    """

    status = HTTPStatus.INTERNAL_SERVER_ERROR
    code = "storage_refused"


class SimulationError(ServingError):
    """The simulated cluster can't do what was asked of it.

    Do what the message says; `serving sim status` shows what runs, `serving sim down` ends it.
    """

    code = "simulation_error"


class PoisonousRequestError(ServingError):
    """Two slices died while this request alone was suspected there; no slice is given it for ten minutes.

    Send another request. To find out what in this one ends an engine, send it to a slice of its own.
    """

    code = "request_ends_engines"


class PoisonousKindError(ServingError):
    """Several requests of this key ended slices: with the same parameters, and none was answered since, or three with any.

    Ask again after the time that the message names, or with other parameters.
    """

    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = "such_requests_end_engines"


class BadRequestError(ServingError):
    """The client's request can't be read.

    Change the field that the message names; asking the same again fails again.
    """

    status = HTTPStatus.BAD_REQUEST
    code = "invalid_request"
    kind = "invalid_request_error"


class SeedError(BadRequestError):
    """The client's request has a seed, and no TPU engine draws tokens by one.

    Leave `seed` out, or send temperature 0. An operator who sets `router: {seed: ignore}` has it left out for every client.
    """

    code = "unsupported_parameter"
    param = "seed"


class UnknownResponseError(ServingError):
    """The client asks for a response that is not stored, or is another key's.

    Ask within the store's age and with the key that made the response. Without `router.responses_store` nothing is stored.
    """

    status = HTTPStatus.NOT_FOUND
    code = "response_not_found"
    kind = "invalid_request_error"


class PreviousResponseError(BadRequestError):
    """The client goes on from a response that is not stored, or is another key's.

    Send the whole conversation in `input`, or have the operator set `router.responses_store`.
    """

    code = "previous_response_not_found"
    param = "previous_response_id"


class UnknownItemError(ServingError):
    """The client names an item of a conversation by its id, and no stored response of its key has that item.

    Send the item itself in `input` (AI SDK: `providerOptions.openai.store: false`), or have the operator set
    `router.responses_store`.
    """

    status = HTTPStatus.NOT_FOUND
    code = "item_not_found"
    kind = "invalid_request_error"
    param = "input"


class UnknownFileError(ServingError):
    """No file of this id is there for this key.

    Ask with the key that uploaded the file, and before the file expires. `GET /v1/files` lists a key's own.
    """

    status = HTTPStatus.NOT_FOUND
    code = "file_not_found"
    kind = "invalid_request_error"


class RangeError(ServingError):
    """A `Range` asks for bytes that a file does not have.

    Ask for its size first, with HEAD.
    """

    status = HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
    code = "range_not_satisfiable"
    kind = "invalid_request_error"


class UnknownBatchError(ServingError):
    """No batch of this id is there for this key.

    Ask with the key that made the batch. `GET /v1/batches` lists a key's own.
    """

    status = HTTPStatus.NOT_FOUND
    code = "batch_not_found"
    kind = "invalid_request_error"


class NoStoreError(ServingError):
    """The service has no store: no files, no batches, no usage.

    Have the operator set `store` in the YAML.
    """

    status = HTTPStatus.NOT_IMPLEMENTED
    code = "no_store"


class StoreAwayError(ServingError):
    """The process that keeps files, batches and usage can't be reached now.

    Try again shortly: Serve starts the process anew. Where this stays so, its log names the reason.
    """

    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = "store_away"


class IssuerAwayError(ServingError):
    """The keys of the issuer of tokens (`router.oidc`) are not known to this router yet.

    Try again shortly: it asks for them again and again. Where this stays so, the router's log names the reason.
    """

    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = "issuer_away"


class UnknownModelError(ServingError):
    """The client names a model that is not served here.

    Ask for a name that `GET /v1/models` lists.
    """

    status = HTTPStatus.NOT_FOUND
    code = "model_not_found"
    kind = "invalid_request_error"
    param = "model"


class UnknownSliceError(ServingError):
    """A command names a slice, or asks for a stopped roll, that there is not.

    Take one of the names in the message; `serving status` lists slices and rolls.
    """

    code = "unknown_slice"


class UnknownPathError(ServingError):
    """The client asks for a path that is not served here.

    See the HTTP API for the paths; a base URL ends in `/v1`.
    """

    status = HTTPStatus.NOT_FOUND
    code = "unknown_path"
    kind = "invalid_request_error"


class MethodError(ServingError):
    """The client uses a method that the path does not take.

    Use the method in the answer's `Allow` header.
    """

    status = HTTPStatus.METHOD_NOT_ALLOWED
    code = "method_not_allowed"
    kind = "invalid_request_error"


class NoSliceError(ServingError):
    """No slice of the model can take a request now.

    Ask again after `Retry-After`. If it lasts, `serving status` says which slice is missing and since
    when.
    """

    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = "no_slice_ready"


class NoRouterError(ServingError):
    """The front door stands, and nobody is behind it now.

    Ask again after `Retry-After`. If it lasts, `serve status` says why no router starts.
    """

    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = "no_router_ready"


class RouterLostError(ServingError):
    """The front door's router broke the connection off before it answered: it was ended, or lost.

    Whether the request was begun is not known. Ask again: other routers answer. If it lasts, the routers' logs say what
    ends them.
    """

    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = "router_lost"


class RouterSilentError(ServingError):
    """The front door's router answered nothing within `RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S`, which the operator set.

    Ask again. Without that variable the front door waits for as long as its client does.
    """

    status = HTTPStatus.GATEWAY_TIMEOUT
    code = "router_silent"


class UnauthorizedError(ServingError):
    """The client shows no API key, or none of this service's.

    Send `Authorization: Bearer KEY` with a key whose hash stands in `router.keys_file`.
    """

    status = HTTPStatus.UNAUTHORIZED
    code = "invalid_api_key"
    kind = "invalid_request_error"


class RateLimitError(ServingError):
    """The client's key has used what it may use for now.

    Wait for `Retry-After`; `x-ratelimit-*` headers say what is left. An operator raises limits in the
    file of keys.
    """

    status = HTTPStatus.TOO_MANY_REQUESTS
    code = "rate_limit_exceeded"
    kind = "rate_limit_error"


class BudgetError(RateLimitError):
    """The client's key has used its budget of the day or the month.

    Wait until the time in the message; `GET /v1/usage` says what was used. An operator raises `tokens_per_day` or
    `dollars_per_month` of the key.
    """

    code = "insufficient_quota"
    kind = "insufficient_quota"


class OverloadedError(ServingError):
    """Every slice of the model is busy and the queue in front of them too long.

    Ask again after `Retry-After`. If it lasts, raise `replicas.max`, or `queue` to let more wait.
    """

    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = "overloaded"


class GaveWayError(OverloadedError):
    """A request for free seats has given its seat to another request, before its answer began.

    Ask again. `x-free-seats-only` asks for no more than that; without it a request waits its turn.
    """

    code = "gave_way"


class TooLargeError(ServingError):
    """The client's request is larger than this service takes.

    Send less, or raise `router.max_body_bytes`.
    """

    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    code = "request_too_large"
    kind = "invalid_request_error"


class SlowBodyError(ServingError):
    """The client's request body did not come in time.

    Send the body faster, or raise `router.body_timeout_s`.
    """

    status = HTTPStatus.REQUEST_TIMEOUT
    code = "request_timeout"
    kind = "invalid_request_error"


class UnreadError(ServingError):
    """The client did not read its answer, and gave up its place.

    Read streams as they come, or ask for whole answers.
    """

    status = HTTPStatus.REQUEST_TIMEOUT
    code = "answer_not_read"
    kind = "invalid_request_error"


@dataclass(frozen=True)
class Refusal:
    """Why not now, and after how many seconds to ask again; None where asking again is no use."""

    error: ServingError
    retry_after_s: float | None
