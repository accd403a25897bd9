"""An answer that breaks off on one slice and goes on, on another, from the tokens that the client has. Bytes in, bytes out.

A stream of chat or completions is asked for with `return_token_ids`, so that every event names its tokens. The router
cuts out what the client did not ask for: the events are byte for byte the engine's. When the stream breaks, the router sends
the same body to another slice, with the ids so far in `vllm_xargs`. The engine there puts the ids behind the prompt, and
through its detokenizer, stop strings and parsers (serving.engine.resume). So nothing is tokenized again, and a character, a
stop string or a thought that was cut in two is whole. The later events get the first slice's id, time, usage and offsets.
"""

import json
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from pydantic_core import to_json

from serving.engine.protocol import CONTINUED
from serving.router.http import sse
from serving.router.http.protocol import InferenceRequest
from serving.router.http.routes import ROUTES

# Quotes are escaped inside JSON strings, so a text never contains one of these.
_IDS, _NO_IDS = b'"token_ids":[', b'"token_ids":null'
_PROMPT_IDS, _NO_PROMPT_IDS = re.compile(rb'"prompt_token_ids":\[[0-9,]*\]'), b'"prompt_token_ids":null'
_WHOLE_IDS = re.compile(rb'"token_ids":(\[[0-9,]*\])')
_NO_DELTA, _CALLS, _PROMPT = b'"delta":{}', b'"tool_calls":[', b'"prompt_token_ids":['
_MOST_REPEATED_BYTES = 1 << 20
# Of a first event of which little is wanted: with logprobs of a prompt it has megabytes.
_MOST_PARSED_BYTES = 1 << 18
# Options whose effect on a token depends on all tokens before it, or on the whole answer.
_ALL_OF_IT = (
    "prompt_logprobs",
    "thinking_token_budget",
    "repetition_detection",
    "kv_transfer_params",
    "ec_transfer_params",
)
# Fields without which any chat's answer can go on elsewhere.
_MAY_DIVIDE = frozenset(
    (
        "n",
        "use_beam_search",
        "structured_outputs",
        "response_format",
        "tool_choice",
        "modalities",
        "echo",
        "truncate_prompt_tokens",
    )
) | frozenset(_ALL_OF_IT)
_COMPLETION_TOKENS = 16  # max_tokens of completions that name none, or null


