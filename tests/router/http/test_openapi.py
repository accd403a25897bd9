"""The OpenAPI document, and whether the router keeps to it whatever is sent."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from support import fronts
from support.batches import filling_router, folder, owner
from support.fronts import Front, front
from support.servers import until
from support.simulated_engine import MODEL, serving

from serving.router.http import api
from serving.router.http.routes import ROUTES

# Of each kind, valid and not, of each of some twenty operations.
EXAMPLES = 8


@pytest.fixture(scope="module")
def running() -> Iterator[Front]:
    with front(max_body_bytes=1 << 16) as found:
        yield found


@pytest.mark.http
def test_the_document_tells_of_every_route(running: Front) -> None:
    made = httpx.get(f"{running.address}/openapi.json").json()
    own = {
        "/v1/models",
        "/v1/models/{name}",
        "/v1/responses/{name}/cancel",
        "/health",
        "/status.json",
        "/metrics",
    }
    assert own | ROUTES.keys() <= made["paths"].keys()
    for route in ROUTES.values():
        operation = made["paths"][route.path]["post"]
        assert {"200", "400", "401", "429", "503"} <= operation["responses"].keys()
        media = "multipart/form-data" if route.form else "application/json"
        assert "model" in operation["requestBody"]["content"][media]["schema"]["required"]
    assert {"Error", "AnthropicError", "Status"} <= made["components"]["schemas"].keys()


@pytest.mark.http
@pytest.mark.slow  # half a minute
def test_whatever_is_sent_is_answered_as_the_document_says_and_never_with_a_5xx(tmp_path: Path) -> None:
    with (
        serving() as (upstream, engine),
        owner(folder(tmp_path)) as keeper,
        filling_router(keeper.place, upstream, max_body_bytes=1 << 16) as (address, core),
    ):
        tried = sent(address)
        assert tried > 150
        print(f"{tried} requests")
        until(
            lambda: (
                not any(core.admission.counts(MODEL)[name] for name in ("held", "in_flight"))
                and not engine.scheduler.running
            ),
            "nothing held and nothing running",
        )


def sent(address: str) -> int:
    """How many requests of all kinds were sent, each answered as the document says."""
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
    checks = [
        not_a_server_error,
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    ]
    tried = 0
    for found in schema.get_all_operations():
        operation = found.ok()
        for mode in GenerationMode:
            if mode is GenerationMode.NEGATIVE and not operation.body:
                continue  # any text is a path

            @settings(
                max_examples=EXAMPLES,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
                phases=[Phase.explicit, Phase.generate],
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def conforms(case: schemathesis.Case) -> None:
                nonlocal tried
                tried += 1
                case.call_and_validate(checks=checks)

            conforms()
    return tried


@pytest.mark.http
def test_pages_that_anybody_may_ask_for_are_not_made_for_each_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []

    def noting(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            made.append(name)
            return make(*arguments)

        return noted

    monkeypatch.setattr(api, "document", noting("/openapi.json", api.document))
    monkeypatch.setattr(fronts, "_status", noting("/status.json", fronts._status))
    monkeypatch.setattr(api, "_TOLD_AGAIN_S", 60)
    with front() as running:
        for path in ("/openapi.json", "/status.json"):
            first, second = (httpx.get(running.address + path) for _ in range(2))
            assert first.status_code == second.status_code == 200
            assert first.headers["content-type"] == "application/json"
            assert first.content == second.content
    assert made == ["/openapi.json", "/status.json"]
