"""Every metric of the service: name, type, labels, buckets, who writes it, and what it tells.

Nothing else in this project makes up a metric's name. Labels are bounded: models, pools, slices, states, reasons and
outcomes are the service's, and `key` is the beginning of a key's hash (MOST_KEYS at most). Nothing a client wrote is a
label. Every row has the label `application` before its own. On the service's page a row that processes add up has a further
label `node`, the address of their host. Tests hold docs/reference/metrics.md and the dashboards to these rows.
"""

from dataclasses import dataclass
from enum import StrEnum

MOST_KEYS = 1000  # key ids a process tells apart; the rest share one label
NO_KEY = "none"
OTHER_KEYS = "other"
NO_MODEL = "none"  # of a request that reached no model of this service
NO_POOL = "none"  # of a request that no slice took
APPLICATION = "application"
NODE = "node"


class Kind(StrEnum):
    """A metric's type, as Prometheus calls it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Across(StrEnum):
    """How the page joins a series of several processes: their sum on each node, or the largest of all nodes."""

    SUM = "sum"
    MAX = "max"


@dataclass(frozen=True, eq=False)  # hashed by identity: hashing every field would cost more than counting
class Row:
    """One metric. `name` is as Prometheus shows it; `section` says which part of the service it is about.

    `labels` are those that its writer gives values for; the application's is the recorder's own.
    """

    name: str
    kind: Kind
    labels: tuple[str, ...]
    section: str
    tells: str
    buckets: tuple[float, ...] = ()
    across: Across = Across.SUM

    @property
    def all_labels(self) -> tuple[str, ...]:
        """The labels at Ray's agents."""
        return (APPLICATION, *self.labels)

    @property
    def page_labels(self) -> tuple[str, ...]:
        """The labels on the service's page."""
        return (*self.all_labels, NODE) if self.across is Across.SUM else self.all_labels


# From a token of a small model on a quiet slice to an answer that waited for a slice to start.
_WAIT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 40, 80, 160, 320)
_TOKEN_S = (
    0.0025,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1,
    2.5,
    5,
    10,
)
_ROUTER_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1, 5)
_REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 45, 60, 90, 120, 240, 480, 960, 1920)

_SLICE = ("model", "slice", "pool")
_CHIP = ("model", "slice", "host", "chip", "simulated")


def _counter(name: str, labels: tuple[str, ...], section: str, tells: str) -> Row:
    return Row(f"tpu_serving_{name}_total", Kind.COUNTER, labels, section, tells)


def _gauge(name: str, labels: tuple[str, ...], section: str, tells: str, across: Across = Across.MAX) -> Row:
    return Row(f"tpu_serving_{name}", Kind.GAUGE, labels, section, tells, across=across)


def _histogram(
    name: str, labels: tuple[str, ...], section: str, tells: str, buckets: tuple[float, ...]
) -> Row:
    return Row(f"tpu_serving_{name}", Kind.HISTOGRAM, labels, section, tells, buckets)


def _chip(name: str, tells: str) -> Row:
    """Ray's own names on a TPU host; simulated hosts are given the same."""
    return Row(f"tpu_{name}", Kind.GAUGE, _CHIP, "TPU", tells, across=Across.MAX)


