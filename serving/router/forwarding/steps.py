"""A stream of Anthropic's Messages or OpenAI's Responses that breaks off on one slice and goes on on another. Bytes in, bytes out.

Their events are numbered blocks without token ids. One look at the model's output brings the events of a step. The router asks
the engine to end each step with an event that names the step's tokens (serving.engine.protocol). It passes steps on whole and
cuts these events out.

When the stream breaks, the router sends the same body to another slice with the ids so far. The engine there runs the ids through
vLLM's own parsers and converters without showing a word. Then it goes on behind them, so that blocks, usage and texts are those of
one answer (serving.engine.steps). Ids and numbers of a response's later events become those of its first slice.
"""

from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json, to_json

from serving.engine.protocol import (
    CONTINUED,
    CONTINUED_FINISH,
    CONTINUED_STEPS,
    CONTINUED_STOP,
    TELLS_TOKENS,
    TOKENS_EVENT,
    includes_logprobs,
)
from serving.router.forwarding.continuation import Transcript
from serving.router.http import sse
from serving.router.http.protocol import InferenceRequest
from serving.router.http.routes import ROUTES, Dialect

# The one event of most steps. Of a step that begins with another, or has more, all events are looked at.
_DELTAS = (
    b"event: content_block_delta\n",
    b"event: response.output_text.delta\n",
    b"event: response.reasoning_text.delta\n",
)
_OPENINGS = (b"event: message_start\n", b"event: response.created\n", b"event: response.in_progress\n")
_ENDS = (b"event: message_stop\n", b"event: response.completed\n", b"event: response.incomplete\n")
# Quotes are escaped inside JSON strings, so a text never contains one of these.
_CALLS = (b'"type":"tool_use"', b'"type":"function_call"')


class StepTranscript:
    """One streamed answer as its client has it, over all the slices that gave a part of it.

    `body` is what to ask of the next slice. `done` turns true with the answer's end, `failed` where the engine failed.
    """

    speaks = True  # every token shows, at least to the router
    engine_error = b""  # its own words are pydantic's, on an event that was its own error

    def __init__(self, request: InferenceRequest) -> None:
        self.done = False
        self.failed = False
        self.prompt_tokens: int | None = None
        self.body = _asking(request)
        self._request = request
        self._numbered = ROUTES[request.path].dialect is Dialect.OPENAI
        self._indivisible = _indivisible(request.fields)
        self._has_tools = bool(request.fields.get("tools"))
        self._tells: bool | None = None  # whether this slice's engine names tokens
        self._held = b""  # of a step whose end is to come
        self._opening = b""
        self._last = b""  # events that the client got last
        self._begun = False
        self._ids = bytearray()  # as JSON has them, with a semicolon behind each step's
        self._end: dict[str, Any] = {}
        self._later: _Renumbered | None = None

    @property
    def movable(self) -> bool:
        """Whether another slice could go on, or begin anew."""
        return not (self._begun and self._indivisible)

    @property
    def tokens(self) -> int:
        """Tokens that the client has; zero where nobody counts."""
        return self._ids.count(b",") + self._ids.count(b";")

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens that the client has; none where nobody knows them."""
        return tuple(from_json(b"[" + self._ids[:-1].replace(b";", b",") + b"]"))

    def ending(self) -> bytes:
        """Nothing: an answer's last events have texts that the router does not keep."""
        return b""

    def take(self, events: bytes) -> bytes:
        """Whole events of an engine, as the client is to have them; up to the engine's failure if it fails."""
        if self.failed or self.done:
            return b""
        if self._tells is None:
            self._tells = events.startswith(TOKENS_EVENT)
        if not self._tells:
            return self._take_untold(events)
        if self._held:
            events = self._held + events
        shown = []
        step, mark, rest = events.partition(TOKENS_EVENT)
        while mark and not self.failed:
            facts, _, events = rest.partition(sse.END)
            shown.append(self._take_step(step, facts))
            step, mark, rest = events.partition(TOKENS_EVENT)
        self._held = events
        return shown[0] if len(shown) == 1 else b"".join(shown)

    def resume(self) -> str:
        """Make `body` ask for the rest of the answer; returns the reason where another slice can't go on."""
        self.failed = False
        self._tells = None
        self._held = b""
        if self._begun and self._indivisible:
            return self._indivisible
        if self._numbered and self._opening:
            self._later = _Renumbered(self._opening, self._last)
        if self._ids:
            self.body = self._rest()
        return ""

    def _take_untold(self, events: bytes) -> bytes:
        """Events of an engine that does not name tokens."""
        if self._ids:  # it would not go on, but begin anew
            self._indivisible = "another slice's engine does not go on with answers"
            self.failed = True
            return b""
        if sse.NAMED_ERROR in events:
            events, self.failed = events.partition(sse.NAMED_ERROR)[0], True
        self._begun = self._begun or bool(events)
        self._indivisible = self._indivisible or "its engine does not say which tokens it is made of"
        self.done = any(end in events for end in _ENDS)
        return events

    def _take_step(self, step: bytes, facts: bytes) -> bytes:
        """All events of a step, before the rest of the event that names its tokens."""
        ids, _, more = facts.partition(b"]")
        if more != b"}":
            self._note(from_json(b'{"token_ids":[' + facts))
        # Nearly all steps are one token's event, and are not looked into.
        if step and (self._later or not step.startswith(_DELTAS) or sse.count(step) > 1):
            step = self._looked_into(step)
            if self.failed:
                return b""
        if ids:
            self._ids += ids
            self._ids += b";"
        if step:
            self._last = step
            self._begun = self._begun or bool(_unopened(step))
        return step

    def _note(self, facts: Mapping[str, Any]) -> None:
        if "prompt_tokens" in facts:
            self.prompt_tokens = self.prompt_tokens or facts["prompt_tokens"]
        if facts.get("finish_reason"):
            self._end = {CONTINUED_FINISH: facts["finish_reason"]}
            if facts.get("stop_reason") is not None:
                self._end[CONTINUED_STOP] = facts["stop_reason"]

    def _looked_into(self, step: bytes) -> bytes:
        if sse.NAMED_ERROR in step:
            self.failed = True
            return b""
        if step.startswith(_OPENINGS):
            if self._opening:
                step = _unopened(step)
            else:
                self._opening = step
        if self._has_tools and any(call in step for call in _CALLS):
            self._indivisible = self._indivisible or "a tool call is half-way"
        self.done = any(end in step for end in _ENDS)
        return self._later.fitting(step) if self._later else step

    def _rest(self) -> bytes:
        """The client's body, with the tokens that the client has."""
        fields = self._request.all_fields()
        extra = fields.get("vllm_xargs") or {}
        sizes = [step.count(b",") + 1 for step in self._ids[:-1].split(b";")]
        fields["vllm_xargs"] = {
            **extra,
            CONTINUED: list(self.token_ids),
            CONTINUED_STEPS: sizes,
            **self._end,
        }
        fields[TELLS_TOKENS] = True
        return to_json(fields)


