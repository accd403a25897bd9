"""What the simulated engine streams for an ask, without a server: its events as one piece of bytes."""

import json
from typing import Any

from serving.router.http.protocol import InferenceRequest
from serving.simulation.engine.replies import Reply
from serving.simulation.engine.requests import ChatBody, CompletionBody

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
_LENGTH, _SEED = 2048, 0


def ask(path: str, **fields: Any) -> InferenceRequest:
    """A streamed ask as a client writes it."""
    fields = {"model": "llama", "stream": True} | fields
    return InferenceRequest("llama", path, json.dumps(fields).encode(), fields)


def record(asked: InferenceRequest, body: bytes, *, created: int) -> bytes:
    """The answer to a body sent in the ask's place, from an engine whose clock shows `created`."""
    read = ChatBody if asked.path == CHAT else CompletionBody
    order = read.read(json.loads(body)).to_order(_LENGTH, _SEED)
    reply = Reply(order, "llama", str(created), created)
    tokens = max(len(answer.tokens) for _, answer in reply.answers)
    events = [reply.opening()]
    for at in range(tokens):
        events += [
            reply.chunks(index, at, at + 1)
            for index, (_, answer) in enumerate(reply.answers)
            if at < len(answer.tokens)
        ]
    return b"".join([*events, reply.ending()])


def events_of(stream: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in stream.split(b"\n\n") if event]
