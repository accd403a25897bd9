"""Reads a request's body, and refuses it where no engine could answer it.

The router checks only what would cost an engine, or make it reach into the network. vLLM knows what fields mean and which
ones exist; it ignores unknown fields, as OpenAI's clients of any age rely on, and so does the router. A key that stands twice
in one object is refused: router and engine must not read two requests in one body.
"""

from collections.abc import AsyncGenerator, Collection, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import jiter
from fastapi import Request
from starlette.formparsers import MultiPartException, MultiPartParser

from serving.config import RouterSpec
from serving.errors import BadRequestError
from serving.planning import Plan

# No tokenizer we serve has a longer token (Llama 3: 128 spaces), so that a longer text can't fit whatever it says.
_LONGEST_TOKEN_CHARS = 128
# vLLM compares every stop text with every new piece of every answer.
_MOST_STOPS = 64
_LONGEST_STOP_CHARS = 1024
_WHOLE_NUMBERS = (
    "n",
    "best_of",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "min_tokens",
)
# Prompts of one request times the answers to each.
_MOST_SEQUENCES = 4096
# About right for English text in JSON; the tokens that a request used correct it afterwards.
BYTES_PER_TOKEN = 4
# Fields with text for a chat template or tokenizer, and with media.
_CONTENT = (
    "messages",
    "input",
    "prompt",
    "queries",
    "query",
    "documents",
    "data_1",
    "data_2",
    "text_1",
    "text_2",
)


async def fields_of(request: Request, body: bytes) -> dict[str, Any]:
    """The fields of a JSON or form body; raises BadRequestError."""
    if request.headers.get("content-type", "").startswith("multipart/form-data"):
        return await _form(request, body)
    if not body:
        raise BadRequestError("The request has no body; a JSON object is needed.")
    try:
        fields = jiter.from_json(body, allow_inf_nan=False, catch_duplicate_keys=True)
    except ValueError as error:
        raise BadRequestError(f"The request body is not JSON: {str(error)[:200]}.") from None
    if not isinstance(fields, dict):
        raise BadRequestError(f"The request body is a JSON {type(fields).__name__}; an object is needed.")
    _check_types(fields)
    return fields


def _check_types(fields: dict[str, Any]) -> None:
    """Check the fields that the router counts with. vLLM would take "16" for 16, past every limit here."""
    for name in _WHOLE_NUMBERS:
        value = fields.get(name)
        if isinstance(value, float) and value.is_integer():
            fields[name] = int(value)  # JSON takes 16.0 for an integer
        elif value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise BadRequestError(f"{name} is {_short(value)}; send a whole number.")
    if not isinstance(streams := fields.get("stream"), bool | None):
        raise BadRequestError(f"stream is {_short(streams)}; send true or false.")


async def _form(request: Request, body: bytes) -> dict[str, Any]:
    async def once() -> AsyncGenerator[bytes, None]:
        yield body
        yield b""

    try:
        form = await MultiPartParser(request.headers, once()).parse()
    except (MultiPartException, KeyError) as error:
        raise BadRequestError(f"The request body is not a form: {error}") from None
    fields = {name: value for name, value in form.multi_items() if isinstance(value, str)}
    await form.close()
    return fields


def check(fields: Mapping[str, Any], plan: Plan, spec: RouterSpec) -> None:
    """Raises BadRequestError, with value and limit, where no engine should see the request."""
    for name in ("n", "best_of"):
        if isinstance(asked := fields.get(name), int) and asked > spec.max_n:
            raise BadRequestError(
                f"{name} is {_short(asked)}; at most {spec.max_n} answers to a prompt are given."
            )
    if (sequences := _sequences(fields)) > _MOST_SEQUENCES:
        raise BadRequestError(
            f"The request makes {sequences} sequences, prompts times n; send at most {_MOST_SEQUENCES} at a time."
        )
    for name in ("stop", "stop_token_ids", "stop_sequences", "bad_words"):
        _check_stops(name, fields.get(name))
    _check_length(fields, plan.fit.max_model_len)
    allowed = plan.engine.get("allowed_media_domains") or ()
    local = bool(plan.engine.get("allowed_local_media_path"))
    for name in _CONTENT:
        if isinstance(content := fields.get(name), list | dict):
            for _, where, text in _texts(content):
                if _is_url(where):
                    _check_url(text, allowed, local=local)


