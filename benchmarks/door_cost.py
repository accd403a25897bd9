"""What one answer and one streamed chunk cost a router's process in CPU time, without Ray and without HAProxy.

    python -m benchmarks.door_cost                          # this tree
    python -m benchmarks.door_cost --against ../before      # and another working tree, round by round in turn
    python -m benchmarks.door_cost --slices-tls             # plain HTTP to the engine and TLS in turn

A real router behind its own door, in a process of its own, relays from an engine that makes its events beforehand. Client
and engine are the measuring process; only the router's CPU is counted. Rounds of both trees alternate, so that other work on
the machine slows both alike: the quotient of the two is steadier than either figure.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks.children import asked, told
from benchmarks.client import Load, put
from benchmarks.instant import Script, serving
from benchmarks.one_router import MODEL
from serving.pinned_tls import identity

TOKENS = 32
_CONCURRENCY = 32
_STEP_S = 0.01  # between the tokens of a stream: events of one stream come one by one
_NAME = b'{"id":"chatcmpl-0123456789abcdef01234567","object":"chat.completion.chunk","created":1700000000,"model":"llama",'
_OPENING = (
    b"data: "
    + _NAME
    + b'"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],'
    b'"prompt_token_ids":[%s],"prompt_text":null}\n\n' % b",".join(b"%d" % n for n in range(1000, 1060))
)
_TOKEN = (
    b"data: " + _NAME + b'"choices":[{"index":0,"delta":{"content":" slice"},"logprobs":null,'
    b'"finish_reason":null,"token_ids":[12345]}]}\n\n'
)
_LAST = _TOKEN.replace(b'"finish_reason":null', b'"finish_reason":"length","stop_reason":null')


@dataclass(frozen=True)
class Measured:
    """A working tree, and how its router asks the engine."""

    tree: Path
    tls: bool = False

    def __str__(self) -> str:
        return f"{self.tree.name}, TLS to the engine" if self.tls else self.tree.name


class Router:
    """A tree's router in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.address = f"http://127.0.0.1:{told(process)}"

    def cpu_s(self) -> float:
        return float(asked(self._process)["cpu_s"])


@contextmanager
def started(tree: Path, upstream: Sequence[str], folder: Path) -> Iterator[Router]:
    """A working tree's router, under this tree's benchmark; it ends with its input. `upstream`: arguments of one_router."""
    home = Path(tempfile.mkdtemp(dir=folder))
    (home / "serving").symlink_to(tree / "serving")
    (home / "benchmarks").symlink_to(Path(__file__).resolve().parent)
    log = str(home / "requests.jsonl")
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.one_router", *upstream, "--log", log],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=home,
        env={**os.environ, "PYTHONPATH": str(home)},
    ) as process:
        try:
            yield Router(process)
        finally:
            process.kill()


async def measure(
    measured: Sequence[Measured], rounds: int, seconds: float
) -> list[list[tuple[float, float]]]:
    """For each tree and round: CPU µs of a one-token answer, and of a further chunk."""
    script, shown = Script(_OPENING, _TOKEN, _LAST, _STEP_S), identity("engine")
    (plain, plain_port), (encrypted, tls_port) = await serving(script), await serving(script, shown.context)
    found: list[list[tuple[float, float]]] = [[] for _ in measured]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        certificate = folder / "engine.crt"
        certificate.write_text(shown.certificate)
        upstream = {
            False: [f"http://127.0.0.1:{plain_port}"],
            True: [f"https://127.0.0.1:{tls_port}", "--certificate", str(certificate)],
        }
        routers = [stack.enter_context(started(each.tree, upstream[each.tls], folder)) for each in measured]
        for router in routers:
            await put([router.address], MODEL, Load(_CONCURRENCY, 1, 0.5))
        for _ in range(rounds):
            for router, times in zip(routers, found, strict=True):
                answer = await _cpu_us(router, Load(_CONCURRENCY, 1, seconds))
                stream = await _cpu_us(router, Load(_CONCURRENCY, TOKENS, seconds))
                times.append((answer, (stream - answer) / (TOKENS - 1)))
        plain.close()
        encrypted.close()
    return found


async def _cpu_us(router: Router, load: Load) -> float:
    before_s = router.cpu_s()
    seen = await put([router.address], MODEL, load)
    return 1e6 * (router.cpu_s() - before_s) / seen.answers


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, help="another working tree, measured beside this one")
    parser.add_argument(
        "--slices-tls", action="store_true", help="measure TLS to the engine beside plain HTTP"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    here = Path(__file__).resolve().parent.parent
    measured = [Measured(tree.resolve()) for tree in (options.against, here) if tree]
    measured += [Measured(here, tls=True)] if options.slices_tls else []
    found = uvloop.run(measure(measured, options.rounds, options.seconds))
    print(f"| tree, median of {options.rounds} rounds | CPU µs a 1-token answer | CPU µs a further chunk |")
    print("|---|---|---|")
    for each, times in zip(measured, found, strict=True):
        answers, chunks = zip(*times, strict=True)
        print(
            f"| {each} | {statistics.median(answers):.0f} ({min(answers):.0f} to {max(answers):.0f}) "
            f"| {statistics.median(chunks):.1f} ({min(chunks):.1f} to {max(chunks):.1f}) |"
        )
    if len(measured) == 2:
        ratios = [
            statistics.median(now[at] / then[at] for then, now in zip(*found, strict=True)) for at in (0, 1)
        ]
        print(f"| second of first, median of quotients | {ratios[0]:.2f} | {ratios[1]:.2f} |")


if __name__ == "__main__":
    main()
