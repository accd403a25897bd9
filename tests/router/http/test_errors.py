"""Whether OpenAI's client asks again after an error, by its own rules; Anthropic's has the same."""

import httpx
import openai
import pytest
from starlette.responses import JSONResponse

from serving.errors import (
    BudgetError,
    IssuerAwayError,
    NoSliceError,
    NoStoreError,
    PoisonousRequestError,
    Refusal,
    ServingError,
    StorageError,
    StorageFullError,
    StorageRefusedError,
    StoreAwayError,
)
from serving.router.http.errors import error_response, refusal_response

pytestmark = pytest.mark.http


def times_asked(response: JSONResponse) -> int:
    """How often a client that may ask once more does."""
    asked = 0

    def answer(_: httpx.Request) -> httpx.Response:
        nonlocal asked
        asked += 1
        return httpx.Response(
            response.status_code,
            headers={**response.headers, "retry-after-ms": "1"},
            content=bytes(response.body),
        )

    with httpx.Client(transport=httpx.MockTransport(answer)) as http:
        client = openai.OpenAI(base_url="http://x/v1", api_key="x", http_client=http, max_retries=1)  # type: ignore[arg-type]  # typed for httpx2, takes both
        with pytest.raises(openai.APIStatusError):
            client.models.list()
    return asked


@pytest.mark.parametrize(
    "error",
    [
        PoisonousRequestError("ends engines"),
        NoStoreError("no store"),
        StorageFullError("full"),
        StorageRefusedError("read-only"),
    ],
)
def test_what_lasts_is_not_asked_again(error: ServingError) -> None:
    assert times_asked(error_response(error)) == 1


@pytest.mark.parametrize(("again_s", "asked"), [(3600.0, 1), (10.0, 2)])
def test_a_client_does_not_sleep_until_a_budget_is_new(again_s: float, asked: int) -> None:
    refused = refusal_response(Refusal(BudgetError("used up"), again_s))
    assert refused.headers["retry-after"] == f"{again_s:.0f}"
    assert times_asked(refused) == asked


def test_who_is_to_wait_for_a_slice_asks_again_however_long_that_is() -> None:
    assert times_asked(refusal_response(Refusal(NoSliceError("none"), 300.0))) == 2


@pytest.mark.parametrize(
    "error", [NoSliceError("none"), StoreAwayError("away"), StorageError("away"), IssuerAwayError("away")]
)
def test_what_passes_is_asked_again_when_the_router_says(error: ServingError) -> None:
    assert int(error_response(error).headers["retry-after"]) > 0
    assert times_asked(error_response(error)) == 2
