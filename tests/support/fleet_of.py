"""Boards to hold the policy to: slices and routers that report what a test says."""

from dataclasses import dataclass, field, replace

from serving.scaling.capacity import Pool
from serving.scaling.policy import Decision, PolicyState, Report, Room, Settings, decide, start
from serving.state.records import Demand, SliceRecord, SliceState

# A slice that takes 1 s for a 100-token answer at up to 10 at once: 10 requests a second.
STEPS = ((1.0, 0.01), (10.0, 0.01))


def pool(name: str = "near", least: int = 1, most: int = 10, **others: float) -> Pool:
    return Pool(name, name, least, most, STEPS, prefill_tokens_per_s=1e9, cache_tokens=1e9, **others)


def settings(*pools: Pool, cool_down_s: float = 60.0, **targets: float) -> Settings:
    return Settings("m", pools or (pool(),), cool_down_s=cool_down_s, **targets)


@dataclass
class Fleet:
    """A model's slices and one router in steps of a second; what is wanted comes after `delivery_s`, starts in `start_s`."""

    settings: Settings
    delivery_s: float = 20.0
    start_s: float = 10.0
    undeliverable: frozenset[int] = frozenset()
    room: Room = field(default_factory=Room)
    now_s: float = 1000.0
    queue: float = 0.0
    arrived: float = 0.0
    finished: float = 0.0
    orders: list[list[float]] = field(default_factory=list)
    slices: list[list[SliceRecord]] = field(default_factory=list)
    born: dict[str, float] = field(default_factory=dict)
    made: int = 0
    state: PolicyState | None = None
    decisions: list[Decision] = field(default_factory=list)
    ttft_p90_s: float = 0.0
    filling: int = 0  # lines of batches that run on each slice, of 100 tokens each way and a second each
    filled: int = 0
    due: float = 0.0  # lines of batches a second that slices are ordered for; they are among the rate
    expected: float = 0.0
    failing: frozenset[int] = frozenset()  # pools whose starts fail
    noticed: frozenset[int] = frozenset()  # pools whose hosts are taken back while engines start
    lost: list[SliceRecord] = field(default_factory=list)  # as long as the store has them
    leaving: int = 0  # slices of pools that the YAML no longer has

    def __post_init__(self) -> None:
        self.state = start(self.settings)
        self.orders = [[] for _ in self.settings.pools]
        self.slices = [[] for _ in self.settings.pools]
        for at, one in enumerate(self.settings.pools):
            for _ in range(one.min):
                self._deliver(at, SliceState.SERVING)

    def _deliver(self, at: int, life: SliceState) -> None:
        self.made += 1
        name = f"slice-{self.made}"
        self.slices[at].append(
            SliceRecord(name, "m", life, "", self.settings.pools[at].name, pool=self.settings.pools[at].key)
        )
        self.born[name] = self.now_s

    @property
    def serving(self) -> int:
        return sum(entry.serves for each in self.slices for entry in each)

    def counts(self) -> list[int]:
        return [len(each) for each in self.slices]

    def lose(self, at: int) -> None:
        self.slices[at].pop()

    def jump(self, seconds: float) -> None:
        """Put the policy's clock on; deliveries and starts take no notice."""
        self.now_s += seconds
        self.born = {name: at_s + seconds for name, at_s in self.born.items()}
        self.orders = [[at_s + seconds for at_s in orders] for orders in self.orders]

    def report(self, rate: float) -> Report:
        """A second of traffic: 100-token answers to 100-token prompts, what is above 10 a slice queues."""
        self.arrived += rate - self.due
        self.expected += self.due
        self.queue += rate
        serving = self.serving
        done = min(self.queue, 10.0 * serving)
        self.queue -= done
        self.finished += done
        running = done / serving + self.filling if serving else 0.0
        tokens = round(100 * running)
        for at, each in enumerate(self.slices):
            self.slices[at] = [
                replace(
                    entry,
                    running=running,  # type: ignore[arg-type]  # a mean
                    prompt_tokens=entry.prompt_tokens + tokens,
                    output_tokens=entry.output_tokens + tokens,
                )
                if entry.serves
                else entry
                for entry in each
            ]
        filling = self.filling * serving
        self.filled += filling
        demand = Demand(
            "r",
            "m",
            held=0 if self.due else round(self.queue),  # lines wait where batches are kept
            arrived=round(self.arrived),
            ttft_p90_s=self.ttft_p90_s,
            filling=filling,
            filled_prompt_tokens=100 * self.filled,
            filled_output_tokens=100 * self.filled,
            expected=self.expected,
            filled=round(self.expected),
        )
        in_flight = round(self.arrived) - round(self.queue) - round(self.finished)
        entries = [*(entry for each in self.slices for entry in each), *self.lost]
        return Report(entries, [replace(demand, in_flight=max(0, in_flight))], self.room, (self.leaving, 0.0))

    def step(self, rate: float, report: Report | None = None) -> Decision:
        assert self.state is not None
        decision = decide(self.settings, self.state, report or self.report(rate), self.now_s)
        self.state = decision.state
        self.decisions.append(decision)
        for at, wanted in enumerate(decision.wanted):
            self._follow(at, wanted)
        self.now_s += 1
        return decision

    def run(self, rate: float, seconds: int) -> Decision:
        for _ in range(seconds):
            decision = self.step(rate)
        return decision

    def _follow(self, at: int, wanted: int) -> None:
        """Serve and the autoscaler."""
        missing = wanted - len(self.slices[at])
        self.orders[at] = (self.orders[at] + [self.now_s] * missing)[: max(0, missing)]
        del self.slices[at][max(0, wanted) :]
        while (
            self.orders[at]
            and at not in self.undeliverable
            and self.now_s - self.orders[at][0] >= self.delivery_s
        ):
            self.orders[at].pop(0)
            self._deliver(at, SliceState.STARTING)
        self.lost = [entry for entry in self.lost if self.now_s - self.born[entry.replica] < self.start_s + 8]
        for entry in list(self.slices[at]):
            if entry.serves or self.now_s - self.born[entry.replica] < self.start_s:
                continue
            if at in self.noticed:
                self.slices[at].remove(entry)
                self.lost.append(replace(entry, state=SliceState.DRAINING, reason="host 1 is to go"))
            elif at in self.failing:
                self.slices[at].remove(entry)
                self.lost.append(replace(entry, state=SliceState.LOST, reason="the weights are gone"))
            else:
                self.slices[at][self.slices[at].index(entry)] = replace(entry, state=SliceState.SERVING)
