"""Chat users, three of four answers streamed, against any OpenAI-compatible service.

    locust -f loadtest/locustfile.py --headless -u 4 -r 4 -t 20s --host http://localhost:8000

`--tags streamed` or `--tags whole` keeps to one kind. Beside each request it reports, from the moment a line of the stream is read off the socket:
  TTFT    request sent to the first text of the answer
  ITL     between two texts of an answer
and at the end output tokens a second, as the service counts them. An answer that is an error, holds an error event or
ends early is a failure.
"""

import json
import random
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from typing import Any

from locust import FastHttpUser, between, events, tag, task
from locust.contrib.fasthttp import FAILURE_EXCEPTIONS, ResponseContextManager
from locust.env import Environment
from locust.exception import StopUser

CHAT = "/v1/chat/completions"
TOKENS = "tokens"  # request type under which answers' tokens are summed, over all of locust's workers
TEXT_FIELDS = ("content", "reasoning", "reasoning_content", "tool_calls")
WORDS = ("slice", "host", "chip", "replica", "plan", "pool", "prefill", "decode", "batch", "cache", "token")


class BrokenStreamError(Exception):
    """A stream that holds an error event or ends without [DONE]."""


@events.init_command_line_parser.add_listener
def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--max-tokens", type=int, default=64, help="longest answer")
    parser.add_argument("--prompt-words", type=int, default=100, help="mean length of a prompt")


class ChatUser(FastHttpUser):
    """Asks, reads the answer for a moment, asks again."""

    wait_time = between(0, 1)

    def on_start(self) -> None:
        with self.client.get("/v1/models", catch_response=True) as response:
            try:
                self.model = response.json()["data"][0]["id"]
            except (ValueError, LookupError, TypeError, AttributeError):
                response.failure(f"no model to be had: {_said(response)}")
        if not hasattr(self, "model"):
            raise StopUser

    @tag("streamed")
    @task(3)
    def streamed(self) -> None:
        sent = time.perf_counter()
        with self._post("streamed", stream=True, stream_options={"include_usage": True}) as response:
            if not response.ok:
                response.failure(_said(response))
                return
            last, tokens = None, 0
            try:
                for event in _events(response):
                    tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                    if _has_text(event):
                        now = time.perf_counter()
                        self._report("ITL" if last else "TTFT", now - (last or sent))
                        last = now
            except (BrokenStreamError, *FAILURE_EXCEPTIONS) as error:
                response.failure(error)
            self._end(response, sent, tokens)

    @tag("whole")
    @task(1)
    def whole(self) -> None:
        sent = time.perf_counter()
        with self._post("whole") as response:
            try:
                self._end(response, sent, response.json()["usage"]["completion_tokens"])
            except (ValueError, LookupError, TypeError, AttributeError):
                response.failure(_said(response))

    def _post(self, name: str, **fields: Any) -> ResponseContextManager:
        options = self.environment.parsed_options
        words = random.choices(WORDS, k=random.randint(1, 2 * options.prompt_words))
        messages = [{"role": "user", "content": " ".join(words)}]
        body = {"model": self.model, "messages": messages, "max_tokens": options.max_tokens, **fields}
        return self.client.post(
            CHAT,
            name=f"{CHAT} {name}",
            data=json.dumps(body),
            headers={"Content-Type": "application/json"},
            stream=fields.get("stream", False),
            catch_response=True,
        )

    def _end(self, response: ResponseContextManager, sent: float, tokens: int) -> None:
        """Count the whole answer's time, not its headers', and its tokens."""
        seconds = time.perf_counter() - sent
        response.request_meta["response_time"] = seconds * 1000
        self._report(TOKENS, seconds, tokens)

    def _report(self, kind: str, seconds: float, length: int = 0) -> None:
        events.request.fire(
            request_type=kind,
            name=CHAT,
            response_time=seconds * 1000,
            response_length=length,
            exception=None,
            context={},
        )


@events.test_stop.add_listener
def say_throughput(environment: Environment, **_: Any) -> None:
    counted = environment.stats.get(CHAT, TOKENS)
    seconds = (counted.last_request_timestamp or 0) - counted.start_time
    if seconds > 0:
        print(f"output tokens/s: {counted.total_content_length / seconds:.1f}")


def _events(response: ResponseContextManager) -> Iterator[dict[str, Any]]:
    """Events of a stream as they come; raises BrokenStreamError."""
    while line := response.stream.readline(b"\n"):
        field, _, value = bytes(line).partition(b":")
        if field != b"data":
            continue
        if value.strip() == b"[DONE]":
            response.stream.read()  # to its end, so that the connection is used again
            return
        event = json.loads(value)
        if "error" in event:
            raise BrokenStreamError(event["error"].get("message", event["error"]))
        yield event
    raise BrokenStreamError("the stream ended without [DONE]")


def _has_text(event: dict[str, Any]) -> bool:
    """Whether an event carries text; the first one of an answer may only name the role."""
    return any(choice["delta"].get(field) for choice in event["choices"] for field in TEXT_FIELDS)


def _said(response: ResponseContextManager) -> str:
    try:
        return f"{response.status_code}: {response.json()['error']['message']}"
    except (ValueError, LookupError, TypeError, AttributeError):
        return f"{response.status_code}: not what OpenAI's API answers"
