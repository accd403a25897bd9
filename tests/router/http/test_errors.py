"""Whether OpenAI's client asks again after an error, by its own rules; Anthropic's has the same."""

import httpx
import openai
import pytest

from serving.errors import (
    IssuerAwayError,
    NoSliceError,
    NoStoreError,
    PoisonousRequestError,
    ServingError,
    StorageError,
    StorageFullError,
    StorageRefusedError,
    StoreAwayError,
)
from serving.router.http.errors import error_response

pytestmark = pytest.mark.http


def times_asked(error: ServingError) -> int:
    """How often a client that may ask once more does."""
    asked = 0

    def answer(_: httpx.Request) -> httpx.Response:
        nonlocal asked
        asked += 1
        response = error_response(error)
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
    assert times_asked(error) == 1


@pytest.mark.parametrize(
    "error", [NoSliceError("none"), StoreAwayError("away"), StorageError("away"), IssuerAwayError("away")]
)
def test_what_passes_is_asked_again_when_the_router_says(error: ServingError) -> None:
    assert int(error_response(error).headers["retry-after"]) > 0
    assert times_asked(error) == 2
