"""One request and its answer, measured where each line of a stream is read off the socket.

An answer that is an error, holds an error event or ends early is a failure; 429 and 503 are refusals too.
"""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from locust import FastHttpUser
from locust.contrib.fasthttp import FAILURE_EXCEPTIONS, ResponseContextManager

from bad_input import BadInputError
from figures import Slo
from keys import Key
from prompts import Prompt
from rows import REFUSALS, Recorder

_MODELS = "/v1/models"
_TEXT_FIELDS = ("content", "reasoning", "reasoning_content", "tool_calls")
_ODD_ANSWER = (ValueError, LookupError, TypeError, AttributeError)  # JSON, but not what the API answers


class BrokenAnswerError(Exception):
    """An answer that cannot be counted: refused, failed, broken off or not of the API."""

    def __repr__(self) -> str:  # what locust's tables show
        return str(self)


def check_target(host: str | None, key: Key | None, timeout_s: float = 5) -> None:
    """Raises BadInputError where nothing at the address answers as an OpenAI-compatible service with a model does."""
    if not host:
        raise BadInputError("no target: give --host http://ADDRESS:PORT")
    request = urllib.request.Request(host.rstrip("/") + _MODELS, headers=_headers(key))  # noqa: S310  the user's own
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:  # noqa: S310
            json.load(response)["data"][0]["id"]
    except urllib.error.HTTPError as error:
        raise BadInputError(
            f"target {host}: GET {_MODELS} was answered {error.code}; is it the service, and are the API keys right?"
        ) from None
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise BadInputError(f"target {host} is down: GET {_MODELS}: {reason}") from None
    except _ODD_ANSWER:
        raise BadInputError(f"target {host}: GET {_MODELS} names no model") from None


def model(user: FastHttpUser, wanted: str, key: Key | None) -> str | None:
    """The model to ask for: the wanted one, or the service's first; none, and a failure counted, where there is none."""
    with user.client.get(_MODELS, headers=_headers(key), catch_response=True) as response:
        try:
            return wanted or str(response.json()["data"][0]["id"])
        except _ODD_ANSWER:
            response.failure(BrokenAnswerError(f"no model to be had: {_said(response)}"))
    return None


def ask(
    user: FastHttpUser,
    prompt: Prompt,
    *,
    model: str,
    streamed: bool,
    key: Key | None,
    slo: Slo,
    intended: float,
) -> str | None:
    """Send one request and measure its answer from the moment it was meant to be sent; its text if it came whole."""
    name = label(prompt, key)
    body = {"model": model, **prompt.body}
    if streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    recorder = Recorder(user.environment.stats, name)
    text = None
    with user.client.post(
        prompt.path,
        name=name,
        data=json.dumps(body),
        headers={"Content-Type": "application/json", **_headers(key)},
        stream=streamed,
        catch_response=True,
    ) as response:
        try:
            if response.status_code != 200:
                raise BrokenAnswerError(_said(response))  # noqa: TRY301  one place tells every failure
            if streamed:
                text, tokens, ttft_s = _read(response, recorder, intended)
            else:
                answer = response.json()
                text, tokens, ttft_s = _text(answer["choices"]), answer["usage"]["completion_tokens"], None
        except (BrokenAnswerError, *FAILURE_EXCEPTIONS) as error:
            response.failure(error)
        except _ODD_ANSWER as error:
            response.failure(BrokenAnswerError(f"not what OpenAI's API answers: {error!r}"))
        latency_s = time.perf_counter() - intended
        response.request_meta["response_time"] = latency_s * 1000
        if text is not None:
            response.success()
            recorder.time("latency", latency_s)
            recorder.count("tokens", tokens)
            if slo.good(ttft_s=ttft_s, latency_s=latency_s, tokens=tokens):
                recorder.count("good")
        elif response.status_code in REFUSALS:
            recorder.count("refused")
    return text


def label(prompt: Prompt, key: Key | None) -> str:
    """What the statistics call a request."""
    return f"{prompt.kind}, {key.name}" if key and key.name else prompt.kind


def _read(
    response: ResponseContextManager, recorder: Recorder, intended: float
) -> tuple[str, int, float | None]:
    """A stream's text, tokens and seconds to the first text; raises BrokenAnswerError."""
    texts, tokens, first, last = [], 0, None, intended
    for event in _events(response):
        if usage := event.get("usage"):
            tokens = usage["completion_tokens"]
        if text := _text(event["choices"]):
            now = time.perf_counter()
            recorder.time("TTFT" if first is None else "ITL", now - last)
            first, last = first or now, now
            texts.append(text)
    return "".join(texts), tokens, None if first is None else first - intended


def _events(response: ResponseContextManager) -> Iterator[dict[str, Any]]:
    """Events of a stream as they come; raises BrokenAnswerError."""
    while line := response.stream.readline(b"\n"):
        field, _, value = bytes(line).partition(b":")
        if field != b"data":
            continue
        if value.strip() == b"[DONE]":
            response.stream.read()  # to its end, so that the connection is used again
            return
        event = json.loads(value)
        if "error" in event:
            raise BrokenAnswerError(_message(event))
        yield event
    raise BrokenAnswerError("the stream ended without [DONE]")


def _text(choices: list[dict[str, Any]]) -> str:
    """The text of an answer or of an event of one; the first event may only name the role."""
    found = ""
    for choice in choices:
        part = choice.get("delta") or choice.get("message") or choice
        for field in (*_TEXT_FIELDS, "text"):
            if value := part.get(field):
                found += value if isinstance(value, str) else json.dumps(value)
    return found


def _headers(key: Key | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key.value}"} if key else {}


def _said(response: ResponseContextManager) -> str:
    if response.status_code == 0:
        return f"no answer: {response.error!r}"
    try:
        return f"{response.status_code}: {_message(response.json())}"
    except _ODD_ANSWER:
        return f"{response.status_code}: not what OpenAI's API answers"


def _message(event: dict[str, Any]) -> str:
    error = event["error"]
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
