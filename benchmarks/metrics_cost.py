"""What metrics, request log and tracing cost a router: CPU of one request's record, without traffic around it.

python benchmarks/metrics_cost.py: microseconds a request, and the share of a core at 500 requests a second.
"""

import os
import tempfile
import time
from pathlib import Path

import ray

from serving.metrics import exposition
from serving.metrics.exposition import Engine
from serving.metrics.recorder import Recorder
from serving.router.telemetry.journal import Journal
from serving.router.telemetry.record import RequestRecord
from serving.router.telemetry.request_log import RequestLog
from serving.state.records import SliceRecord, SliceState

REQUESTS = 10_000
REQUESTS_A_SECOND = 500
ROUNDS = 5
ENTRY = SliceRecord("r", "llama", SliceState.SERVING, "serving", "v6e 2x4", slice="slice-0")
CHUNK = b'data: {"id":"x","choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'
LAST = b'data: {"usage":{"prompt_tokens":12,"total_tokens":15,"completion_tokens":3}}\n\ndata: [DONE]\n\n'


def one(record: RequestRecord) -> None:
    """The life of a streamed answer of one token, as the router's parts tell it."""
    record.model = "llama"
    record.admitted()
    record.sent(ENTRY)
    record.answered(200, streamed=True)
    record.passed_on(CHUNK, 1)
    record.passed_on(LAST, 2)
    record.end()


def cost_us(journal: Journal | None, log: RequestLog | None = None) -> float:
    """CPU of a request, the beat's part of it included."""
    times = []
    for _ in range(ROUNDS):
        begun = time.process_time()
        for number in range(REQUESTS):
            one(
                journal.begin("/v1/chat/completions", {})
                if journal
                else RequestRecord("/v1/chat/completions")
            )
            if journal and number % (REQUESTS_A_SECOND // 2) == 0:  # a beat
                journal.publish([ENTRY], [], [])
                if log:
                    log.flush()
        times.append((time.process_time() - begun) / REQUESTS * 1e6)
    return sorted(times)[ROUNDS // 2]


def pages_ms(slices: int) -> tuple[int, float]:
    """Series, and the time to make one page of what that many engines and one agent say."""
    text = "".join(
        f'# TYPE vllm:metric_{number} gauge\nvllm:metric_{number}{{engine="0",model_name="llama"}} 1.0\n'
        for number in range(200)
    )
    agent = "".join(
        f'ray_tpu_serving_requests_total{{WorkerId="{worker}",application="default",key="k{key}",model="llama",outcome="ok",pool="0"}} 1.0\n'
        for worker in range(2)
        for key in range(100)
    )
    engines = [(Engine("llama", f"slice-{number}", 0), text) for number in range(slices)]
    begun = time.process_time()
    page = exposition.page("default", [("10.0.0.1", agent)], engines, {})
    return sum(line[0] != "#" for line in page.splitlines()), (time.process_time() - begun) * 1e3


def main() -> None:
    """Print a table."""
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    with tempfile.TemporaryDirectory() as folder:
        log = RequestLog(Path(folder) / "requests.jsonl")
        print(
            f"| {REQUESTS:,} requests x {ROUNDS}, median | CPU us a request | of a core at {REQUESTS_A_SECOND}/s |"
        )
        print("|---|---|---|")
        for name, us in (
            ("the record alone", cost_us(None)),
            ("and metrics", cost_us(Journal(Recorder("default")))),
            ("and the request log", cost_us(Journal(Recorder("default"), log), log)),
        ):
            print(f"| {name} | {us:.1f} | {us * REQUESTS_A_SECOND / 1e4:.2f}% |")
        log.close()
    for slices in (4, 40):
        series, ms = pages_ms(slices)
        print(f"a page of {series:,} series is made in {ms:.1f} ms of CPU")
    print(f"{os.cpu_count()} cores")


if __name__ == "__main__":
    main()
