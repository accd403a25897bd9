"""Rounds as markdown."""

from collections.abc import Sequence

from benchmarks import accounting
from benchmarks.client import Seen
from benchmarks.rounds import Contestant, Results, Round, spread

_MIB = 2**20


def times_table(
    results: Results, contestants: Sequence[Contestant], loads: Sequence[str], rate: str = "chunks"
) -> list[str]:
    """What a client sees under each load: median of the rounds (least to most).

    Its throughput is told in chunks or, where an engine does not send each token alone, in answers.
    """
    figure, digits = ("chunks_per_s", 0) if rate == "chunks" else ("requests_per_s", 1)
    lines = [
        f"| load | in front | {rate}/s | share of bare | TTFT p50, ms | added p50, ms | added p99, ms | ITL p50, ms | ITL p99, ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for load in loads:
        for contestant in contestants:
            if not results.of(contestant.name, load):
                continue
            cells = [
                spread(results.figures(contestant.name, load, figure), digits),
                *_against_bare(results, contestant, load, figure),
                spread(results.figures(contestant.name, load, "itl_p50_ms"), 1),
                spread(results.figures(contestant.name, load, "itl_p99_ms"), 1),
            ]
            lines.append(f"| {load} | {contestant.name} | {' | '.join(cells)} |")
    return lines


def _against_bare(results: Results, contestant: Contestant, load: str, rate: str) -> list[str]:
    ttft = spread(results.figures(contestant.name, load, "ttft_p50_ms"), 1)
    if not contestant.bare:
        return ["", ttft, "", ""]
    share, p50, p99 = (
        results.against(contestant.name, contestant.bare, load, by)
        for by in (
            lambda one, bare: getattr(one, rate) / getattr(bare, rate),
            lambda one, bare: one.ttft_p50_ms - bare.ttft_p50_ms,
            lambda one, bare: one.ttft_p99_ms - bare.ttft_p99_ms,
        )
    )
    return [spread(share, 2), ttft, spread(p50, 1), spread(p99, 1)]


def flat_out_table(
    results: Results, contestants: Sequence[Contestant], alone: str, answers: str, streams: str
) -> list[str]:
    """Engines that take no time: what of the way there is left."""
    lines = [
        f"| in front | TTFT, {alone}, ms | answers/s, {answers} | chunks/s, {streams} | share of bare |",
        "|---|---|---|---|---|",
    ]
    for contestant in contestants:
        share = results.against(
            contestant.name, contestant.bare, streams, lambda one, bare: one.chunks_per_s / bare.chunks_per_s
        )
        cells = [
            spread(results.figures(contestant.name, alone, "ttft_p50_ms"), 1),
            spread(results.figures(contestant.name, answers, "requests_per_s")),
            spread(results.figures(contestant.name, streams, "chunks_per_s")),
            spread(share, 2) if contestant.bare else "",
        ]
        lines.append(f"| {contestant.name} | {' | '.join(cells)} |")
    return lines


def request_us(one: Round, process: str = "") -> float:
    """CPU microseconds in front an answer; of one process where it is named."""
    spent = one.front_cpu_s.get(process, 0.0) if process else sum(one.front_cpu_s.values())
    return 1e6 * spent / one.answers


def chunk_us(streams: Round, answers: Round, process: str = "") -> float:
    """CPU microseconds in front for one more chunk of an answer, from rounds of long answers and of short ones."""
    more_us = request_us(streams, process) - request_us(answers, process)
    return more_us / (streams.chunks / streams.answers - answers.chunks / answers.answers)


def cost_table(results: Results, contestants: Sequence[Contestant], answers: str, streams: str) -> list[str]:
    """What each contestant itself takes of the machine, process by process where there are several."""
    lines = [
        "| in front | CPU µs a 1-token answer | answers/s a core | CPU µs a further chunk | memory (PSS), MiB |",
        "|---|---|---|---|---|",
    ]
    for contestant in contestants:
        short, long = results.of(contestant.name, answers), results.of(contestant.name, streams)
        if not contestant.bare or not short or not long:
            continue
        processes = sorted(short[-1].front_cpu_s)
        for process in ["", *processes] if len(processes) > 1 else [""]:
            requests = [request_us(one, process) for one in short]
            by_set = {one.set: one for one in short}
            chunks = [chunk_us(one, by_set[one.set], process) for one in long if one.set in by_set]
            held = [
                (one.pss_bytes.get(process, 0) if process else sum(one.pss_bytes.values())) / _MIB
                for one in short + long
            ]
            cells = [
                spread(requests),
                f"{1e6 * len(requests) / sum(requests):,.0f}" if sum(requests) else "-",
                spread(chunks),
                f"{max(held):,.0f}",
            ]
            lines.append(f"| {'of it ' + process if process else contestant.name} | {' | '.join(cells)} |")
    return lines


def cpu_table(
    results: Results, contestants: Sequence[Contestant], load: str, each: str = "chunk"
) -> list[str]:
    """CPU microseconds of every process a streamed chunk or an answer, the engines' and the client's among them."""
    shown = [contestant for contestant in contestants if results.of(contestant.name, load)]
    spent: dict[str, dict[str, float]] = {}
    for contestant in shown:
        found = results.of(contestant.name, load)
        count = sum(one.chunks if each == "chunk" else one.answers for one in found)
        for one in found:
            for what, seconds in (one.front_cpu_s | one.other_cpu_s).items():
                row = spent.setdefault(what, {})
                row[contestant.name] = row.get(contestant.name, 0.0) + 1e6 * seconds / count
    last = [accounting.CLIENT, accounting.ELSEWHERE]
    names = sorted(set(spent) - set(last), key=lambda what: -max(spent[what].values())) + last
    lines = [
        f"| CPU µs {'a chunk' if each == 'chunk' else 'an answer'}, {load} | {' | '.join(contestant.name for contestant in shown)} |",
        "|---|" + "---|" * len(shown),
    ]
    for what in names:
        cells = [f"{spent.get(what, {}).get(contestant.name, 0.0):,.0f}" for contestant in shown]
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return lines


def missing_lines(results: Results) -> list[str]:
    return [f"- {name} was not measured: {why}" for name, why in results.missing.items()]


def ceiling_line(ceiling: Seen, seconds: float) -> str:
    """How much of what was measured could be the client's own doing."""
    each_us = 1e6 * ceiling.cpu_s / ceiling.events
    return (
        f"The load client takes {each_us:.1f} µs of CPU a chunk, so a core of it reads {1e6 / each_us:,.0f} chunks/s at most; "
        f"from a server that answers at once, on the same machine, it read {ceiling.in_time / seconds:,.0f} chunks/s."
    )


def memory_table(results: Results, contestants: Sequence[Contestant]) -> list[str]:
    """The most that the processes of each contestant held, by what they are for."""
    held: dict[str, dict[str, float]] = {}
    for one in results.rounds:
        for what, used in one.pss_bytes.items():
            row = held.setdefault(what, {})
            row[one.contestant] = max(row.get(one.contestant, 0.0), used / _MIB)
    shown = [
        contestant.name for contestant in contestants if any(contestant.name in row for row in held.values())
    ]
    lines = [f"| memory (PSS), MiB | {' | '.join(shown)} |", "|---|" + "---|" * len(shown)]
    for what, row in sorted(held.items(), key=lambda item: -max(item[1].values())):
        cells = [f"{row[name]:,.0f}" if name in row else "" for name in shown]
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return lines
