"""Has a share of the greedy answers given once more by other slices, beside the clients' requests, and tells of a slice that is wrong.

serving.engine.answer_check decides, the ledger keeps the cost; here are the requests. One answer is looked into at a time, on slices
with free seats and nothing waiting.
"""

import asyncio
import json
import logging
import random
import time
from collections.abc import Callable, Collection
from http import HTTPStatus

from pydantic_core import to_json

from serving.engine.answer_check import MOST_TOKENS, Answer, Ask, Case, Wrong, again, is_greedy, read
from serving.router.forwarding.connecting import UpstreamError
from serving.router.forwarding.ledger import Ledger
from serving.router.forwarding.upstream import Upstream
from serving.router.http.protocol import InferenceRequest
from serving.router.http.routes import ROUTES
from serving.router.scheduling.slice_table import SliceTable
from serving.router.telemetry.record import Checks
from serving.state.records import SliceRecord

logger = logging.getLogger("ray.serve")

_MOST_BYTES = 1 << 16  # of a request that is looked into: its body is parsed once more, in the event loop
_PATIENCE_S = 30.0  # for one answer: a slice that takes longer is busy


class Sentinel:
    """Of one router. `wrong` collects the slices that are, and why, until somebody takes them from there."""

    def __init__(
        self,
        share: float,
        table: SliceTable,
        upstream: Upstream,
        *,
        routers: int = 1,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.ledger = Ledger(routers)
        self.counts: dict[str, Checks] = {}
        self.wrong: list[tuple[SliceRecord, str]] = []
        self._free_seats: Callable[[str], int] = lambda _: 0
        self._share = share
        self._table = table
        self._upstream = upstream
        self._chance = chance
        self._looking: asyncio.Task[None] | None = None

    def samples(self, request: InferenceRequest) -> bool:
        """Whether the answer to this request is to be looked into; asked before the request goes to a slice."""
        if not self._share or self._chance() >= self._share:
            return False
        route = ROUTES.get(request.path)
        # What the router keeps of a request's fields does not tell how its tokens are drawn.
        return (
            route is not None
            and route.continued
            and len(request.body) <= _MOST_BYTES
            and is_greedy(request.all_fields())
        )

    def look(self, request: InferenceRequest, entry: SliceRecord, tokens: tuple[int, ...]) -> None:
        """Look into an answer that a slice has given whole; at most one at a time."""
        if tokens and (self._looking is None or self._looking.done()):
            self._looking = asyncio.create_task(self._look(request, entry, tokens[:MOST_TOKENS]))

    def settle(self, replicas: Collection[str], free_seats: Callable[[str], int]) -> None:
        """Once a beat: take over which slices there are, and how many more sequences each model's slices may run."""
        self.ledger.keep(replicas, time.monotonic())
        self._free_seats = free_seats

    def close(self) -> None:
        if self._looking:
            self._looking.cancel()

    async def _look(self, request: InferenceRequest, entry: SliceRecord, tokens: tuple[int, ...]) -> None:
        case = Case({entry.replica: Answer(tokens)})
        counts = self.counts.setdefault(entry.model, Checks())
        body = to_json(again(request.all_fields(), len(tokens), chat=ROUTES[request.path].opens))
        while isinstance(step := case.next(self._others(entry, case)), Ask):
            answer = await self._ask(step.replica, request, body)
            if answer is None:
                return
            case.take(step.replica, answer)
        if len(case.answers) == 1:
            return
        counts.looked += 1
        counts.differed += bool(case.differing)
        self.ledger.note(case)
        if isinstance(step, Wrong):
            counts.wrong += 1
            self._tell(step)

    def _tell(self, wrong: Wrong) -> None:
        entry = self._table.entry(wrong.replica)
        others = [other.slice for replica in wrong.others if (other := self._table.entry(replica))]
        if entry:
            reason = (
                f"it gave other tokens than slices {' and '.join(others)} for the same greedy request, twice"
            )
            logger.error("slice %s of %s gives wrong tokens: %s", entry.slice, entry.model, reason)
            self.wrong.append((entry, reason))

    def _others(self, entry: SliceRecord, case: Case) -> list[str]:
        """Further slices with the same engine and free seats, the one with the least to do first.

        The first of them has to have time left for it. What answers that differ cost beyond that is made up for afterwards.
        """
        now_s = time.monotonic()
        if self._free_seats(entry.model) <= 0:
            return []
        able = [
            other
            for other in self._table.entries(entry.model)
            if other.serves
            and not other.waiting
            and other.replica not in case.answers
            and (other.deployment, other.version) == (entry.deployment, entry.version)
            and (len(case.answers) > 1 or self.ledger.may_ask(other.replica, now_s))
        ]
        return [other.replica for other in sorted(able, key=lambda other: other.running)]

    async def _ask(self, replica: str, request: InferenceRequest, body: bytes) -> Answer | None:
        """The answer of one slice; None where it gives none."""
        entry = self._table.entry(replica)
        if entry is None or not entry.serves:
            return None
        began_s = time.monotonic()
        self._table.begin(replica)
        try:
            async with asyncio.timeout(_PATIENCE_S):
                response = await self._upstream.post(entry, request, body, {})
                try:
                    whole = await response.read()
                finally:
                    response.close()
            return read(json.loads(whole)) if response.status == HTTPStatus.OK else None
        except (UpstreamError, TimeoutError, ValueError, LookupError, TypeError):
            return None
        finally:
            self._table.end(replica)
            # A step is shared by all requests that run.
            self.ledger.spent(replica, (time.monotonic() - began_s) / (entry.running + 1))