class _Renumbered:
    """Events of a response's later slice, as its first slice would have numbered and named them."""

    def __init__(self, opening: bytes, last: bytes) -> None:
        """`opening`: the response's first events; `last`: those that the client got last."""
        response = _fields(sse.split(opening)[0])["response"]
        self._response = {name: response[name] for name in ("id", "created_at")}
        event = _fields(sse.split(last)[-1])
        self._next = event["sequence_number"] + 1
        item = event.get("item") or {}
        closed = event["type"] == "response.output_item.done"
        self._open = "" if closed else event.get("item_id") or item.get("id") or ""
        self._items: dict[str, str] = {}

    def fitting(self, events: bytes) -> bytes:
        return b"".join(map(self._fitting, sse.split(events)))

    def _fitting(self, event: bytes) -> bytes:
        fields = _fields(event)
        fields["sequence_number"] = self._next
        self._next += 1
        if "response" in fields:
            fields["response"] |= self._response
            for item in fields["response"]["output"]:
                item["id"] = self._items.get(item["id"], item["id"])
        item = fields.get("item") or {}
        if fields["type"] == "response.output_item.added":
            self._items[item["id"]] = item["id"]
        for holder, name in ((fields, "item_id"), (item, "id")):
            if name in holder:  # of the item that was open at the cut, or of one that this slice has begun
                holder[name] = self._items.setdefault(holder[name], self._open or holder[name])
        return sse.event(fields, fields["type"])


def _unopened(step: bytes) -> bytes:
    """A step without the events that come before an answer's first token."""
    if not step.startswith(_OPENINGS):
        return step
    return b"".join(event for event in sse.split(step) if not event.startswith(_OPENINGS))


def _fields(event: bytes) -> dict[str, Any]:
    """The fields of an event that has a name."""
    return sse.body(event.partition(b"\n")[2])


def transcript_of(request: InferenceRequest) -> Transcript | StepTranscript | None:
    """None where the answer is no stream of tokens."""
    route = ROUTES.get(request.path)
    if route is None or not request.streams:
        return None
    if route.continued:
        return Transcript(request)
    return StepTranscript(request) if route.steps else None


def _asking(request: InferenceRequest) -> bytes:
    """The body as it came, but asking for events of tokens."""
    name = to_json(TELLS_TOKENS)
    if name in request.body:  # with any value: the last of two would count
        return to_json({**request.all_fields(), TELLS_TOKENS: True})
    before, _, after = request.body.partition(b"{")
    return before + b"{" + name + b":true," + after


def _indivisible(fields: Mapping[str, Any]) -> str:
    """Why an answer can't go on elsewhere once it has begun; empty where it can."""
    reasons = {
        "a grammar is half-way through it": any(
            fields.get(name) for name in ("structured_outputs", "output_config", "text")
        ),
        "a tool call is half-way": not _calls_freely(fields.get("tool_choice")),
        "an option of its looks at all of it": includes_logprobs(fields.get("include")),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _calls_freely(choice: Any) -> bool:
    """Whether the model may choose to call no tool: Anthropic's choices are objects."""
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    return kind in (None, "none", "auto")
