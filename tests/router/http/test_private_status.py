"""What a service with `private_status` tells whom."""

from collections.abc import Iterator

import httpx
import pytest
from support.page_service import Shown, shown

from serving.router.http.auth import new
from serving.state.records import SliceRecord, SliceState

pytestmark = pytest.mark.http

KEY, LINE = new("reader")
SHOWN = {"authorization": f"Bearer {KEY}"}
LOST = SliceRecord(
    "a",
    "llama",
    SliceState.LOST,
    "lost",
    "v6e 2x4",
    slice="slice-7",
    address="http://10.1.2.3:4567",
    reason="host 10.1.2.3 is gone",
)


@pytest.fixture(scope="module")
def service() -> Iterator[Shown]:
    with shown(Shown(["llama"], [LOST], keys=LINE, private_status=True)) as running:
        yield running


def test_health_tells_a_reason_and_an_address_only_to_who_has_a_key(service: Shown) -> None:
    answer = httpx.get(f"{service.address}/health")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "no_slice_ready"
    for word in ("10.1.2.3", "slice-7", "gone"):
        assert word not in answer.text
        assert word in httpx.get(f"{service.address}/health", headers=SHOWN).text


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/llama"])
def test_models_are_names_and_nothing_else_without_a_key(service: Shown, path: str) -> None:
    def card(headers: dict[str, str]) -> set[str]:
        answer = httpx.get(service.address + path, headers=headers).json()
        return set(answer["data"][0] if "data" in answer else answer)

    assert card({}) == {"id", "object", "created", "owned_by"}
    assert {"slice", "root", "slices_ready", "simulated"} <= card(SHOWN)
