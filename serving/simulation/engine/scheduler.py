"""Continuous batching as vLLM 0.26 schedules it (vllm/v1/core/sched/scheduler.py), with time as an argument.

`schedule` decides a step, `complete` ends it; the caller decides how long the step took. Running requests come first, in
the order they arrived; the rest of the step's tokens goes to waiting requests, a long prompt in chunks. Where blocks run
out, the latest request gives its blocks back and starts over from the head of the queue. No other request preempts the
oldest and every step computes a token of it, so no request starves.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from serving.planning import Plan
from serving.planning.cache import separate_batches
from serving.simulation.engine.blocks import BlockPool, chain
from serving.simulation.engine.physics import Batch


@dataclass(frozen=True)
class Limits:
    """The engine's limits; for the whole slice, where groups of its devices schedule apart. `piece`: of one prompt in a step."""

    sequences: int
    batched_tokens: int
    blocks: int
    block_tokens: int
    prefix_caching: bool = True
    piece: float = math.inf

    @classmethod
    def of(cls, plan: Plan) -> "Limits":
        batches = separate_batches(plan.layout)
        block_tokens = plan.fit.page_tokens
        return cls(
            sequences=plan.most_sequences,
            batched_tokens=plan.sizes.batched_tokens * batches,
            blocks=max(plan.fit.cache_tokens, plan.fit.max_model_len) // block_tokens + 1,
            block_tokens=block_tokens,
            # tpu-inference turns prefix caching off for models with a state beside the cache
            prefix_caching=plan.engine.get("enable_prefix_caching", True) and plan.shape.linear is None,
            piece=plan.engine.get("long_prefill_token_threshold") or math.inf,
        )


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and the answer it will get. The scheduler writes every field below `arrived_s`."""

    prompt: Sequence[int]
    answer: Sequence[int]
    arrived_s: float
    written: int = 0
    computed: int = 0
    cached: int = 0
    preemptions: int = 0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    done: bool = False
    cache_salt: str | None = None
    blocks: list[int] = field(default_factory=list)
    names: list[int] = field(default_factory=list)
    named: int = 0
    tokens: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = [*self.prompt, *self.answer]

    @property
    def known(self) -> int:
        """Tokens so far: the prompt's and the written ones."""
        return len(self.prompt) + self.written


@dataclass(frozen=True)
class Step:
    """One forward pass: which request computes how many tokens."""

    work: tuple[tuple[Request, int], ...]
    batch: Batch


@dataclass
class Totals:
    """Counts since the start."""

    prompt_tokens: int = 0
    written_tokens: int = 0
    queried_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    steps: int = 0


