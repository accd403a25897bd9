"""What both engines know beyond vLLM's own requests and answers, and where sampling parameters stand. Pure."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

# In `vllm_xargs`: ids of the tokens that another engine gave already. This engine goes on behind them.
CONTINUED = "continued_token_ids"
# Beside it: why that other engine ended the answer, where the last of these tokens was the answer's last, and its stop string.
CONTINUED_FINISH, CONTINUED_STOP = "continued_finish_reason", "continued_stop_reason"
# And how many of the tokens came together, step by step: parsers may read three at once otherwise than one after the other.
CONTINUED_STEPS = "continued_steps"
# A field of `/v1/messages` and `/v1/responses`, whose events name no tokens: the stream begins with an event of tokens, and so does
# whatever an engine sends at once end. A client that has everything up to such an event has these tokens, and nothing of later ones.
TELLS_TOKENS = "tells_token_ids"
TOKENS_EVENT = b'event: serving.tokens\ndata: {"token_ids":['
# What of `include` has vLLM give logprobs of a response; it passes over all else that may stand there.
_LOGPROBS = "message.output_text.logprobs"
# A small file may unpack to gigabytes; a photograph of a good camera has 50 million pixels. A router bounds a request's pictures
# by this, an engine each of them.
MOST_PIXELS = 64 << 20


def tokens_event(token_ids: Iterable[int] = (), **facts: Any) -> str:
    """The event behind a step's other events.

    `facts`: `prompt_tokens` of the client's own prompt once, and at the answer's end `finish_reason` and `stop_reason`.
    """
    fields = json.dumps({"token_ids": list(token_ids), **facts}, separators=(",", ":"))
    return f"event: serving.tokens\ndata: {fields}\n\n"


def includes_logprobs(include: Any) -> bool:
    """Whether a request for `/v1/responses` asks for logprobs, as vLLM reads its `include`."""
    return isinstance(include, list) and _LOGPROBS in include


def sampling_holders(fields: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """What of a request may hold sampling parameters: itself, and on vLLM's token routes its `sampling_params`."""
    sampling = fields.get("sampling_params")
    return (fields, sampling) if isinstance(sampling, dict) else (fields,)