class Transcript:
    """One streamed answer as its client has it, over all the slices that gave a part of it.

    `body` is what to ask of the next slice. `done` turns true with the answer's end. `engine_error` becomes the engine's own
    error event where the engine failed, not the client.
    """

    def __init__(self, request: InferenceRequest) -> None:
        self.done = False
        self.engine_error = b""
        self._request = request
        self._chat = ROUTES[request.path].opens
        self._indivisible = _indivisible(request.fields, chat=self._chat)
        self._answers = request.fields.get("n") or 1
        # Whether the answer's ids are not asked for, or not given. vLLM leaves the prompt out of an echo beside ids, and says the
        # prompt's ids with each answer.
        asked = request.fields.get
        self._unread = bool(
            asked("echo")
            or asked("use_beam_search")
            or "audio" in (asked("modalities") or ())
            or (self._answers > 1 and self._answers * len(request.body) > _MOST_REPEATED_BYTES)
        )
        self._shows_ids = bool(request.fields.get("return_token_ids"))
        self._has_tools = bool(request.fields.get("tools"))
        self._counts_text = (
            not self._chat and not self._indivisible and request.fields.get("logprobs") is not None
        )
        self._opening: dict[str, Any] = {}
        self._last = b""
        self._begun = False
        self._ids = bytearray()  # as JSON has them, with a comma behind each
        self._text_length = 0
        self._prompts: dict[int, int] = {}  # tokens of each answer's prompt
        self._later = False  # whether this slice is not the first
        self._tokens_before = 0
        self._text_before = 0
        self.body = request.body if self._unread or self._shows_ids else with_ids(request)

    @property
    def failed(self) -> bool:
        """Whether this slice's engine failed."""
        return bool(self.engine_error)

    @property
    def speaks(self) -> bool:
        """Whether every token shows; a model that hides its thoughts is silent while it thinks."""
        return self._request.fields.get("include_reasoning") is not False

    @property
    def movable(self) -> bool:
        """Whether another slice could go on, or begin anew."""
        return not (self._begun and self._indivisible)

    @property
    def tokens(self) -> int:
        """Tokens that the client has; zero where nobody counts."""
        return 0 if self._unread else self._ids.count(b",")

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens that the client has; none where nobody knows them."""
        return () if self._unread else tuple(json.loads(b"[" + self._ids[:-1] + b"]"))

    @property
    def prompt_tokens(self) -> int | None:
        """Length of the client's own prompts, where a slice told it."""
        return sum(tokens for index, tokens in self._prompts.items() if not index % self._answers) or None

    def take(self, events: bytes) -> bytes:
        """Whole events of an engine, as the client is to have them; up to the engine's failure if it fails."""
        events_out = self._take_at_once(events)
        if events_out is not None:
            return events_out
        # The first and the last events are of another kind than those between.
        first, *others = sse.split(events)
        pieces = [self._take(first)]
        if len(others) > 1 and (between := self._take_at_once(b"".join(others[:-1]))) is not None:
            pieces.append(between)
            others = others[-1:]
        return b"".join([*pieces, *map(self._take, others)])

    def resume(self) -> str:
        """Make `body` ask for the rest of the answer; returns the reason where another slice can't go on."""
        self.engine_error = b""
        self._later = bool(self._opening)
        if not self._begun:
            return ""
        if self._indivisible:
            return self._indivisible
        self._tokens_before, self._text_before = self.tokens, self._text_length
        self.body = self._rest()
        return ""

    def ending(self) -> bytes:
        """The end of an answer whose last token the client has; nothing where tokens are still to come."""
        last = [sse.body(event) for event in sse.split(self._last)]
        if any(body.get("choices") == [] for body in last):
            return sse.DONE
        if self._indivisible or not any(_finishes(body) for body in last):
            return b""
        if not (self._request.fields.get("stream_options") or {}).get("include_usage"):
            return sse.DONE
        prompt_tokens = self.prompt_tokens or 0
        usage = {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + self.tokens,
            "completion_tokens": self.tokens,
        }
        return sse.event({**self._opening, "choices": [], "usage": usage}) + sse.DONE

    def _take_at_once(self, events: bytes) -> bytes | None:
        """Events of which none is parsed. None where one has to be."""
        if self._unread and (self._begun or len(events) > _MOST_PARSED_BYTES):
            self._begun = True
            return self._take_unread(events)
        if self._opening and not self._later and not self._counts_text and not (self.failed or self.done):
            return self._take_tokens(events)
        return None

    def _take_unread(self, events: bytes) -> bytes | None:
        """Events of an answer that can't go on elsewhere anyway. None where the engine may have failed."""
        if sse.ERROR in events:
            return None
        self._last = events
        self.done = events.endswith(sse.DONE)
        return events

    def _take_tokens(self, events: bytes) -> bytes | None:
        """The fast path of nearly all events: one token, nothing else; the stream's end may follow. None for others."""
        if _NO_DELTA in events or (self._has_tools and not self._indivisible and _CALLS in events):
            return None
        if self._indivisible and _PROMPT in events:  # several answers begin one after the other
            return None
        pieces, all_ids = [], []
        head, mark, rest = events.partition(_IDS)
        while mark:
            ids, _, rest = rest.partition(b"]")
            all_ids.append(ids)
            pieces.append(head)
            head, mark, rest = rest.partition(_IDS)
        done = events.endswith(sse.DONE)
        if len(all_ids) != sse.count(events) - done:
            return None
        self.done = done
        for ids in all_ids:
            if ids:
                self._ids += ids
                self._ids += b","
        self._begun = True
        self._last = events
        if self._shows_ids:
            return events
        pieces.append(head)
        return _NO_IDS.join(pieces)

    def _take(self, event: bytes) -> bytes:
        if self.failed or self.done:
            return b""
        body = {} if event == sse.DONE else sse.body(event)
        if "error" in body and _status(body["error"]) >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self.engine_error = event + sse.DONE
            return b""
        if not isinstance(body.get("choices"), list):
            self.done = event == sse.DONE
            return event
        opens = self._chat and any("role" in choice.get("delta", ()) for choice in body["choices"])
        self._note(body)
        if not opens or self._indivisible:
            self._begun = True
        if self._sent_for_ids(body) or (opens and self._later):
            return b""
        self._last = event
        if self._later:
            return self._fitting(body)
        self._opening = self._opening or {
            name: body.get(name) for name in ("id", "object", "created", "model")
        }
        return event if self._shows_ids else _without_ids(event)

    def _note(self, body: dict[str, Any]) -> None:
        """Remember what a later slice needs of an event."""
        for choice in body["choices"]:
            delta = choice.get("delta") or {}
            prompt = body.get("prompt_token_ids") or choice.get("prompt_token_ids")
            if prompt and choice["index"] not in self._prompts:
                self._prompts[choice["index"]] = len(prompt) - self._tokens_before
            if ids := choice.get("token_ids"):
                self._ids += b"".join(b"%d," % token for token in ids)
            elif ids is None and "role" not in delta:
                self._indivisible = self._indivisible or "its engine does not say which tokens it is made of"
                self._unread = True
            if delta.get("tool_calls"):
                self._indivisible = self._indivisible or "a tool call is half-way"
            if self._counts_text:
                self._text_length += len(choice.get("text") or "")

    def _sent_for_ids(self, body: dict[str, Any]) -> bool:
        """Whether the engine sent this event only for `return_token_ids`, without words."""
        return not self._shows_ids and any(
            choice.get("delta") == {} and choice.get("finish_reason") is None and choice.get("token_ids")
            for choice in body["choices"]
        )

    def _fitting(self, body: dict[str, Any]) -> bytes:
        """An event of a later slice, as the first slice would have sent it."""
        body |= {name: self._opening[name] for name in ("id", "created")}
        if usage := body.get("usage"):
            usage["prompt_tokens"] -= self._tokens_before
            usage["completion_tokens"] += self._tokens_before
            if cached := (usage.get("prompt_tokens_details") or {}).get("cached_tokens"):
                usage["prompt_tokens_details"]["cached_tokens"] = min(cached, usage["prompt_tokens"])
        for choice in body["choices"]:
            if "prompt_token_ids" in choice:
                choice["prompt_token_ids"] = None
            if not self._shows_ids and "token_ids" in choice:
                choice["token_ids"] = None
            logprobs = choice.get("logprobs") or {}
            if "text_offset" in logprobs:
                logprobs["text_offset"] = [self._text_before + offset for offset in logprobs["text_offset"]]
        return sse.event(body)

    def _rest(self) -> bytes:
        """The client's body, less the tokens that the client has."""
        fields = self._request.all_fields()
        had = self.tokens
        if not self._chat and fields.get("max_tokens") is None:
            fields["max_tokens"] = _COMPLETION_TOKENS
        for name in ("max_tokens", "max_completion_tokens"):
            if fields.get(name) is not None:
                fields[name] -= had
        if fields.get("min_tokens"):
            fields["min_tokens"] = max(0, fields["min_tokens"] - had)
        extra = fields.get("vllm_xargs") or {}
        ids = [*extra.get(CONTINUED, ()), *json.loads(b"[" + self._ids[:-1] + b"]")]
        fields["vllm_xargs"] = {**extra, CONTINUED: ids}
        fields["return_token_ids"] = True
        return to_json(fields)


