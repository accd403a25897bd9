"""What a router pays to choose a slice: CPU of a choice, of a beat and memory, by the number of slices. No traffic, no Ray.

    python -m benchmarks.choosing

Two pools, 24 system prompts of 1,500 tokens, three adapters. A third of the conversations names a session, a third an adapter.
Each request is a further turn of a conversation and is chosen by its text. Requests stay open until there are four a slice;
every report says that another router has as many there. Times are CPU time of this process, the median of ROUNDS.

"A beat" is what taking over a report of every slice costs the table. "MB" is what the table holds after PROMPTS prompts of
2,000 tokens. "Back to its slice" counts the further turns that go where the turn before went: the others were turned away by
the brake, or the slice was forgotten.
"""

import argparse
import itertools
import random
import statistics
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator

from serving.router.http.protocol import InferenceRequest
from serving.router.scheduling import prefix_index
from serving.router.scheduling.slice_table import SliceTable
from serving.state.records import SliceRecord, SliceState

MODEL, POOLS, ADAPTERS = "llama", ("near", "far"), ("sql", "law", "code")
ROUNDS, REQUESTS, CONVERSATIONS = 7, 500, 1500
PROMPTS = 25_000
OPEN_A_SLICE = 4
LETTERS = {"system": 6000, "turn": 1200}
WORDS = [
    "a",
    "router",
    "sends",
    "each",
    "request",
    "to",
    "the",
    "slice",
    "that",
    "answers",
    "it",
    "soonest",
    "and",
    "remembers",
    "what",
    "it",
    "sent",
]


class Conversation:
    """One client's turns so far."""

    def __init__(self, number: int, systems: list[str], draw: random.Random) -> None:
        self.messages = [{"role": "system", "content": draw.choice(systems)}]
        self.asked_of = ""
        self._draw = draw
        self._model = ADAPTERS[number // 3 % 3] if number % 3 == 1 else MODEL
        self._session = {"user": f"user {number}"} if number % 3 == 0 else {}

    def ask(self) -> InferenceRequest:
        """The next turn; after eight turns the client begins anew."""
        if len(self.messages) > 16:
            del self.messages[1:]
        self.messages.append({"role": "user", "content": text(self._draw, LETTERS["turn"])})
        fields = {"model": self._model, "messages": list(self.messages), **self._session}
        self.messages.append({"role": "assistant", "content": text(self._draw, LETTERS["turn"] // 4)})
        return InferenceRequest(MODEL, "/v1/chat/completions", b"", fields)


class Fleet:
    """A router's table of so many slices, and the requests that it has open."""

    def __init__(self, slices: int, conversations: int = CONVERSATIONS) -> None:
        self._draw = random.Random(slices)
        self.table = SliceTable(
            {MODEL: slices},
            {MODEL: "v6e 2x4"},
            adapters=dict.fromkeys(ADAPTERS, MODEL),
            pools={MODEL: POOLS},
            routers=2,
        )
        self._slices = slices
        self._beat = 0
        self.open: deque[str] = deque()
        systems = [text(self._draw, LETTERS["system"]) for _ in range(24)]
        self.conversations = [Conversation(number, systems, self._draw) for number in range(conversations)]
        self.report()

    def report(self) -> float:
        """Every slice beats; returns the CPU seconds that the table takes to read it."""
        self._beat += 1
        entries = [
            SliceRecord(
                f"{number:032x}",
                MODEL,
                SliceState.SERVING,
                "serving",
                "v6e 2x4",
                pool=POOLS[number % 2],
                running=2 * OPEN_A_SLICE + self._draw.randint(-3, 3),
                waiting=int(number % 2 == 0 and self._draw.random() < 0.05),
                kv_usage=self._draw.random() * 0.8,
                output_tokens=self._beat * 200,
                beat=self._beat,
            )
            for number in range(self._slices)
        ]
        begun_s = time.process_time()
        self.table.update(entries, self._beat / 2)
        return time.process_time() - begun_s

    def send(self, request: InferenceRequest) -> str:
        replica = self.choose(request)
        self.table.begin(replica)
        self.open.append(replica)
        if len(self.open) > OPEN_A_SLICE * self._slices:
            self.table.end(self.open.popleft())
        return replica

    def choose(self, request: InferenceRequest) -> str:
        return self.table.choose(MODEL, (), request).replica

    def count(self, _: InferenceRequest) -> None:
        """A request more and a request less on a slice."""
        self.table.begin(self.open[0])
        self.table.end(self.open[0])

    def turns(self) -> Iterator[tuple[Conversation, InferenceRequest]]:
        while True:
            conversation = self._draw.choice(self.conversations)
            yield conversation, conversation.ask()


def text(draw: random.Random, letters: int) -> str:
    """Random words; the first is a number, so that no two texts begin alike."""
    words = [str(draw.random())]
    words += draw.choices(WORDS, k=letters // 6)
    return " ".join(words)[:letters]


def cost_us(do: Callable[[InferenceRequest], object], requests: list[InferenceRequest]) -> float:
    begun_s = time.process_time()
    for request in requests:
        do(request)
    return (time.process_time() - begun_s) / len(requests) * 1e6


def measure(slices: int) -> str:
    """One row."""
    fleet = Fleet(slices)
    turns = fleet.turns()
    for conversation, request in itertools.islice(turns, 2 * CONVERSATIONS):
        conversation.asked_of = fleet.send(request)
    choice_us, trace_us, count_us, beats_ms = [], [], [], []
    for _ in range(ROUNDS):
        beats_ms.append(fleet.report() * 1e3)
        requests = [request for _, request in itertools.islice(turns, REQUESTS)]
        trace_us.append(cost_us(prefix_index.trace, requests))
        choice_us.append(cost_us(fleet.choose, requests))
        count_us.append(cost_us(fleet.count, requests))
    back = 0
    for conversation, request in itertools.islice(turns, 3 * REQUESTS):
        before, conversation.asked_of = conversation.asked_of, fleet.send(request)
        back += before in ("", conversation.asked_of)
    figures = (statistics.median(figure) for figure in (choice_us, trace_us, count_us, beats_ms))
    choice, trace, count, beat = figures
    return (
        f"| {slices:,} | {choice:.0f} | {trace:.0f} | {count:.1f} | {beat:.1f} | {memory_mb(slices):.0f} "
        f"| {back / 3 / REQUESTS:.0%} |"
    )


def memory_mb(slices: int) -> float:
    """What the table holds once it has begun to forget: each of the prompts is a new one, of 2,000 tokens."""
    fleet = Fleet(slices)
    tracemalloc.start()
    for number in range(PROMPTS):
        prompt = f"{number:7} " * 1000
        fleet.choose(InferenceRequest(MODEL, "/v1/completions", b"", {"prompt": prompt}))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held / 1e6


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("slices", nargs="*", type=int, metavar="SLICES", help="default: 10 100 1000")
    slices_of = parser.parse_args().slices or (10, 100, 1000)
    print(
        "| slices | µs a choice | of it the prompt's blocks | µs begin and end | ms a beat | MB | back to its slice |"
    )
    print("|---|---|---|---|---|---|---|")
    for slices in slices_of:
        print(measure(slices))


if __name__ == "__main__":
    main()
