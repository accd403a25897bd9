"""The HTTP surface, from the router's own OpenAPI document."""

import json
from types import SimpleNamespace
from typing import Any, cast

from serving.config import RouterSpec
from serving.router.http.api import Api
from serving.router.http.openapi import document

_INTRO = """# HTTP API

The running service has this as an OpenAPI document at `/openapi.json`. Requests name a model in `model`, and the router
forwards each to a slice of that model as it came. Fields that are not listed pass too: vLLM takes or ignores them.

With keys in force, send `Authorization: Bearer KEY`; [Keys](../guides/keys.md) says how to make one. Send `X-Request-Id`
to find a request again in logs and traces; without one the answer carries a new one. Failures are listed under
[Errors](errors.md)."""


def page() -> str:
    """The routes that the router answers, those that it forwards, and what a failure looks like."""
    nothing = cast("Any", None)  # the document asks none of them
    admission = cast("Any", SimpleNamespace(spec=RouterSpec()))
    app = Api((), nothing, nothing, admission, nothing, nothing, nothing).app()
    made = document(app, ["llama-3.1-8b-instruct"])
    routes = [
        (method.upper(), path, route)
        for path, methods in made["paths"].items()
        for method, route in methods.items()
    ]
    forwarded = [(path, route) for _, path, route in routes if "requestBody" in route]
    answered = ["| | | what it gives |", "|---|---|---|"]
    answered += [
        f"| {method} | `{path}` | {_one_line(route.get('description') or route['summary'])} |"
        for method, path, route in routes
        if "requestBody" not in route
    ]
    lines = [
        "| POST | what it does | must have | fields that the router reads or the document types |",
        "|---|---|---|---|",
    ]
    lines += [f"| `{path}` | {route['summary']} | {_fields(route)} |" for path, route in forwarded]
    statuses = ["| status | meaning |", "|---|---|"]
    statuses += [
        f"| {status} | {answer['description']} |" for status, answer in forwarded[0][1]["responses"].items()
    ]
    schemas = made["components"]["schemas"]
    return "\n\n".join(
        [
            _INTRO,
            "## Answered by the router",
            "\n".join(
                [
                    *answered,
                    "| GET | `/` | The [page](../guides/page.md) |",
                    "| GET | `/openapi.json` | This, for machines |",
                ]
            ),
            "## Forwarded to a slice",
            "\n".join(lines),
            "What steers an engine (sleep, profiling, weights) is not reached through the router.",
            "## Statuses of forwarded requests",
            "\n".join(statuses),
            "## Errors as JSON Schema",
            f"```json\n{json.dumps(schemas['Error'], indent=2)}\n```",
            "On `/v1/messages`:",
            f"```json\n{json.dumps(schemas['AnthropicError'], indent=2)}\n```",
        ]
    )


def _fields(route: dict[str, Any]) -> str:
    (media, content), *_ = route["requestBody"]["content"].items()
    schema = content["schema"]
    named = ", ".join(f"`{name}`" for name in schema["properties"] if name not in schema["required"])
    form = " (multipart form)" if media.startswith("multipart") else ""
    return f"{', '.join(f'`{name}`' for name in schema['required'])}{form} | {named or '-'}"


def _one_line(text: str) -> str:
    return " ".join(text.split())