def _indivisible(fields: Mapping[str, Any], *, chat: bool) -> str:
    """Why an answer can't go on elsewhere once it has begun; empty where it can."""
    if chat and _MAY_DIVIDE.isdisjoint(fields):
        return ""
    prompt, form = fields.get("prompt"), fields.get("response_format") or {}
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    one_text = isinstance(prompt, str) or (
        isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
    )
    free = not fields.get("structured_outputs") and form in ({}, {"type": "text"})
    reasons = {
        "several answers were asked for at once": fields.get("n") not in (None, 1)
        or bool(fields.get("use_beam_search")),
        "its prompt is not one text": not chat and not one_text,
        "a grammar is half-way through it": not free,
        "a tool call is half-way": fields.get("tool_choice") not in (None, "none", "auto"),
        "it is audio": "audio" in (fields.get("modalities") or ()),
        "its prompt is cut to the room that its answer leaves": fields.get("truncate_prompt_tokens") == -1,
        "it begins with its prompt": bool(fields.get("echo")),  # vLLM leaves it out beside ids
        "an option of its looks at all of it": any(fields.get(name) is not None for name in _ALL_OF_IT),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def with_ids(request: InferenceRequest) -> bytes:
    """The body as it came, but asking for token ids."""
    if b'"return_token_ids"' in request.body:  # with any value, null too: the last of two would count
        return to_json({**request.all_fields(), "return_token_ids": True})
    before, _, after = request.body.partition(b"{")
    return before + b'{"return_token_ids":true,' + after


def ids_of(whole: bytes) -> tuple[int, ...]:
    """The tokens of an answer in one piece."""
    match = _WHOLE_IDS.search(whole)
    return tuple(json.loads(match[1])) if match else ()


def without_ids(whole: bytes) -> bytes:
    """An answer in one piece, as it would be without its token ids."""
    return _PROMPT_IDS.sub(_NO_PROMPT_IDS, _WHOLE_IDS.sub(_NO_IDS, whole))


def _without_ids(event: bytes) -> bytes:
    for ids, no_ids in ((_IDS, _NO_IDS), (_PROMPT, _NO_PROMPT_IDS)):
        head, mark, rest = event.partition(ids)
        if mark:
            event = head + no_ids + rest.partition(b"]")[2]
    return event


def _finishes(body: dict[str, Any]) -> bool:
    return any(choice.get("finish_reason") for choice in body.get("choices") or ())


def _status(error: Any) -> int:
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else HTTPStatus.INTERNAL_SERVER_ERROR
