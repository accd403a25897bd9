"""The OpenAPI document of the models' routes and of the router's own."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from serving.router.http.routes import ROUTES, Dialect, Route

_TEXT = {"type": "string"}
# OpenAPI 3.1 has no word for a stream: by its tools' custom, this is what each server-sent event is.
_EVENT = {
    "type": "object",
    "properties": {
        "event": _TEXT,
        "data": {**_TEXT, "description": "JSON, or the [DONE] of OpenAI's streams."},
    },
    "required": ["data"],
}
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": _TEXT, "message": _TEXT},
            "required": ["type", "message"],
        },
        "request_id": _TEXT,
    },
    "required": ["type", "error"],
}
_REASONS = {
    "400": "The request can't be read, or asks for what the model can't do.",
    "401": "No API key, or none of this service's.",
    "404": "No such model or path.",
    "405": "Another method.",
    "408": "The body did not come in time.",
    "413": "The body is too large.",
    "422": "The engine can't process it.",
    "429": "The key's limits; Retry-After says when there is room again.",
    "500": "The engine failed.",
    "501": "The model, or this service, does not do this.",
    "503": "No slice is ready, or all are busy; Retry-After says when to come back.",
}
_OF_THE_ROUTER_S_OWN = ("400", "401", "404", "405", "429", "503")
_OF_FILES = ("408", "413", "501")


def document(app: FastAPI, models: Sequence[str]) -> dict[str, Any]:
    """The whole document, made once."""
    name = {"anyOf": [{"enum": list(models)}, _TEXT]}  # or an adapter of one of them
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        schema.setdefault("components", {}).setdefault("schemas", {}).update(
            {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}
        )
        schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, operations in schema["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)  # FastAPI's own shape, which no answer here has
                operation["responses"] |= _errors("Error", _OF_THE_ROUTER_S_OWN)
                if path.startswith(("/v1/files", "/v1/batches")):
                    operation["responses"] |= _errors("Error", _OF_FILES)
        for route in ROUTES.values():
            schema["paths"][route.path] = {"post": _operation(route, name)}
        app.openapi_schema = schema
    return app.openapi_schema


def _operation(route: Route, model: dict[str, Any]) -> dict[str, Any]:
    body = {
        "type": "object",
        "properties": {"model": model, **route.fields},
        "required": ["model", *route.needed],
        "additionalProperties": True,
    }
    media = "multipart/form-data" if route.form else "application/json"
    content = {"application/json": {"schema": {}}, "text/event-stream": {"schema": _EVENT}}
    error = "AnthropicError" if route.dialect is Dialect.ANTHROPIC else "Error"
    return {
        "summary": route.summary,
        "operationId": route.path.strip("/").replace("/", "_"),
        "security": [{}, {"key": []}],
        "parameters": [{"name": "X-Request-Id", "in": "header", "required": False, "schema": _TEXT}],
        "requestBody": {"required": True, "content": {media: {"schema": body}}},
        "responses": {
            "200": {"description": "The engine's answer.", "content": content},
            **_errors(error, tuple(_REASONS)),
        },
    }


def _errors(schema: str, statuses: tuple[str, ...]) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {status: {"description": _REASONS[status], "content": content} for status in statuses}