def demand(fields: Mapping[str, Any], body: bytes) -> tuple[float, int]:
    """About the tokens that a request may use, and its sequences. Both are sane whatever the body says."""
    sequences = _sequences(fields)
    most = 0
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if isinstance(asked := fields.get(name), int) and asked > 0:
            most = max(most, min(asked, 1 << 30))
    return _text_bytes(fields, body) / BYTES_PER_TOKEN + most * sequences, min(sequences, _MOST_SEQUENCES)


def _text_bytes(fields: Mapping[str, Any], body: bytes) -> int:
    """The bytes of a body that may become tokens of text. A picture's do not: it becomes some hundred tokens at any size."""
    if not body.lstrip().startswith(b"{"):
        return sum(len(value) for value in fields.values() if isinstance(value, str))
    contents = (fields.get(name) for name in _CONTENT)
    return len(body) - sum(
        len(text)
        for content in contents
        if isinstance(content, list | dict)
        for holder, where, text in _texts(content)
        if (_is_url(where) and text.startswith("data:"))
        or (where == "data" and ("format" in holder or holder.get("type") == "base64"))
    )


def _sequences(fields: Mapping[str, Any]) -> int:
    n = fields.get("n")
    answers = n if isinstance(n, int) and n > 0 else 1
    prompt = fields.get("prompt", fields.get("input"))
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return answers * len(prompt)
    return answers


def _check_stops(name: str, stops: Any) -> None:
    texts = stops if isinstance(stops, list) else [stops]
    if len(texts) > _MOST_STOPS:
        raise BadRequestError(f"{name} has {len(texts)} entries; send at most {_MOST_STOPS}.")
    longest = max((len(text) for text in texts if isinstance(text, str)), default=0)
    if longest > _LONGEST_STOP_CHARS:
        raise BadRequestError(
            f"{name} has a text of {longest} characters; send at most {_LONGEST_STOP_CHARS}."
        )


def _check_length(fields: Mapping[str, Any], max_model_len: int) -> None:
    """Refuse too many token ids, and text that is too long for any tokenizer. The engine counts the rest."""
    for name in ("prompt", "input", "tokens", "prompt_token_ids"):
        prompt = fields.get(name)
        prompts = (
            prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else [prompt]
        )
        for item in prompts:
            if isinstance(item, list) and item and isinstance(item[0], int) and len(item) > max_model_len:
                raise BadRequestError(
                    f"{name} has {len(item)} tokens; the context of this model is {max_model_len}."
                )
            if isinstance(item, str) and len(item) > max_model_len * _LONGEST_TOKEN_CHARS:
                raise BadRequestError(
                    f"{name} has {len(item)} characters; no text of that length fits the context of {max_model_len} tokens."
                )


def _is_url(name: str) -> bool:
    return name == "url" or name.endswith("_url")


def _texts(content: Any) -> Iterator[tuple[Mapping[str, Any], str, str]]:
    """Every text in the parts of a request's content, with the object it stands in and its key there."""
    todo: list[Any] = [content]
    while todo:
        value = todo.pop()
        if isinstance(value, list):
            if not (value and isinstance(value[0], int | float)):  # token ids
                todo.extend(value)
        elif isinstance(value, dict):
            for name, inner in value.items():
                if isinstance(inner, list | dict):
                    todo.append(inner)
                elif isinstance(inner, str):
                    yield value, name, inner


def _check_url(url: str, allowed: Collection[str], *, local: bool) -> None:
    try:
        parts = urlsplit(url.strip())
        scheme, host = parts.scheme.lower(), parts.hostname
    except ValueError:
        raise BadRequestError(f"{_short(url)} is not a URL.") from None
    if scheme == "data" or (scheme == "file" and local) or (scheme in ("http", "https") and host in allowed):
        return
    domains = ", ".join(allowed) or "none"
    raise BadRequestError(
        f"{_short(url)} is not fetched: send media as a data: URL. Domains this service fetches from: {domains} "
        "(engine.allowed_media_domains)."
    )


def _short(value: Any) -> str:
    text = (
        repr(value)
        if not isinstance(value, int) or abs(value) < 1 << 64
        else f"a number of {value.bit_length()} bits"
    )
    return text if len(text) <= 100 else text[:97] + "..."
