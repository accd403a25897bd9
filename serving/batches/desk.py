"""The batches of a service at work: has inputs read and results written, hands lines out to routers, keeps what comes back.

All that has to outlive this process is in the ledger. Here is only which router has which line now: routers say it again with
every question, and a line whose router has fallen silent goes to another. A line may so be asked twice of a model after a kill;
the ledger keeps one result.
"""

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from sqlalchemy import Row

from serving.batches import lines
from serving.batches.content import Content
from serving.batches.files import Folder
from serving.batches.in_turn import InTurn
from serving.batches.ledger import Ledger, Result, ToDo
from serving.batches.lifecycle import ASSEMBLING, Event, State
from serving.batches.storage_calls import StorageCalls
from serving.batches.work import Bodies, Coming, Work
from serving.config import BatchSpec
from serving.errors import StorageError

logger = logging.getLogger("ray.serve")

Held = tuple[str, int]  # a batch and a line of it

TICK_S = 1.0
_OWNED_S = 15.0  # after which another process takes the batches of one that is silent
_SILENT_S = 15.0  # after which a router that has said nothing of a line no longer has it
_SWEEP, _SWEEP_S = "the sweep", 60.0
_ALIVE_S = 5.0  # a router has asked within this time
_LEAST_LEFT_S = 60.0  # what is late is due in a minute
_LONGEST_WAIT_S = 60.0  # of lines whose key is over its budget: the operator may raise it
# A file of keys reaches the hosts of routers at different times. A router that does not know a key yet is no proof that it is revoked.
_UNKNOWN_KEY_S, _REVOKED_S = 10.0, 180.0
_UNREAD_S = 10.0  # before lines that could not be read are looked for again
_TRIES = 5  # of a line on which engines or slices fail
_AHEAD = 200  # lines of a batch that are looked up at once
_MOST_OPEN = 32  # inputs that stay open between two questions; each has a buffer of a MiB, and thousands of batches may be at work
_MOST_TAKEN_BYTES = 8 << 20  # of lines in one answer to a router; one line alone may be longer
_READ_S = 5.0  # that a router is kept for lines that are being read, unless others have been for a while: it asks again
_MOST_COMING = 16  # batches whose lines are read at once, so that few bodies wait here


