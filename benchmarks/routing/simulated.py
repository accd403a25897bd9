"""Routers that share what they sent against one router and routers that do not, in simulated time: no noise, every run the same.

    python -m benchmarks.routing.simulated            # two minutes of each load, some ten minutes

The engines are the scheduler and the calibrated physics of the simulated engine, four slices of Llama 3.3 70B on v6e 2x4. The
routers are real tables: each sees the slices' records twice a second and, where they share, others' news 10 ms after they go
out, at the pace of `serving.router.neighbours`. Requests begin at random times at random routers, the same for every row.
"""

import argparse
import heapq
import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from serving.config import ModelSpec
from serving.planning import Plan, plan
from serving.router.http.protocol import InferenceRequest
from serving.router.neighbours import EVERY_S
from serving.router.scheduling.sharing import Batch
from serving.router.scheduling.slice_table import SliceTable
from serving.simulation.engine.calibration import factors_for
from serving.simulation.engine.physics import Physics
from serving.simulation.engine.scheduler import Limits, Request, Scheduler, Step
from serving.simulation.engine.tokenizer import WORDS, encode
from serving.state.records import SliceRecord, SliceState
from serving.timings import TIMINGS

MODEL, SHAPE, SLICES = "llama-70b", "v6e 2x4", 4
ADAPTERS = tuple(f"adapter-{number}" for number in range(8))
ONE, SHARING, APART = "one router", "3 that share", "3 that do not"
_SPEC = {
    "name": MODEL,
    "model": "meta-llama/Llama-3.3-70B-Instruct",
    "slice": {"generation": "v6e", "topology": "2x4", "hosts": 1},
    "engine": {"max_model_len": 32768},
}
_ON_THE_WAY_S = 0.01
_LONGEST_TOKENS = 28_000


@dataclass(frozen=True)
class Load:
    """Conversations a second, their turns, and tokens asked and answered a turn; `beginnings` of so many tokens are shared.

    `asked` are bounds, or the mean and spread of the logarithm where `lengths` is true. `adapters`: each conversation has one.
    """

    name: str
    per_s: float
    turns: tuple[int, int]
    asked: tuple[float, float]
    answered: tuple[int, int]
    beginnings: int = 0
    beginning_tokens: int = 0
    lengths: bool = False
    adapters: bool = False
    think_s: float = 2.0


LOADS = (
    Load("multi-turn chat", 2.6, (3, 6), (500, 3000), (15, 40)),
    Load("shared system prompts", 8.0, (1, 1), (50, 400), (15, 40), 24, 6000),
    Load("nothing shared", 2.5, (1, 1), (1000, 9000), (15, 40)),
    Load("adapters", 6.0, (1, 3), (50, 400), (15, 40), 3, 3000, adapters=True),
    Load("documents of 20k tokens", 2.5, (1, 3), (30, 100), (30, 100), 16, 20_000),
    # Lengths and sharing after Mooncake's conversation trace (FAST'25): prompts of 12,000 tokens on average, answers of 343, the same
    # first 512 tokens, and turns that send the conversation again.
    Load("shaped as Mooncake's trace", 0.5, (1, 3), (8.9, 0.9), (3, 680), 1, 512, lengths=True, think_s=5.0),
)
STORM = Load("storm", 4.0, (1, 1), (8000, 16_000), (1, 2))


@dataclass
class Seen:
    """What came of the requests of one load: when each was sent, its time to first token, prompt and cached tokens."""

    rows: list[tuple[float, float, int, int]] = field(default_factory=list)

    def between(self, begin_s: float, end_s: float) -> "Seen":
        return Seen([row for row in self.rows if begin_s <= row[0] < end_s])

    @property
    def hits(self) -> float:
        return sum(row[3] for row in self.rows) / max(1, sum(row[2] for row in self.rows))

    def ttft_ms(self, percent: int) -> float:
        return 1e3 * statistics.quantiles([row[1] for row in self.rows], n=100)[percent - 1]


