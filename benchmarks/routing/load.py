"""Conversations that begin at random times whatever becomes of those before them, and what came of them."""

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.routing.policies import MODEL, Policy
from serving.simulation.engine.tokenizer import WORDS

CHAT = "/v1/chat/completions"
TTFT_S, TPOT_S = 0.5, 0.05
TIMEOUT_S = 60


@dataclass(frozen=True)
class Load:
    """Conversations a second, their turns, and tokens: of a system prompt (of so many), asked and answered a turn.

    With `tool_tokens`, those of a list of tools that all have, conversations are an agent's: what follows its first turn are results.
    """

    name: str
    per_s: float
    turns: tuple[int, int]
    asked: tuple[int, int]
    answered: tuple[int, int]
    system_prompts: int = 0
    system_tokens: int = 0
    tool_tokens: int = 0
    think_s: float = 0.5


LOADS = (
    Load("multi-turn chat", 2.6, (3, 6), (500, 3000), (15, 40)),
    Load("shared system prompts", 12.0, (1, 1), (50, 400), (15, 40), system_prompts=24, system_tokens=6000),
    Load("nothing shared", 8.0, (1, 1), (1000, 9000), (15, 40)),
    Load(
        "agents",
        1.0,
        (6, 12),
        (100, 1500),
        (15, 40),
        system_prompts=1,
        system_tokens=3000,
        tool_tokens=4000,
        think_s=0.2,
    ),
)


@dataclass
class Seen:
    """What came of one load through one router."""

    policy: str
    load: str
    seconds: float
    requests: int = 0
    refused: int = 0
    good: int = 0
    first_s: list[float] = field(default_factory=list)
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0

    def add(self, other: "Seen") -> None:
        """Another round of the same."""
        self.requests += other.requests
        self.refused += other.refused
        self.good += other.good
        self.first_s += other.first_s
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens

    def row(self) -> str:
        first = statistics.quantiles(self.first_s, n=100) if len(self.first_s) > 1 else [0.0] * 99
        return (
            f"| {self.load} | {self.policy} | {self.cached_tokens / max(1.0, self.prompt_tokens):.0%} "
            f"| {first[49] * 1000:.0f} | {first[98] * 1000:.0f} | {self.good / self.requests:.1%} "
            f"| {self.refused} of {self.requests} |"
        )


HEAD = (
    f"| load | choice of slice | hits | TTFT p50, ms | p99, ms | good: TTFT {TTFT_S * 1000:.0f} ms, TPOT "
    f"{TPOT_S * 1000:.0f} ms | refused |\n|---|---|---|---|---|---|---|"
)


def words(draw: random.Random, tokens: int) -> str:
    """Each word of the simulated engine's vocabulary, with the space before it, is a token."""
    return " ".join(draw.choices(WORDS, k=tokens))


class Client:
    """The conversations of one load."""

    def __init__(
        self, session: aiohttp.ClientSession, addresses: Sequence[str], load: Load, seen: Seen
    ) -> None:
        self._session = session
        self._addresses = addresses
        self._load = load
        self._seen = seen
        self._own = f"{seen.policy} {time.time()}: "
        self._tools = _tools(self._own, load.tool_tokens)

    async def run(self, seed: int) -> None:
        """All of them: begin at random times for `seconds`, end when they end."""
        load, draw, own = self._load, random.Random(seed), self._own
        systems = [own + words(draw, load.system_tokens) for _ in range(load.system_prompts)]
        talks, now_s = [], 0.0
        while (now_s := now_s + draw.expovariate(load.per_s)) < self._seen.seconds:
            system = draw.choice(systems) if systems else ""
            talks.append(self._talk(now_s, system, own, random.Random(draw.random())))
        await asyncio.gather(*talks)

    async def _talk(self, begins_s: float, system: str, own: str, draw: random.Random) -> None:
        load = self._load
        messages: list[dict[str, object]] = [{"role": "system", "content": system}] if system else []
        await asyncio.sleep(begins_s)
        for turn in range(draw.randint(*load.turns)):
            asked = words(draw, draw.randint(*load.asked))
            if turn and load.tool_tokens:
                messages.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": asked})
            else:
                messages.append({"role": "user", "content": asked if turn or system else own + asked})
            answer = await self._ask(messages, draw.randint(*load.answered), draw)
            if answer is None:
                return
            messages.append({"role": "assistant", "content": answer} | _call(turn + 1, load))
            await asyncio.sleep(draw.expovariate(1 / load.think_s))

    async def _ask(self, messages: list[dict[str, object]], tokens: int, draw: random.Random) -> str | None:
        body = {"model": MODEL, "messages": messages, "stream": True, "max_tokens": tokens, **self._tools}
        seen, sent_s, first_s, said, whole = self._seen, time.perf_counter(), 0.0, [], False
        seen.requests += 1
        try:
            async with self._session.post(
                draw.choice(self._addresses) + CHAT, json=body | {"ignore_eos": True}
            ) as answer:
                async for line in answer.content:
                    whole = whole or line.startswith(b"data: [DONE]")
                    if not line.startswith(b"data: {") or not (text := _text(line)):
                        continue
                    first_s = first_s or time.perf_counter()
                    said.append(text)
        except (aiohttp.ClientError, TimeoutError):
            whole = False
        if answer_failed := not (whole and said and answer.status == 200):
            seen.refused += answer_failed
            return None
        seen.first_s.append(first_s - sent_s)
        tpot_s = (time.perf_counter() - first_s) / max(1, len(said) - 1)
        seen.good += seen.first_s[-1] <= TTFT_S and tpot_s <= TPOT_S
        return "".join(said)


def _tools(own: str, tokens: int) -> dict[str, object]:
    """Twenty of so many tokens together. The engine takes no call for an answer here: its answers are of a length."""
    if not tokens:
        return {}
    draw = random.Random(tokens)
    tools = [
        {
            "type": "function",
            "function": {
                "name": f"tool_{number}",
                "parameters": {"type": "object", "description": own + words(draw, tokens // 20)},
            },
        }
        for number in range(20)
    ]
    return {"tools": tools, "tool_choice": "none"}


def _call(number: int, load: Load) -> dict[str, object]:
    """What an agent's answer has beside its text."""
    if not load.tool_tokens:
        return {}
    function = {"name": f"tool_{number % 20}", "arguments": "{}"}
    return {"tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}]}


def _text(line: bytes) -> str:
    choices = json.loads(line[6:]).get("choices") or [{}]
    return (choices[0].get("delta") or {}).get("content") or ""


async def counted(session: aiohttp.ClientSession, address: str) -> dict[str, float]:
    """An engine's own figures, by vLLM's names."""
    async with session.get(f"{address}/metrics") as answer:
        families = text_string_to_metric_families(await answer.text())
        return {
            sample.name.removeprefix("vllm:"): sample.value for each in families for sample in each.samples
        }


async def play(
    policy: Policy,
    addresses: Sequence[str],
    engines: Sequence[str],
    load: Load,
    seconds: float,
    seed: int = 0,
) -> Seen:
    seen = Seen(policy.name, load.name, seconds)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        before = [await counted(session, engine) for engine in engines]
        await Client(session, addresses, load, seen).run(seed)
        for engine, then in zip(engines, before, strict=True):
            now = await counted(session, engine)
            seen.prompt_tokens += now["prefix_cache_queries_total"] - then["prefix_cache_queries_total"]
            seen.cached_tokens += now["prefix_cache_hits_total"] - then["prefix_cache_hits_total"]
    return seen