REQUESTS = _counter(
    "requests",
    ("model", "key", "outcome", "pool"),
    "requests",
    "Requests ended, by how: ok, client_error, refused (key or its limits), overloaded (queue), no_slice, slice_lost, error, cancelled.",
)
PROMPT_TOKENS = _counter(
    "prompt_tokens", ("model", "key", "pool"), "requests", "Prompt tokens of answered requests."
)
OUTPUT_TOKENS = _counter(
    "output_tokens", ("model", "key", "pool"), "requests", "Tokens sent to clients; streamed ones by event."
)
TTFT = _histogram(
    "ttft_seconds",
    ("model", "pool"),
    "requests",
    "Arrival of a request to the first bytes of its streamed answer: queue, router and slice.",
    _WAIT_S,
)
INTER_TOKEN = _histogram(
    "inter_token_seconds",
    ("model", "pool"),
    "requests",
    "Mean time between the tokens of one streamed answer.",
    _TOKEN_S,
)
LONGEST_GAP = _histogram(
    "longest_gap_seconds",
    ("model", "pool"),
    "requests",
    "Longest time between two events of one streamed answer.",
    _TOKEN_S,
)
REQUEST = _histogram(
    "request_seconds",
    ("model", "pool"),
    "requests",
    "Arrival of a request to the end of its answer.",
    _REQUEST_S,
)
SLO = _counter(
    "slo_requests",
    ("model", "target", "met"),
    "requests",
    "Streamed answers by whether they met a target of the YAML's `slo:`, ttft or itl (mean of the answer); none without one.",
)
QUEUE = _histogram(
    "queue_seconds",
    ("model",),
    "requests",
    "Time a request was held in the router until a slice could take it.",
    _WAIT_S,
)
ROUTER = _histogram(
    "router_seconds",
    ("model",),
    "requests",
    "The router's own time from arrival to handing the request to a slice, queue left out.",
    _ROUTER_S,
)
SLICE_TTFT = _histogram(
    "slice_ttft_seconds",
    ("model", "pool"),
    "requests",
    "The slice's share of a streamed answer's time to first token: handed over to first bytes.",
    _WAIT_S,
)
PREEMPTIONS = _counter(
    "preemptions",
    ("model",),
    "requests",
    "Times that a stream was paused, or a batch's line given up, for a request of higher priority; counted at its end.",
)
PAUSED_SECONDS = _counter(
    "paused_seconds",
    ("model",),
    "requests",
    "Seconds that streams were paused for requests of higher priority; counted at their end.",
)
IN_FLIGHT = _gauge(
    "requests_in_flight", ("model",), "router", "Requests that routers have with slices.", Across.SUM
)
HELD = _gauge(
    "requests_held",
    ("model",),
    "router",
    "Requests that routers hold until a slice can take them.",
    Across.SUM,
)
ROUTER_CPU = _counter("router_cpu_seconds", (), "router", "CPU seconds of the router processes.")
RETRIES = _counter(
    "retries", ("model",), "failover", "Requests sent to another slice before their first token."
)
CONTINUATIONS = _counter(
    "continuations", ("model",), "failover", "Broken answers that went on on another slice."
)
POISONOUS = _counter(
    "poisonous_requests",
    ("model",),
    "failover",
    "Requests refused because two slices died of the same request.",
)
CHECKED = _counter(
    "answers_checked", ("model",), "failover", "Greedy answers that another slice was asked for again."
)
DIFFERED = _counter(
    "answers_differed", ("model",), "failover", "Of those, answers that differed by more than a near-tie."
)
WRONG = _counter(
    "wrong_slices", ("model",), "failover", "Slices taken out because they gave other tokens than two others."
)
BREAKER_OPEN = _gauge(
    "breaker_open",
    ("model", "slice"),
    "failover",
    "1 where a router gives a slice no requests because it failed.",
)
SLICE_STATE = _gauge(
    "slice_state",
    (*_SLICE, "state"),
    "slices",
    "1 for the state a slice is in: starting, serving, draining or lost.",
)
SLICE_STATE_SECONDS = _counter(
    "slice_state_seconds", (*_SLICE, "state"), "slices", "Seconds that a slice has spent in each state."
)
SLICE_STARTS = _counter("slice_starts", ("model", "pool"), "slices", "Replicas that took a slice.")
QUARANTINED = _gauge(
    "slice_quarantined",
    ("slice", "host"),
    "slices",
    "1 for a slice that no engine is placed on for a while, by the host on which engines failed.",
)
SLICE_START = _gauge(
    "slice_start_seconds", (*_SLICE, "phase"), "slices", "How long each phase of the slice's start took."
)
SLICE_RUNNING = _gauge("slice_requests_running", _SLICE, "slices", "Requests in the slice's running batch.")
SLICE_WAITING = _gauge(
    "slice_requests_waiting", _SLICE, "slices", "Requests that wait inside the slice's engine."
)
SLICE_KV = _gauge(
    "slice_kv_usage_ratio", _SLICE, "slices", "Share of the slice's KV cache in use, 1 is all of it."
)
SLICE_PROMPT = _counter("slice_prompt_tokens", _SLICE, "slices", "Prompt tokens the slice took on.")
SLICE_CACHED = _counter(
    "slice_cached_tokens", _SLICE, "slices", "Of its prompt tokens, those found in the prefix cache."
)
SLICE_OUTPUT = _counter("slice_output_tokens", _SLICE, "slices", "Tokens the slice wrote.")
SLICE_LATE_PROGRAMS = _counter(
    "slice_late_programs",
    _SLICE,
    "slices",
    "Programs that the slice's engine compiled while it served; none of an engine that compiles as requests come.",
)
SLICE_LATE_COMPILE = _counter(
    "slice_late_compile_seconds",
    _SLICE,
    "slices",
    "Seconds for which it compiled them, and its requests waited.",
)
WANTED = _gauge("slices_wanted", ("model",), "scaling", "Slices the model should have now.")
MISSING = _gauge(
    "slices_missing", ("model",), "scaling", "Of those, slices on order that have no hardware yet."
)
MISSING_SECONDS = _gauge(
    "slices_missing_seconds",
    ("model",),
    "scaling",
    "For how long some slice has been missing without a break.",
)
DECISIONS = _counter(
    "scaling_decisions",
    ("model", "pool", "direction"),
    "scaling",
    "Decisions on a pool by direction: start, up, down, hold or short (of a limit); `serving status` has the reasons in words.",
)
UNREACHABLE = _gauge(
    "scrape_sources_unreachable",
    (),
    "scrape",
    "Ray agents and engines that gave nothing to this scrape; their series are missing from it.",
)
TENSORCORE = _chip("tensorcore_utilization", "Share of a chip's matrix unit peak in use, percent.")
BANDWIDTH = _chip("memory_bandwidth_utilization", "Share of a chip's HBM bandwidth in use, percent.")
DUTY_CYCLE = _chip("duty_cycle", "Share of time in which a chip was computing, percent.")
HBM_USED = _chip("memory_used", "HBM in use on a chip, bytes.")
HBM_TOTAL = _chip("memory_total", "HBM of a chip, bytes.")

