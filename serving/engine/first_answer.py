"""A slice that has just started gives the same first answer as the slices that serve, or does not begin to serve."""

import asyncio
import json
from collections.abc import Mapping
from http import HTTPStatus

import aiohttp

from serving import pinned_tls, secret
from serving.engine.answer_check import Answer, Ask, Case, Wrong, again, read
from serving.state.records import Peer

_PROMPT = "The capital of France is Paris. The capital of Italy is"
_TOKENS = 16
_PATIENCE_S = 20.0
_MOST_ASKED = 4  # slices: two have to answer, and some may be leaving or too busy


async def wrong_at_start(model: str, own: str, others: Mapping[str, Peer]) -> Wrong | None:
    """Who gives wrong tokens: the slice `own`, or one of those that serve. None where nobody does, or too few answer.

    `others` has slices with the same engine, `own` among them, by replica.
    """
    fields = {"model": model, "prompt": _PROMPT, "temperature": 0, "ignore_eos": True}
    body = json.dumps(again(fields, _TOKENS, chat=False)).encode()
    async with aiohttp.ClientSession(headers=secret.headers(secret.of_this_process())) as session:
        first = await _ask(session, others[own], body)
        if first is None:  # a model that generates nothing
            return None
        case = Case({own: first})
        left = [replica for replica in others if replica != own][:_MOST_ASKED]
        while isinstance(
            step := case.next([replica for replica in left if replica not in case.answers]), Ask
        ):
            answer = await _ask(session, others[step.replica], body)
            if answer is not None:
                case.take(step.replica, answer)
            elif step.replica in case.answers:
                return None
            else:
                left.remove(step.replica)
    return step


async def _ask(session: aiohttp.ClientSession, peer: Peer, body: bytes) -> Answer | None:
    headers = {"content-type": "application/json"}
    try:
        async with (
            asyncio.timeout(_PATIENCE_S),
            session.post(
                f"{peer.address}/v1/completions",
                data=body,
                headers=headers,
                ssl=pinned_tls.of(peer.certificate),
            ) as response,
        ):
            return read(await response.json()) if response.status == HTTPStatus.OK else None
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError):
        return None
