"""Lines of a batch: what one of the input asks, and what one of the output says. Pure."""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serving import bounded_json
from serving.errors import BadRequestError

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
# The header of a request that wants a free seat or none; any value but an empty one.
FREE_SEATS = "x-free-seats-only"
_MOST_CUSTOM_ID = 512
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # editors put it in front of the first line


class LineError(Exception):
    """What is wrong with one line of an input file; `custom_id` where it could be read."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.custom_id = custom_id


@dataclass(frozen=True)
class Asked:
    """One good line."""

    custom_id: str
    model: str
    path: str
    body: dict[str, Any]


def asked(text: bytes, endpoints: Sequence[str], models: Collection[str], model: str | None = None) -> Asked:
    """Read a line that asks one of these models, or `model` whatever it says; raises LineError."""
    fields = _fields(text)
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MOST_CUSTOM_ID:
        raise LineError(
            "missing_required_parameter",
            f"custom_id has to be a text of 1 to {_MOST_CUSTOM_ID} characters.",
        )
    if "\0" in custom_id:
        raise LineError("invalid_custom_id", "custom_id has a zero byte in it.")
    if fields.get("method") != "POST":
        raise LineError("invalid_method", "method has to be POST.", custom_id)
    path = fields.get("url")
    if not isinstance(path, str) or path not in endpoints:
        wanted = (
            f"the batch's endpoint, {endpoints[0]}"
            if len(endpoints) == 1
            else f"one of {', '.join(endpoints)}"
        )
        raise LineError("mismatched_url", f"url has to be {wanted}.", custom_id)
    asked_body = fields.get("body")
    if not isinstance(asked_body, dict):
        raise LineError("missing_required_parameter", "body has to be an object.", custom_id)
    if asked_body.get("stream"):
        raise LineError("invalid_request", "A batch has no streams; leave out stream.", custom_id)
    model = model or asked_body.get("model")
    if not isinstance(model, str) or model not in models:
        raise LineError(
            "model_not_found",
            f"The body's model is none of this service's: {', '.join(sorted(models))}.",
            custom_id,
        )
    return Asked(custom_id, model, path, {**asked_body, "model": model})


def body(text: bytes) -> str:
    """The body of a good line, as JSON; raises LineError."""
    return as_json(_fields(text)["body"])


def as_json(body: Mapping[str, Any]) -> str:
    """No longer than in its line, whose length has a limit as the request's has: escaped, a Chinese text has twice its bytes."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))


def answered(batch: str, line: int, custom_id: str | None, status: int, request_id: str, answer: Any) -> str:
    """A line of the output or, from status 400, of the error file."""
    response = {"status_code": status, "request_id": request_id, "body": answer}
    return _line(batch, line, custom_id, response, None)


def refused(batch: str, line: int, custom_id: str | None, code: str, message: str) -> str:
    """A line of the error file for what was never asked of a model."""
    return _line(batch, line, custom_id, None, {"code": code, "message": message, "line": line})


def answer(text: str) -> Any:
    """What an answer says; the text itself where it is no JSON, as with NaN in it: results have to be JSON."""
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        return text


def usage(answer: Any) -> dict[str, int]:
    """The tokens of an answer by OpenAI's names of a batch's usage, whichever endpoint gave it."""
    figures = _of(answer, "usage")
    of_read = _of(figures, "input_tokens_details", "prompt_tokens_details")
    of_written = _of(figures, "output_tokens_details", "completion_tokens_details")
    counts = {
        "input_tokens": _of(figures, "input_tokens", "prompt_tokens"),
        "cached_tokens": _of(of_read, "cached_tokens"),
        "output_tokens": _of(figures, "output_tokens", "completion_tokens"),
        "reasoning_tokens": _of(of_written, "reasoning_tokens"),
    }
    return {name: count if type(count) is int else 0 for name, count in counts.items()}


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError
    return number


def _of(fields: Any, *names: str) -> Any:
    """The first of these fields that is there."""
    given = fields if isinstance(fields, dict) else {}
    return next((given[name] for name in names if given.get(name) is not None), None)


def _fields(text: bytes) -> dict[str, Any]:
    try:
        return bounded_json.read(text.removeprefix(_BYTE_ORDER_MARK).strip(), "This line")
    except BadRequestError as error:
        raise LineError("invalid_json_line", error.message) from None


def _line(batch: str, line: int, custom_id: str | None, response: Any, error: Any) -> str:
    name = f"batch_req_{batch.removeprefix('batch_')}_{line}"
    # No byte that a database's text can't hold: JSON spells it.
    return json.dumps({"id": name, "custom_id": custom_id, "response": response, "error": error})