class Service:
    """Slices and routers in simulated time."""

    def __init__(self, found: Plan, routers: int, seed: int, *, shares: bool) -> None:
        self.now_s = 0.0
        self._draw = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._physics = Physics(found, factors_for(found))
        self.slices = {f"slice-{number}": Scheduler(Limits.of(found)) for number in range(SLICES)}
        self._stepping: set[str] = set()
        self._first: dict[Request, Callable[[], None]] = {}
        self._done: dict[Request, Callable[[], None]] = {}
        self._key = b"shared" if shares else b""
        self._count = routers
        self.routers: list[SliceTable] = []
        self._next_s = [0.0] * routers
        for number in range(routers):
            self.routers.append(self._router(number))
            self.at(self._draw.uniform(0, TIMINGS.beat_s), lambda number=number: self._beat(number))

    def at(self, at_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), what))

    def run(self) -> None:
        """Until `stop`, or nothing but beats is left."""
        while self._events and not self.stopped:
            self.now_s, _, what = heapq.heappop(self._events)
            what()

    stopped = False

    def stop(self) -> None:
        self.stopped = True

    def restart(self, number: int) -> None:
        """A router is replaced: the new one asks a neighbour for everything."""
        self.routers[number] = self._router(number)
        if self._key and self._count > 1:
            raw = Batch("x", self.routers[number - 1].everything()).encoded()
            self.routers[number].take_news(Batch.decoded(raw).sent)

    def ask(
        self,
        fields: dict[str, object],
        tokens: list[int],
        answer: int,
        then: Callable[[float, Request], None],
    ) -> None:
        number = self._draw.randrange(self._count)
        table = self.routers[number]
        request = InferenceRequest(MODEL, "/v1/chat/completions", b"", fields)
        entry, sent_s = table.choose(MODEL, (), request), self.now_s
        table.begin(entry.replica)
        run = Request(tokens, [2] * answer, sent_s, cache_salt=str(fields["model"]))
        self._done[run] = lambda: (table.end(entry.replica), then(sent_s, run))[-1]
        self.slices[entry.replica].add(run)
        self._step(entry.replica)

    def _router(self, number: int) -> SliceTable:
        table = SliceTable(
            {MODEL: SLICES},
            {MODEL: SHAPE},
            adapters=dict.fromkeys(ADAPTERS, MODEL),
            routers=self._count,
            shared_key=self._key,
        )
        table.news.on_first = lambda: self.at(
            max(self.now_s, self._next_s[number]), lambda: self._tell(number)
        )
        table.update(self._records(), self.now_s)
        return table

    def _records(self) -> Iterator[SliceRecord]:
        for name, engine in self.slices.items():
            totals, dropped_s = engine.totals, engine.pool.dropped_s
            yield SliceRecord(
                name,
                MODEL,
                SliceState.SERVING,
                "serving",
                SHAPE,
                running=len(engine.running),
                waiting=len(engine.waiting),
                kv_usage=engine.pool.usage,
                output_tokens=totals.written_tokens,
                cache_age_s=max(0.1, self.now_s - dropped_s) if dropped_s else 0.0,
                beat=int(self.now_s / TIMINGS.beat_s),
            )

    def _beat(self, number: int) -> None:
        self.routers[number].update(self._records(), self.now_s)
        self.at(self.now_s + TIMINGS.beat_s, lambda: self._beat(number))

    def _tell(self, number: int) -> None:
        self._next_s[number] = self.now_s + EVERY_S
        raw = Batch("x", self.routers[number].news.take()).encoded()
        for other in range(self._count):
            if other != number:
                self.at(
                    self.now_s + _ON_THE_WAY_S,
                    lambda other=other: self.routers[other].take_news(Batch.decoded(raw).sent),
                )

    def _step(self, name: str) -> None:
        engine = self.slices[name]
        if name in self._stepping or (step := engine.schedule(self.now_s)) is None:
            return
        self._stepping.add(name)
        self.at(self.now_s + self._physics.seconds(step.batch), lambda: self._stepped(name, step))

    def _stepped(self, name: str, step: Step) -> None:
        self._stepping.discard(name)
        for request in self.slices[name].complete(step, self.now_s):
            if request.done:
                self._done.pop(request)()
        self._step(name)


