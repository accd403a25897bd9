"""What may be asked of a model, and the OpenAPI document of that and of what the router answers itself.

Everything of vLLM's app that computes something; what steers an engine (sleep, profiling, weights, adapters loaded by
hand) is not here, and no client of a model reaches it. Request bodies are typed as far as the router looks at them; every
other field is vLLM's and passes as it came.
"""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

_TEXT = {"type": "string"}
_TOKENS = {"type": "array", "items": {"type": "integer"}}
_PROMPT = {"anyOf": [_TEXT, _TOKENS, {"type": "array", "items": {"anyOf": [_TEXT, _TOKENS]}}]}
_CONTENT = {"anyOf": [_TEXT, {"type": "array", "items": {"type": "object"}}]}
_MESSAGES = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"role": _TEXT, "content": _CONTENT},
        "required": ["role"],
    },
}
_COUNT = {"type": "integer", "minimum": 1}
_SAMPLING = {
    "stream": {"type": "boolean"},
    "max_tokens": _COUNT,
    "n": _COUNT,
    "temperature": {"type": "number", "minimum": 0},
    "stop": {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]},
    "user": _TEXT,
}
_EMBEDDED = {"input": _PROMPT}
_SCORED = {"text_1": _CONTENT, "text_2": _CONTENT}
_RANKED = {"query": _TEXT, "documents": {"type": "array", "items": _CONTENT}, "top_n": {"type": "integer"}}
_GENERATED = {"generate_response": {"type": "object"}}
_SEVERAL_GENERATED = {"generate_responses": {"type": "array", "items": {"type": "object"}}}

# Path: what it does, the fields of its body, and which of them it can't do without.
FORWARDED: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "/v1/chat/completions": ("Chat", {"messages": _MESSAGES, **_SAMPLING}, ("messages",)),
    "/v1/chat/completions/batch": (
        "Chat, several conversations at once",
        {"messages": {"type": "array", "items": _MESSAGES}},
        ("messages",),
    ),
    "/v1/chat/completions/render": ("The tokens of a chat", {"messages": _MESSAGES}, ("messages",)),
    "/v1/chat/completions/derender": ("A chat's answer from tokens", _GENERATED, ("generate_response",)),
    "/v1/completions": ("Complete a text", {"prompt": _PROMPT, **_SAMPLING}, ("prompt",)),
    "/v1/completions/render": ("The tokens of a prompt", {"prompt": _PROMPT}, ("prompt",)),
    "/v1/completions/derender": ("Completions from tokens", _SEVERAL_GENERATED, ("generate_responses",)),
    "/inference/v1/generate": (
        "Tokens to tokens",
        {"token_ids": _TOKENS, "sampling_params": {"type": "object"}, "stream": {"type": "boolean"}},
        ("token_ids", "sampling_params"),
    ),
    "/v1/responses": ("OpenAI's Responses", {"input": _CONTENT, "max_output_tokens": _COUNT}, ("input",)),
    "/v1/messages": (
        "Anthropic's Messages",
        {"messages": _MESSAGES, "max_tokens": _COUNT, "stream": {"type": "boolean"}},
        ("messages", "max_tokens"),
    ),
    "/v1/messages/count_tokens": ("Count a message's tokens", {"messages": _MESSAGES}, ("messages",)),
    "/v1/embeddings": ("Embed texts", _EMBEDDED, ("input",)),
    "/v2/embed": ("Cohere's Embed", {"texts": {"type": "array", "items": _TEXT}}, ()),
    "/pooling": ("Pool hidden states", _EMBEDDED, ("input",)),
    "/classify": ("Classify texts", _EMBEDDED, ("input",)),
    "/score": ("Score pairs of texts", _SCORED, ("text_1", "text_2")),
    "/v1/score": ("Score pairs of texts", _SCORED, ("text_1", "text_2")),
    "/generative_scoring": (
        "Score items by a model's next token",
        {"query": _PROMPT, "items": _PROMPT},
        ("query", "items"),
    ),
    "/rerank": ("Order documents by a query", _RANKED, ("query", "documents")),
    "/v1/rerank": ("Order documents by a query", _RANKED, ("query", "documents")),
    "/v2/rerank": ("Order documents by a query", _RANKED, ("query", "documents")),
    "/tokenize": ("Text or chat to tokens", {"prompt": _TEXT, "messages": _MESSAGES}, ()),
    "/detokenize": ("Tokens to text", {"tokens": _TOKENS}, ("tokens",)),
    "/invocations": ("Any of these, as SageMaker asks", {"messages": _MESSAGES, "prompt": _PROMPT}, ()),
}
_FORMS = {
    "/v1/audio/transcriptions": "Speech to text",
    "/v1/audio/translations": "Speech to English text",
}
PATHS = frozenset((*FORWARDED, *_FORMS))
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
    "501": "The model does not do this.",
    "503": "No slice is ready, or all are busy; Retry-After says when to come back.",
}
_OF_A_GET = ("401", "404", "405", "503")


def document(app: FastAPI, models: Sequence[str]) -> dict[str, Any]:
    """The whole of it, made once."""
    name = {"anyOf": [{"enum": list(models)}, _TEXT]}  # or an adapter of one of them
    if app.openapi_schema is None:
        made = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        made.setdefault("components", {}).setdefault("schemas", {}).update(
            {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}
        )
        made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path in made["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)  # FastAPI's own shape, which nothing here has
                operation["responses"] |= _errors("Error", _OF_A_GET)
        for path, (summary, fields, needed) in FORWARDED.items():
            made["paths"][path] = {
                "post": _operation(path, summary, "application/json", name, fields, needed)
            }
        for path, summary in _FORMS.items():
            fields = {"file": {"type": "string", "format": "binary"}}
            made["paths"][path] = {
                "post": _operation(path, summary, "multipart/form-data", name, fields, ("file",))
            }
        app.openapi_schema = made
    return app.openapi_schema


def _operation(
    path: str,
    summary: str,
    media: str,
    model: dict[str, Any],
    fields: dict[str, Any],
    needed: tuple[str, ...],
) -> dict[str, Any]:
    body = {
        "type": "object",
        "properties": {"model": model, **fields},
        "required": ["model", *needed],
        "additionalProperties": True,
    }
    answer = {"application/json": {"schema": {}}, "text/event-stream": {"schema": _TEXT}}
    error = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    return {
        "summary": summary,
        "operationId": path.strip("/").replace("/", "_"),
        "security": [{}, {"key": []}],
        "parameters": [{"name": "X-Request-Id", "in": "header", "required": False, "schema": _TEXT}],
        "requestBody": {"required": True, "content": {media: {"schema": body}}},
        "responses": {
            "200": {"description": "The engine's answer.", "content": answer},
            **_errors(error, tuple(_REASONS)),
        },
    }


def _errors(schema: str, statuses: tuple[str, ...]) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {status: {"description": _REASONS[status], "content": content} for status in statuses}
