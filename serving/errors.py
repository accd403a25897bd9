"""One error tree. A message says what was asked, what there is, and what to change.

Errors cross process borders (Ray pickles them), so every class takes its message alone and rebuilds from it.
`status`, `code` and `param` are what an HTTP client sees; `kind` is OpenAI's `type` field.
"""

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ClassVar


class ServingError(Exception):
    """Base of every error this project raises on purpose."""

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
    """The YAML says something it may not say."""

    status = HTTPStatus.BAD_REQUEST
    code = "invalid_config"
    kind = "invalid_request_error"


class TopologyError(ConfigError):
    """The slice asked for does not exist."""

    code = "invalid_topology"


class PlanError(ConfigError):
    """The model does not go onto the slice as asked."""

    code = "impossible_plan"


class ExtensionPointError(ServingError):
    """A library lacks the function this project builds on."""

    code = "unsupported_version"


class PlacementError(ServingError):
    """A replica's placement group is not one whole slice."""

    code = "not_one_slice"


class SliceLostError(ServingError):
    """A slice can no longer answer: a host, its engine or a worker is gone."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = "slice_lost"


class EngineStartError(ServingError):
    """The engine did not come up on its slice."""

    code = "engine_start_failed"


class ClusterError(ServingError):
    """No Ray cluster answers at an address."""

    code = "no_cluster"


class SimulationError(ServingError):
    """The simulated cluster can't do what was asked of it."""

    code = "simulation_error"


class BadRequestError(ServingError):
    """The client's request can't be read."""

    status = HTTPStatus.BAD_REQUEST
    code = "invalid_request"
    kind = "invalid_request_error"


class UnknownModelError(ServingError):
    """The client names a model that is not served here."""

    status = HTTPStatus.NOT_FOUND
    code = "model_not_found"
    kind = "invalid_request_error"
    param = "model"


class UnknownPathError(ServingError):
    """The client asks for a path that is not served here."""

    status = HTTPStatus.NOT_FOUND
    code = "unknown_path"
    kind = "invalid_request_error"


class MethodError(ServingError):
    """The client uses a method that the path does not take."""

    status = HTTPStatus.METHOD_NOT_ALLOWED
    code = "method_not_allowed"
    kind = "invalid_request_error"


class NoSliceError(ServingError):
    """No slice of the model can take a request now."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = "no_slice_ready"


class NoRouterError(ServingError):
    """The front door stands, and nobody is behind it now."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = "no_router_ready"


class UnauthorizedError(ServingError):
    """The client shows no API key, or none of this service's."""

    status = HTTPStatus.UNAUTHORIZED
    code = "invalid_api_key"
    kind = "invalid_request_error"


class RateLimitError(ServingError):
    """The client's key has used what it may use for now."""

    status = HTTPStatus.TOO_MANY_REQUESTS
    code = "rate_limit_exceeded"
    kind = "rate_limit_error"


class OverloadedError(ServingError):
    """Every slice of the model is busy and the queue in front of them too long."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = "overloaded"


class TooLargeError(ServingError):
    """The client's request is larger than this service takes."""

    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    code = "request_too_large"
    kind = "invalid_request_error"


class SlowBodyError(ServingError):
    """The client's request body did not come in time."""

    status = HTTPStatus.REQUEST_TIMEOUT
    code = "request_timeout"
    kind = "invalid_request_error"


@dataclass(frozen=True)
class Refusal:
    """Why not now, and after how many seconds to ask again; None where asking again is no use."""

    error: ServingError
    retry_after_s: float | None
