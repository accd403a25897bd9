"""What the simulated engine streams for an ask, without a server: its events as one piece of bytes."""

import json
from typing import Any

from serving.router.http.protocol import InferenceRequest
from serving.simulation.engine import messages, responses
from serving.simulation.engine.http import AnyReply
from serving.simulation.engine.messages import MessagesReply
from serving.simulation.engine.replies import Reply
from serving.simulation.engine.requests import ChatBody, CompletionBody
from serving.simulation.engine.responses import ResponsesReply

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
HELLO = [{"role": "user", "content": "Hello"}]
_LENGTH, _SEED = 2048, 0


def ask(path: str, **fields: Any) -> InferenceRequest:
    """A streamed ask as a client writes it."""
    fields = {"model": "llama", "stream": True} | fields
    return InferenceRequest("llama", path, json.dumps(fields).encode(), fields)


def record(asked: InferenceRequest, body: bytes, *, created: int) -> bytes:
    """The answer to a body sent in the ask's place, from an engine whose clock shows `created`."""
    reply = _reply(asked.path, json.loads(body), created)
    tokens = max(len(answer.tokens) for _, answer in reply.answers)
    events = [reply.opening()]
    for at in range(tokens):
        events += [
            reply.chunks(index, at, at + 1)
            for index, (_, answer) in enumerate(reply.answers)
            if at < len(answer.tokens)
        ]
    return b"".join([*events, reply.ending()])


def _reply(path: str, fields: dict[str, Any], created: int) -> AnyReply:
    name = str(created)
    if path == MESSAGES:
        return MessagesReply(messages.order_of(fields, _LENGTH, _SEED), "llama", name)
    if path == RESPONSES:
        order = responses.order_of(fields, _LENGTH, _SEED)
        return ResponsesReply(order, fields, "llama", name, created)
    read = ChatBody if path == CHAT else CompletionBody
    return Reply(read.read(fields).to_order(_LENGTH, _SEED), "llama", name, created)


def events_of(stream: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in stream.split(b"\n\n") if event]