class Desk:
    """The batches that this process owns."""

    def __init__(
        self,
        ledger: Ledger,
        folder: Folder,
        spec: BatchSpec,
        models: Collection[str],
        most_line_bytes: int,
        *,
        calls: StorageCalls | None = None,
        clock: Callable[[], float] = time.monotonic,
        calendar: Callable[[], float] = time.time,
        read_s: float = _READ_S,
    ) -> None:
        """`models` are the names that a line may ask for."""
        self._calls = calls or StorageCalls()
        self._read_s = read_s
        self._ledger = ledger
        self._folder = folder
        self._spec = spec
        self._models = frozenset(models)
        self.content = Content(ledger, folder, self._calls, spec, self._models, most_line_bytes, calendar)
        self._clock = clock
        self._calendar = calendar
        self.owned: Mapping[str, Row[Any]] = {}  # every batch that is not over, as the last tick saw it
        self._works: dict[str, Work] = {}
        self._open: dict[str, Work] = {}  # whose input may be open; that of the latest question stands last
        self._out: dict[Held, tuple[str, float]] = {}  # the router that has a line, and when it said so last
        self._tries: Counter[Held] = Counter()
        self._waits: dict[str, float] = {}  # keys, until when their lines wait
        self._unknown_s: dict[str, float] = {}  # keys that routers do not know, and since when
        self._routers: dict[str, float] = {}  # when each asked last
        self._rates: dict[str, float] = {}  # lines a second that slices are to be ordered for, by model
        self._turns = InTurn()  # batches that are read, or whose files are written
        self._sweeping = InTurn()
        self._swept_s = -math.inf
        self._began_s = clock()
        self._taking = asyncio.Lock()

    async def tick(self) -> None:
        """Once a second: own batches, and begin what is next for each."""
        now_s = self._calendar()
        batches = await self._ledger.own(now_s, _OWNED_S, self._clock())
        owned = self.owned = {batch.id: batch for batch in batches}
        for name, batch in owned.items():
            state = State(batch.state)
            if now_s >= batch.expires_s and state in (State.VALIDATING, State.IN_PROGRESS):
                await self._ledger.happen(name, Event.EXPIRE, now_s)
            elif state is State.VALIDATING:
                self._turns.begin(name, batch.key, partial(self.content.read, batch))
            elif state in ASSEMBLING:
                self._turns.begin(name, batch.key, partial(self.content.assemble, batch))
            elif batch.completed + batch.failed >= batch.total:
                await self._ledger.happen(name, Event.DONE, now_s)
        self._turns.forget_all_but(owned)
        async with self._taking:
            self._follow({name: batch for name, batch in owned.items() if batch.state == State.IN_PROGRESS})
        if self._spec.may_scale:
            self._rates = await self._due([work.batch for work in self._works.values()], now_s)
        if self._clock() - self._swept_s >= _SWEEP_S:
            self._swept_s = self._clock()
            self._sweeping.begin(
                _SWEEP, _SWEEP, self.content.sweep
            )  # a bucket takes its time for thousands of files

    async def take(
        self, router: str, wants: Sequence[Mapping[str, Any]], holding: Collection[Held]
    ) -> dict[str, Any]:
        """Lines for a router. `wants`: `names` of models that share seats, and how many lines at `most`; `holding`: what it has.

        `drop` of the answer are lines on which work is for nothing.
        """
        async with self._taking:
            now_s = self._clock()
            drop = []
            reported = set(holding)
            for held, (holder, _) in list(self._out.items()):
                if (
                    holder == router and held not in reported
                ):  # an answer was lost, or the router gives lines back
                    del self._out[held]
                    if work := self._works.get(held[0]):
                        work.returned()
            for held in holding:
                if held[0] in self._works:
                    self._out[held] = router, now_s
                else:
                    drop.append(held)
            given: list[dict[str, Any]] = []
            late = any(work.coming and work.coming.is_late for work in self._works.values())
            until_s = asyncio.get_running_loop().time() + (0 if late else self._read_s)
            # A router that had lines before this process began says so first.
            if now_s - self._began_s >= 2 * TICK_S:
                for want in wants:
                    given += await self._take(router, frozenset(want["names"]), int(want["most"]), until_s)
            self._not_silent_since(now_s)
            self._routers[router] = now_s
            alive = sum(now_s - said_s < _ALIVE_S for said_s in self._routers.values())
            rates = {model: rate / alive for model, rate in self._rates.items()}
            return {"lines": given, "drop": drop, "rates": rates}

    async def commit(self, results: Sequence[Mapping[str, Any]]) -> None:
        """Keep what routers bring: `status`, `body` and `request_id` of a line; `again` where another try may do better.

        With `wait_s` the line was not asked, for its key is over its budget: its key's lines wait for so long.
        """
        by_batch: dict[str, list[Mapping[str, Any]]] = {}
        for result in results:
            by_batch.setdefault(result["batch"], []).append(result)
        for name, of_batch in by_batch.items():
            await self._keep(name, of_batch)

    def why(self, batch: str) -> str:
        """What a batch waits for, where it is the storage of files."""
        work = self._works.get(batch)
        return work.why if work else self._turns.why.get(batch, "")

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            try:
                await self.tick()
            except StorageError as error:
                logger.error("batches stand still; the next beat tries again: %s", error.message)  # noqa: TRY400  it says it all
            except Exception:
                logger.exception("batches stand still; the next beat tries again")
            await asyncio.sleep(TICK_S)

    async def close(self) -> None:
        await self._turns.close()
        await self._sweeping.close()
        for work in self._works.values():
            work.close()
        try:
            await self._ledger.disown()
        except StorageError as error:
            logger.warning("others take this process's batches once it has been silent: %s", error.message)

    async def idle(self) -> None:
        """Wait until nothing is read or assembled."""
        await self._turns.idle()
        await self._sweeping.idle()

    async def _keep(self, name: str, of_batch: Sequence[Mapping[str, Any]]) -> None:
        """Results of one batch."""
        final, failed, kept = [], [], None
        for result in of_batch:
            held = name, result["line"]
            wait_s = result.get("wait_s")
            if wait_s is None and self._is_of_unknown_key(name, result["status"]):
                wait_s = _UNKNOWN_KEY_S
            if wait_s is not None:
                self._wait(name, wait_s)
            elif not result["again"]:
                final.append(result)
            elif held in self._out:  # else it was brought before, and its answer was lost
                failed.append(held)
                if self._tries[held] + 1 >= _TRIES:
                    final.append(result)
        if (work := self._works.get(name)) and work.coming:
            work.coming.numbers.difference_update(result["line"] for result in final)
        if final:
            names = await self._ledger.custom_ids(name, [result["line"] for result in final])
            texts = await asyncio.to_thread(_results, name, final, names)
            kept = await self._ledger.commit(name, texts, self._calendar())
        self._tries.update(failed)
        taken_back = [result for result in of_batch if self._out.pop((name, result["line"]), None) is None]
        # What is not kept is still to do, if the batch is still this process's; a line that was taken back from its router no more.
        if (len(final) < len(of_batch) or kept is None or taken_back) and (work := self._works.get(name)):
            work.returned()

    async def _due(self, batches: Sequence[Row[Any]], now_s: float) -> dict[str, float]:
        """Lines a second at which each batch is done in time, by the model of its next line."""
        rates: Counter[str] = Counter()
        for batch in batches:
            # Most batches ask one model alone, and there may be thousands of them.
            model = batch.model or await self._ledger.next_model(batch.id)
            due_s = min(batch.expires_s, batch.created_s + (self._spec.deadline_s or math.inf))
            if model:
                left = batch.total - batch.completed - batch.failed
                rates[model] += left / max(due_s - now_s, _LEAST_LEFT_S)
        return dict(rates)

    def _follow(self, batches: Mapping[str, Row[Any]]) -> None:
        """Take over which batches are in progress, and take lines back from routers that are silent."""
        for name in self._works.keys() - batches.keys():
            self._works.pop(name).close()
            self._open.pop(name, None)
        for name, batch in batches.items():
            if name not in self._works and batch.model is not None and batch.model not in self._models:
                logger.warning(
                    "batch %s waits: this service no longer has its model %r; put it back, or cancel the batch",
                    name,
                    batch.model,
                )
            self._works.setdefault(name, Work(batch)).batch = batch
        now_s = self._clock()
        for held, (router, said_s) in list(self._out.items()):
            work = self._works.get(held[0])
            if work is None or now_s - said_s >= _SILENT_S:
                del self._out[held]
                if work:
                    logger.warning(
                        "router %s is silent: line %d of %s goes to another", router, held[1], held[0]
                    )
                    work.returned()
        for held in [held for held in self._tries if held[0] not in self._works]:
            del self._tries[held]
        keys = {work.batch.key for work in self._works.values()}
        self._unknown_s = {key: since_s for key, since_s in self._unknown_s.items() if key in keys}

    async def _take(
        self, router: str, names: frozenset[str], most: int, until_s: float
    ) -> list[dict[str, Any]]:
        """Lines of every key in turn, the one with the fewest lines out first, and of every batch of a key."""
        given: list[dict[str, Any]] = []
        out = Counter(self._works[name].batch.key for name, _ in self._out if name in self._works)
        of_keys: dict[str, list[Work]] = {}
        able = (work for work in self._works.values() if work.may_have(names))
        for work in sorted(able, key=lambda work: work.batch.created_s):
            of_keys.setdefault(work.batch.key, []).append(work)
        now_s = self._clock()
        waiting = {key for key, until_s in self._waits.items() if now_s < until_s}
        keys = sorted((key for key in of_keys if key not in waiting), key=lambda key: out[key])
        for at, key in enumerate(keys):
            share_end = len(given) + math.ceil((most - len(given)) / (len(keys) - at))
            works = of_keys[key]
            for nth, work in enumerate(works):
                share = math.ceil((share_end - len(given)) / (len(works) - nth))
                given += await self._take_from(work, router, names, share, given, until_s)
            for work in works:
                given += await self._take_from(work, router, names, share_end - len(given), given, until_s)
        for key in keys:
            for work in of_keys[key]:
                given += await self._take_from(work, router, names, most - len(given), given, until_s)
        return given

    def _not_silent_since(self, began_s: float) -> None:
        """No router could say what it has while this one was answered: a bucket's file may be minutes in coming."""
        now_s = self._clock()
        if now_s - began_s > TICK_S:
            self._out = {
                held: (router, min(now_s, said_s + now_s - began_s))
                for held, (router, said_s) in self._out.items()
            }

    def _wait(self, batch: str, seconds: float) -> None:
        if work := self._works.get(batch):
            key, now_s = work.batch.key, self._clock()
            self._waits = {of: until_s for of, until_s in self._waits.items() if now_s < until_s}
            self._waits[key] = now_s + min(seconds, _LONGEST_WAIT_S)

    def _is_of_unknown_key(self, batch: str, status: int) -> bool:
        """Whether a router refused a line for a key that another may know."""
        if not (work := self._works.get(batch)):
            return False
        if status != HTTPStatus.UNAUTHORIZED:
            self._unknown_s.pop(work.batch.key, None)
            return False
        now_s = self._clock()
        return now_s - self._unknown_s.setdefault(work.batch.key, now_s) < _REVOKED_S

    async def _take_from(
        self,
        work: Work,
        router: str,
        names: frozenset[str],
        most: int,
        given: Sequence[Mapping[str, Any]],
        until_s: float,
    ) -> list[dict[str, Any]]:
        """Lines of a batch beside those that are `given`. What is wrong with one batch holds up no other."""
        if most <= 0 or self._clock() < work.waits_until_s:
            return []
        left_bytes = _MOST_TAKEN_BYTES - sum(len(line["body"]) for line in given)
        try:
            if work.coming is None and self._reading() < _MOST_COMING:
                await self._choose(work, names, most, left_bytes)
            if work.coming is None:
                return []
            return await self._handed_out(work, work.coming, router, names, most, until_s)
        except StorageError as error:
            logger.error("batch %s waits: %s", work.batch.id, error.message)  # noqa: TRY400  the message says it all
            work.why = error.message
        except Exception:
            logger.exception("batch %s waits", work.batch.id)
            work.why = "Its lines can't be read."
        work.coming = None
        work.waits_until_s = self._clock() + _UNREAD_S
        work.returned()
        return []

    def _reading(self) -> int:
        return sum(work.coming is not None for work in self._works.values())

    async def _choose(self, work: Work, names: frozenset[str], most: int, left_bytes: int) -> None:
        """Begin to read lines that nobody has."""
        name = work.batch.id
        chosen: list[ToDo] = []
        while len(chosen) < most and left_bytes > 0 and names not in work.nothing:
            ahead = work.ahead.setdefault(names, deque())
            if not ahead:
                returns, out = work.returns, set(self._out)
                page = await self._ledger.to_do(name, names, work.behind.get(names, 0), _AHEAD)
                if returns != work.returns:
                    continue  # the page may lack lines that came back meanwhile
                if not page:
                    work.nothing.add(names)
                    break
                work.behind[names] = page[-1].line
                # Of those that were out some may have got their results meanwhile.
                ahead.extend(line for line in page if (name, line.line) not in out)
                continue
            next_line = ahead.popleft()
            if (name, next_line.line) not in self._out:  # a router that was silent may have it
                left_bytes -= next_line.bytes
                chosen.append(next_line)
        if chosen:
            task = asyncio.create_task(self._calls.call(name, work.read, self._folder, chosen))
            work.coming = Coming(names, {line.line for line in chosen}, task)

    async def _handed_out(
        self, work: Work, coming: Coming, router: str, names: frozenset[str], most: int, until_s: float
    ) -> list[dict[str, Any]]:
        """Lines that were read, or none as long as they are not."""
        left_s = until_s - asyncio.get_running_loop().time()
        done, _ = await asyncio.wait({coming.task}, timeout=max(0.0, left_s))
        if not done:
            coming.is_late = True
            work.why = "The storage of files has not given its lines yet."
            return []
        bodies: Bodies = coming.task.result()
        name, work.coming, work.why = work.batch.id, None, ""
        self._open[name] = self._open.pop(name, work)
        if len(self._open) > _MOST_OPEN:
            self._open.pop(next(iter(self._open))).close_file()
        if bodies.unread:
            await self._ledger.commit(name, bodies.unread, self._calendar())
        # Some may have a result by now, or a router that was silent and has them.
        left = [
            line for line in bodies.of_lines if line[0] in coming.numbers and (name, line[0]) not in self._out
        ]
        if coming.names != names:
            most = 0
        if len(left) > most:
            work.returned()
        now_s = self._clock()
        given = []
        for line, model, body in left[:most]:
            self._out[name, line] = router, now_s
            given.append(
                {
                    "batch": name,
                    "line": line,
                    "key": work.batch.key,
                    "path": work.batch.endpoint,
                    "model": model,
                    "body": body,
                }
            )
        return given


def _results(
    batch: str, results: Sequence[Mapping[str, Any]], names: Mapping[int, str | None]
) -> list[Result]:
    return [_result(batch, result, names.get(result["line"])) for result in results]


def _result(batch: str, result: Mapping[str, Any], custom_id: str | None) -> Result:
    body = lines.answer(result["body"])
    text = lines.answered(batch, result["line"], custom_id, result["status"], result["request_id"], body)
    is_error = result["status"] >= 400
    return Result(batch, result["line"], text, is_error=is_error, usage=lines.usage(body))
