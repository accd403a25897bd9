import pickle
from http import HTTPStatus

import pytest

from serving import errors
from serving.errors import BudgetError, ServingError

pytestmark = pytest.mark.unit

TREE = [
    value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, ServingError)
]


@pytest.mark.parametrize("kind", TREE)
def test_an_error_crosses_processes_whole(kind: type[ServingError]) -> None:
    error = kind("what was asked, what there is, what to change")
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301  our own bytes
    assert type(copy) is kind
    assert (copy.message, str(copy), copy.status, copy.code) == (
        error.message,
        error.message,
        error.status,
        error.code,
    )


@pytest.mark.parametrize("kind", TREE)
def test_an_error_is_said_in_the_shape_that_openai_clients_parse(kind: type[ServingError]) -> None:
    error = kind("why").openai_body()["error"]
    assert error == {"message": "why", "type": kind.kind, "param": kind.param, "code": kind.code}
    by_status = {HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error"}
    usual = "invalid_request_error" if kind.status < 500 else "server_error"
    of_openai = {BudgetError: "insufficient_quota"}
    assert kind.kind == of_openai.get(kind, by_status.get(kind.status, usual))


def test_codes_tell_errors_apart() -> None:
    assert len({kind.code for kind in TREE}) == len(TREE)


def test_only_what_may_pass_by_itself_is_a_503() -> None:
    """Clients and load balancers try a 503 again."""
    again = {kind for kind in TREE if kind.status is HTTPStatus.SERVICE_UNAVAILABLE}
    assert again == {
        errors.NoSliceError,
        errors.NoRouterError,
        errors.RouterLostError,
        errors.IssuerAwayError,
        errors.SliceLostError,
        errors.OverloadedError,
        errors.GaveWayError,
        errors.StoreAwayError,
        errors.StorageError,
        errors.PoisonousKindError,
    }