class Scheduler:
    """The requests of one engine."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.blocks)
        self.totals = Totals()
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self._now_s = 0.0

    def add(self, request: Request) -> None:
        """Queue a request; raises ValueError for one that could not run even alone and would wait for ever."""
        if not request.prompt or not request.answer:
            raise ValueError("a request has at least one token of prompt and one of answer")
        if self._blocks_for(len(request.tokens)) > self.pool.count:
            raise ValueError(
                f"{len(request.tokens)} tokens do not fit the cache of "
                f"{self.pool.count * self.limits.block_tokens}"
            )
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Forget a request, whether it waits or runs; a request that is done stays done."""
        if request.done:
            return
        request.done = True
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self._release(request)

    def schedule(self, now_s: float) -> Step | None:
        """The next step, or None where there is no work."""
        self._now_s = now_s
        work: list[tuple[Request, int]] = []
        budget, preempted = self._schedule_running(work)
        if not preempted:  # freed blocks do not go to new requests in the same step
            self._schedule_waiting(work, budget, now_s)
        return Step(tuple(work), _batch(work)) if work else None

    def complete(self, step: Step, now_s: float) -> list[Request]:
        """End a step; returns the requests that have one more token, in order. Complete requests leave."""
        self.totals.steps += 1
        written = []
        for request, tokens in step.work:
            if request.done:  # cancelled while the step ran
                continue
            request.computed += tokens
            self._name_full_blocks(request)
            if request.computed == request.known:
                written.append(request)
                self._write(request, now_s)
        if any(request.done for request in written):
            self.running = [request for request in self.running if not request.done]
        return written

    def _schedule_running(self, work: list[tuple[Request, int]]) -> tuple[int, bool]:
        budget, preempted, index = self.limits.batched_tokens, False, 0
        while index < len(self.running) and budget:
            request = self.running[index]
            tokens = self._piece(request.known - request.computed, budget)
            while not self._grow(request, request.computed + tokens):
                preempted = True
                victim = self.running.pop()
                self._preempt(victim)
                if victim is request:
                    break
            else:
                work.append((request, tokens))
                budget -= tokens
                index += 1
        return budget, preempted

    def _schedule_waiting(self, work: list[tuple[Request, int]], budget: int, now_s: float) -> None:
        while self.waiting and budget and len(self.running) < self.limits.sequences:
            request = self.waiting[0]
            shared = self._shared(request)
            cached = len(shared) * self.limits.block_tokens
            tokens = self._piece(request.known - cached, budget)
            blocks = self.pool.take(shared, self._blocks_for(cached + tokens) - len(shared), now_s)
            if blocks is None:
                break
            self.waiting.popleft()
            self.running.append(request)
            request.blocks, request.computed, request.named = blocks, cached, len(shared)
            if request.scheduled_s is None:
                request.scheduled_s, request.cached = now_s, cached
                self.totals.prompt_tokens += len(request.prompt)
                self.totals.queried_tokens += len(request.prompt) if self.limits.prefix_caching else 0
                self.totals.cached_tokens += cached
            work.append((request, tokens))
            budget -= tokens

    def _piece(self, left: int, budget: int) -> int:
        """How many of a request's tokens the step computes."""
        return int(min(left, budget, self.limits.piece))

    def _shared(self, request: Request) -> list[int]:
        """Cached blocks of a request's beginning; its last token is always computed, to get the next token."""
        if not self.limits.prefix_caching:
            return []
        full = (request.known - 1) // self.limits.block_tokens
        self._chain(request, full)
        return self.pool.cached(request.names[:full])

    def _chain(self, request: Request, full: int) -> None:
        size = self.limits.block_tokens
        for index in range(len(request.names), full):
            parent = request.names[-1] if request.names else hash(request.cache_salt or 0)
            request.names.append(chain(parent, request.tokens[index * size : (index + 1) * size]))

    def _name_full_blocks(self, request: Request) -> None:
        full = request.computed // self.limits.block_tokens
        if not self.limits.prefix_caching or full <= request.named:
            return
        self._chain(request, full)
        for index in range(request.named, full):
            self.pool.name(request.blocks[index], request.names[index])
        request.named = full

    def _write(self, request: Request, now_s: float) -> None:
        request.written += 1
        self.totals.written_tokens += 1
        if request.first_token_s is None:
            request.first_token_s = now_s
        request.last_token_s = now_s
        if request.written == len(request.answer):
            request.done = True
            self._release(request)

    def _grow(self, request: Request, tokens: int) -> bool:
        missing = self._blocks_for(tokens) - len(request.blocks)
        if missing <= 0:
            return True
        fresh = self.pool.take((), missing, self._now_s)
        if fresh is None:
            return False
        request.blocks += fresh
        return True

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.computed = 0
        request.preemptions += 1
        self.totals.preemptions += 1
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks = []

    def _blocks_for(self, tokens: int) -> int:
        return math.ceil(tokens / self.limits.block_tokens)


def _batch(work: Sequence[tuple[Request, int]]) -> Batch:
    decodes = prefill = context = pairs = 0
    for request, tokens in work:
        context += request.computed
        if tokens == 1 and request.written:
            decodes += 1
        else:
            prefill += tokens
            pairs += tokens * (request.computed + tokens // 2)
    return Batch(decodes, prefill, len(work), context, pairs)