_ROWS = (
    REQUESTS,
    PROMPT_TOKENS,
    OUTPUT_TOKENS,
    TTFT,
    INTER_TOKEN,
    LONGEST_GAP,
    REQUEST,
    SLO,
    QUEUE,
    ROUTER,
    SLICE_TTFT,
    PREEMPTIONS,
    PAUSED_SECONDS,
    IN_FLIGHT,
    HELD,
    ROUTER_CPU,
    RETRIES,
    CONTINUATIONS,
    POISONOUS,
    CHECKED,
    DIFFERED,
    WRONG,
    BREAKER_OPEN,
    SLICE_STATE,
    SLICE_STATE_SECONDS,
    SLICE_STARTS,
    QUARANTINED,
    SLICE_START,
    SLICE_RUNNING,
    SLICE_WAITING,
    SLICE_KV,
    SLICE_PROMPT,
    SLICE_CACHED,
    SLICE_OUTPUT,
    SLICE_LATE_PROGRAMS,
    SLICE_LATE_COMPILE,
    WANTED,
    MISSING,
    MISSING_SECONDS,
    DECISIONS,
    UNREACHABLE,
    TENSORCORE,
    BANDWIDTH,
    DUTY_CYCLE,
    HBM_USED,
    HBM_TOTAL,
)
TABLE: dict[str, Row] = {row.name: row for row in _ROWS}

# vLLM's own metrics, with `application`, `model`, `slice` and `pool` in the place of `model_name`. The page passes on all of an engine's;
# dashboards and rules may count on these, which the simulated engine has too.
VLLM: dict[str, Kind] = {
    "vllm:num_requests_running": Kind.GAUGE,
    "vllm:num_requests_waiting": Kind.GAUGE,
    "vllm:kv_cache_usage_perc": Kind.GAUGE,
    "vllm:prompt_tokens_total": Kind.COUNTER,
    "vllm:generation_tokens_total": Kind.COUNTER,
    "vllm:prefix_cache_queries_total": Kind.COUNTER,
    "vllm:prefix_cache_hits_total": Kind.COUNTER,
    "vllm:num_preemptions_total": Kind.COUNTER,
    "vllm:request_success_total": Kind.COUNTER,
    "vllm:time_to_first_token_seconds": Kind.HISTOGRAM,
    "vllm:inter_token_latency_seconds": Kind.HISTOGRAM,
    "vllm:e2e_request_latency_seconds": Kind.HISTOGRAM,
    "vllm:request_queue_time_seconds": Kind.HISTOGRAM,
    "vllm:request_prefill_time_seconds": Kind.HISTOGRAM,
    "vllm:request_decode_time_seconds": Kind.HISTOGRAM,
    "vllm:iteration_tokens_total": Kind.HISTOGRAM,
}