class Clients:
    """The conversations of one load on a service, from `begin_s` to `end_s`."""

    def __init__(self, service: Service, load: Load, seed: int) -> None:
        self.seen = Seen()
        self._service = service
        self._load = load
        self._draw = random.Random(seed)
        self._beginnings = [self._words(load.beginning_tokens) for _ in range(load.beginnings)]

    def begin(self, begin_s: float, end_s: float) -> None:
        at_s = begin_s
        while (at_s := at_s + self._draw.expovariate(self._load.per_s)) < end_s:
            self._service.at(at_s, self._talk(random.Random(self._draw.random())))

    def _talk(self, draw: random.Random) -> Callable[[], None]:
        load = self._load
        begins = draw.choice(self._beginnings) if self._beginnings else ([], "")
        model = draw.choice(ADAPTERS) if load.adapters else MODEL
        tokens = list(begins[0])
        messages = [{"role": "system", "content": begins[1]}] if begins[1] else []
        turns = iter(range(draw.randint(*load.turns)))

        def ask() -> None:
            if next(turns, None) is None:
                return
            if load.lengths:
                asked = int(min(_LONGEST_TOKENS, draw.lognormvariate(*load.asked)))
            else:
                asked = int(draw.uniform(*load.asked))
            answer = draw.randint(*load.answered)
            if len(tokens) + asked + answer > _LONGEST_TOKENS:
                asked = max(1, _LONGEST_TOKENS - len(tokens) - answer)
            ids, text = self._words(max(1, asked), draw)
            tokens.extend(ids)
            messages.append({"role": "user", "content": text})

            def answered(sent_s: float, run: Request) -> None:
                assert run.first_token_s is not None  # noqa: S101  it is done
                self.seen.rows.append((sent_s, run.first_token_s - sent_s, len(run.prompt), run.cached))
                tokens.extend([2] * answer)
                messages.append({"role": "assistant", "content": " well" * answer})
                self._service.at(self._service.now_s + draw.expovariate(1 / load.think_s), ask)

            self._service.ask({"model": model, "messages": list(messages)}, list(tokens), answer, answered)

        return ask

    def _words(self, tokens: int, draw: random.Random | None = None) -> tuple[list[int], str]:
        text = " " + " ".join((draw or self._draw).choices(WORDS, k=tokens))
        return encode(text), text


def play(found: Plan, load: Load, routers: int, seconds: float, seed: int, *, shares: bool) -> Seen:
    service = Service(found, routers, seed, shares=shares)
    clients = Clients(service, load, seed)
    clients.begin(0.0, seconds)
    service.at(2 * seconds, service.stop)
    service.run()
    return clients.seen


def recovery(found: Plan, load: Load, seconds: float, seed: int, what: str) -> tuple[Seen, Seen]:
    """What came of a load before, and from five seconds after, all caches were filled with other prompts or a router was replaced."""
    service = Service(found, 3, seed, shares=True)
    clients = Clients(service, load, seed)
    clients.begin(0.0, 3 * seconds)
    over_s = seconds
    if what == "storm":
        over_s = seconds + 30.0
        Clients(service, STORM, seed + 1).begin(seconds, over_s)
    else:
        service.at(over_s, lambda: service.restart(0))
    service.at(4 * seconds, service.stop)
    service.run()
    return clients.seen.between(seconds / 2, seconds), clients.seen.between(
        over_s + 5, over_s + 5 + seconds / 2
    )


def row(load: str, who: str, seen: Seen) -> str:
    return f"| {load} | {who} | {seen.hits:.1%} | {seen.ttft_ms(50):.0f} | {seen.ttft_ms(99):.0f} | {len(seen.rows)} |"


HEAD = "| load | routers | hits | TTFT p50, ms | p99, ms | requests |\n|---|---|---|---|---|---|"
ROUTERS = {ONE: (1, False), SHARING: (3, True), APART: (3, False)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print two tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="simulated, of each load")
    parser.add_argument("--only", nargs="+", metavar="LOAD", help="loads by name")
    options = parser.parse_args(arguments)
    found = plan(ModelSpec.model_validate(_SPEC))
    loads = [load for load in LOADS if not options.only or load.name in options.only]
    print(HEAD, flush=True)
    for load in loads:
        for who, (count, shares) in ROUTERS.items():
            print(
                row(load.name, who, play(found, load, count, options.seconds, 1, shares=shares)), flush=True
            )
    for what in ("storm", "restart"):
        for load in [load for load in loads if load.beginnings][:1]:
            for when, seen in zip(
                ("before", "from 5 s after"), recovery(found, load, options.seconds, 1, what), strict=True
            ):
                print(row(f"{load.name}, {what}", f"{SHARING}, {when}", seen), flush=True)


if __name__ == "__main__":
    main()
