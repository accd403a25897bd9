"""Answers as vLLM 0.26 writes them: chunks of a stream, token by token, and whole ones.

A stream's chunks differ in a few bytes; the rest is made once a request.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from http import HTTPStatus
from typing import Any

from serving.simulation.engine import tokenizer
from serving.simulation.engine.orders import Order
from serving.simulation.engine.text import Answer, alternatives, logprob

DONE = b"data: [DONE]\n\n"


@lru_cache(maxsize=4096)
def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def event(body: Any) -> bytes:
    """One server-sent event."""
    return f"data: {_compact(body)}\n\n".encode()


class Reply:
    """How the answers to one order are written."""

    at_once = False  # the first event comes with the first token

    def __init__(self, order: Order, model: str, request_id: str, created: int) -> None:
        self._order = order
        self._answers = order.answers()
        self._model = model
        self._created = created
        self.id = ("chatcmpl-" if order.chat else "cmpl-") + request_id
        kind = "chat.completion.chunk" if order.chat else "text_completion"
        self._head = f'data: {{"id":{_quoted(self.id)},"object":"{kind}","created":{created},"model":{_quoted(model)},"choices":['
        self._offsets = [0] * len(self._answers)

    @property
    def answers(self) -> list[tuple[list[int], Answer]]:
        return self._answers

    def opening(self) -> bytes:
        """The chunk of a chat stream before its first token: the role."""
        if not self._order.chat:
            return b""
        prompt_ids = _compact(self._order.prompts[0]) if self._order.token_ids else "null"
        usage = self._usage_so_far(0, 0)
        return "".join(
            f'{self._head}{{"index":{index},"delta":{{"role":"assistant","content":""}},"logprobs":null,'
            f'"finish_reason":null}}]{usage},"prompt_token_ids":{prompt_ids},"prompt_text":null}}\n\n'
            for index in range(len(self._answers))
        ).encode()

    def chunks(self, index: int, start: int, end: int) -> bytes:
        """The events of a choice's tokens from `start` up to `end`."""
        return "".join(self._chunk(index, position) for position in range(start, end)).encode()

    def ending(self) -> bytes:
        """The end of a stream, once every choice has ended."""
        if not self._order.usage:
            return DONE
        usage = _compact({"usage": _usage(self._order.prompt_tokens, self._answer_tokens())})
        return f"{self._head}],{usage[1:]}\n\n".encode() + DONE

    def failure(self, message: str) -> bytes:
        """The end of a stream under which the engine died."""
        error = {
            "message": message,
            "type": "InternalServerError",
            "param": None,
            "code": HTTPStatus.INTERNAL_SERVER_ERROR,
        }
        return event({"error": error}) + DONE

    def whole(self) -> dict[str, Any]:
        """All choices at once."""
        choices = [self._whole_choice(index) for index in range(len(self._answers))]
        usage = _usage(self._order.prompt_tokens, self._answer_tokens())
        usage["prompt_tokens_details"] = None
        body: dict[str, Any] = {
            "id": self.id,
            "object": "chat.completion" if self._order.chat else "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": None,
            "usage": usage,
        }
        if self._order.chat:
            body["prompt_logprobs"] = None
            body["prompt_token_ids"] = self._order.prompts[0] if self._order.token_ids else None
            body["prompt_text"] = None
        return {**body, "kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}

    def _chunk(self, index: int, position: int) -> str:
        prompt, answer = self._answers[index]
        text, token = answer.texts[position], answer.tokens[position]
        last = position == len(answer.tokens) - 1
        logprobs = (
            "null"
            if self._order.logprobs is None
            else _compact(self._logprobs(index, position, position + 1))
        )
        finish = f'"{self._finish(answer)}"' if last else "null"
        stop = _compact(answer.stop_reason) if last else "null"
        ids = f"[{token}]" if self._order.token_ids else "null"
        usage = self._usage_so_far(len(prompt), position + 1)
        if self._order.chat:
            reason = f',"stop_reason":{stop}' if last else ""
            return (
                f'{self._head}{{"index":{index},"delta":{self._delta(index, position, text)},"logprobs":{logprobs},'
                f'"finish_reason":{finish}{reason},"token_ids":{ids}}}]{usage}}}\n\n'
            )
        prompt_ids = _compact(prompt) if self._order.token_ids and position == 0 else "null"
        return (
            f'{self._head}{{"index":{index},"text":{_quoted(text)},"logprobs":{logprobs},"finish_reason":{finish},'
            f'"stop_reason":{stop},"prompt_token_ids":{prompt_ids},"token_ids":{ids}}}]{usage}}}\n\n'
        )

    def _delta(self, index: int, position: int, text: str) -> str:
        if self._order.tool is None:
            return f'{{"content":{_quoted(text)}}}'
        if not text:
            return "{}"
        if position == 0:
            start = f'"id":"{self._call_id(index)}","type":"function",'
            named = f'"name":{_quoted(self._order.tool)},'
        else:
            start = named = ""
        return f'{{"tool_calls":[{{{start}"index":0,"function":{{{named}"arguments":{_quoted(text)}}}}}]}}'

    def _whole_choice(self, index: int) -> dict[str, Any]:
        prompt, answer = self._answers[index]
        text = "".join(answer.texts)
        shown = {
            "logprobs": None
            if self._order.logprobs is None
            else self._logprobs(index, 0, len(answer.tokens)),
            "finish_reason": self._finish(answer),
            "stop_reason": answer.stop_reason,
            "token_ids": answer.tokens if self._order.token_ids else None,
        }
        if not self._order.chat:
            prompt_ids = prompt if self._order.token_ids else None
            return {
                "index": index,
                "text": text,
                **shown,
                "prompt_logprobs": None,
                "prompt_token_ids": prompt_ids,
                "routed_experts": None,
            }
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text if self._order.tool is None else None,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
        }
        if self._order.tool is not None:
            function = {"name": self._order.tool, "arguments": text}
            message["tool_calls"] = [{"id": self._call_id(index), "type": "function", "function": function}]
        message["reasoning"] = None
        return {"index": index, "message": message, **shown, "routed_experts": None}

    def _logprobs(self, index: int, start: int, end: int) -> dict[str, Any]:
        prompt, answer = self._answers[index]
        count = self._order.logprobs or 0
        rows = [
            (token, logprob(token, at), alternatives(token, at, count))
            for at, token in enumerate(answer.tokens[start:end], len(prompt) + start)
        ]
        if self._order.chat:
            return {
                "content": [
                    {**self._row(token, value), "top_logprobs": [self._row(*pair) for pair in top]}
                    for token, value, top in rows
                ]
            }
        offsets = []
        for text in answer.texts[start:end]:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "text_offset": offsets,
            "token_logprobs": [value for _, value, _ in rows],
            "tokens": [self._name(token) for token, _, _ in rows],
            "top_logprobs": [
                {self._name(token): value for token, value in top} or None for _, _, top in rows
            ],
        }

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._order.names_ids else tokenizer.decode((token,))

    def _row(self, token: int, value: float) -> dict[str, Any]:
        name = self._name(token)
        return {"token": name, "logprob": value, "bytes": list(name.encode("utf-8", "surrogatepass"))}

    def _finish(self, answer: Answer) -> str:
        """A named tool ends with `stop`, a tool that the model chose with `tool_calls`."""
        if self._order.tool is not None and not self._order.tool_named and answer.finish == "stop":
            return "tool_calls"
        return answer.finish

    def _call_id(self, index: int) -> str:
        return f"chatcmpl-tool-{self.id[-16:]}{index}"

    def _answer_tokens(self) -> int:
        return sum(len(answer.tokens) for _, answer in self._answers)

    def _usage_so_far(self, prompt_tokens: int, written: int) -> str:
        if not self._order.usage_always:
            return ""
        return f',"usage":{_compact(_usage(prompt_tokens or self._order.prompt_tokens, written))}'


def _usage(prompt_tokens: int, written: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + written,
        "completion_tokens": written,
    }


def _compact(value: Sequence[int] | dict[str, Any] | str | int | None) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
