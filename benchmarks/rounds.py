"""Rounds: every contestant under the same loads, taking turns, so that a machine that slows down slows all of them.

Each set of rounds begins with another contestant. What a contestant adds is told by the set: its round less, or over,
the bare engine's of the same set.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import psutil

from benchmarks import accounting
from benchmarks.client import Client, Load, LoadError


@dataclass(frozen=True)
class Contestant:
    """A way to the engines. `front` are the processes that are there for it alone, with what they are for."""

    name: str
    addresses: tuple[str, ...]
    model: str
    front: Callable[[], dict[psutil.Process, str]] = dict
    bare: str = ""  # the name of what it is held against; empty for the bare engine itself
    command: str = ""


@dataclass(frozen=True)
class Round:
    """What one contestant did under one load. Times are milliseconds, CPU seconds."""

    contestant: str
    load: str
    set: int
    requests_per_s: float
    chunks_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    answers: int
    chunks: int
    front_cpu_s: dict[str, float]
    other_cpu_s: dict[str, float]
    pss_bytes: dict[str, int]


@dataclass
class Results:
    """Every round so far, and why a contestant has none."""

    rounds: list[Round] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def of(self, contestant: str, load: str) -> list[Round]:
        return [one for one in self.rounds if (one.contestant, one.load) == (contestant, load)]

    def figures(self, contestant: str, load: str, figure: str) -> list[float]:
        return [float(getattr(one, figure)) for one in self.of(contestant, load)]

    def against(
        self, contestant: str, bare: str, load: str, by: Callable[[Round, Round], float]
    ) -> list[float]:
        """One figure a set, of a contestant's round and the bare one's."""
        others = {one.set: one for one in self.of(bare, load)}
        return [by(one, others[one.set]) for one in self.of(contestant, load) if one.set in others]


def play(
    client: Client, contestant: Contestant, name: str, load: Load, number: int, others: "Watched"
) -> Round:
    """One round; raises LoadError."""
    front = contestant.front()
    beside = {process: what for process, what in others().items() if process not in front}
    front_s, beside_s, machine_s = (
        accounting.cpu_s(front),
        accounting.cpu_s(beside),
        accounting.machine_cpu_s(),
    )
    seen = client.run(contestant.addresses, contestant.model, load)
    machine_s = accounting.machine_cpu_s() - machine_s
    front_cpu = _grown(front_s, accounting.cpu_s(front))
    beside_cpu = _grown(beside_s, accounting.cpu_s(beside)) | {accounting.CLIENT: seen.cpu_s}
    beside_cpu[accounting.ELSEWHERE] = machine_s - sum(front_cpu.values()) - sum(beside_cpu.values())
    return Round(
        contestant=contestant.name,
        load=name,
        set=number,
        requests_per_s=seen.answers / seen.took_s,
        chunks_per_s=seen.in_time / load.seconds,
        ttft_p50_ms=1000 * quantile(seen.first_s, 0.5),
        ttft_p99_ms=1000 * quantile(seen.first_s, 0.99),
        itl_p50_ms=1000 * quantile(seen.gaps_s, 0.5),
        itl_p99_ms=1000 * quantile(seen.gaps_s, 0.99),
        answers=seen.answers,
        chunks=seen.events,
        front_cpu_s=front_cpu,
        other_cpu_s=beside_cpu,
        pss_bytes=dict(accounting.pss_bytes(front)),
    )


Watched = Callable[[], dict[psutil.Process, str]]


def compete(
    client: Client,
    contestants: Sequence[Contestant],
    loads: dict[str, Load],
    sets: int,
    others: Watched,
    results: Results,
    say: Callable[[str], None],
) -> None:
    """Every contestant under every load, `sets` times and once before that is not counted.

    One that fails a round is out of that load, and why is kept.
    """
    for name, load in loads.items():
        out: set[str] = set()
        warm_up = Load(load.concurrency, load.tokens, min(load.seconds, 0.5), load.pause_s)
        for number, turn in enumerate([list(contestants), *turns(contestants, sets)]):
            for contestant in turn:
                if contestant.name in out:
                    continue
                try:
                    played = play(client, contestant, name, load if number else warm_up, number, others)
                except LoadError as error:
                    out.add(contestant.name)
                    results.missing[f"{contestant.name}, {name}"] = str(error)
                    say(f"{name}, {contestant.name}: {error}")
                    continue
                if number:
                    results.rounds.append(played)
        for contestant in contestants:
            if found := results.figures(contestant.name, name, "chunks_per_s"):
                say(f"{name}, {contestant.name}: {spread(found)} chunks/s")


def turns(contestants: Sequence[Contestant], sets: int) -> Iterator[list[Contestant]]:
    """The order of each set: there and back again, then the same beginning with the next one."""
    for number in range(sets):
        first = number // 2 % max(1, len(contestants))
        turn = [*contestants[first:], *contestants[:first]]
        yield turn[::-1] if number % 2 else turn


def quantile(values: Sequence[float], share: float) -> float:
    """Of no values, 0."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def spread(values: Sequence[float], digits: int = 0) -> str:
    """Median (least to most); a dash for nothing."""
    if not values:
        return "-"
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def _grown(before: Counter[str], after: Counter[str]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in after}
