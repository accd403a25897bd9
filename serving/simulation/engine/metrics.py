"""The simulated engine's metrics, under vLLM's names, labels and buckets, so that dashboards and scaling see no difference."""

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from serving.simulation.engine.scheduler import Request, Scheduler, Step, Totals

_FIRST_TOKEN_S = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10]
_FIRST_TOKEN_S += [20, 40, 80, 160, 640, 2560]
_BETWEEN_TOKENS_S = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10]
_BETWEEN_TOKENS_S += [20, 40, 80]
_REQUEST_S = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680]
_STEP_TOKENS = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
_LABELS = ("model_name", "engine")


class Metrics:
    """The measurements of one scheduler, in a registry of its own."""

    def __init__(self, model: str, max_model_len: int, scheduler: Scheduler) -> None:
        self._registry = CollectorRegistry()
        self._labels = (model, "0")
        self._counted = Totals()
        self._scheduler = scheduler
        pool = scheduler.pool
        self._gauge("num_requests_running", "Requests in the running batch.", lambda: len(scheduler.running))
        self._gauge("num_requests_waiting", "Requests waiting to run.", lambda: len(scheduler.waiting))
        self._gauge("kv_cache_usage_perc", "KV cache in use, 1 is all of it.", lambda: pool.usage)
        self._counters = {
            "prompt_tokens": self._counter("prompt_tokens", "Prompt tokens taken on."),
            "written_tokens": self._counter("generation_tokens", "Tokens written."),
            "queried_tokens": self._counter("prefix_cache_queries", "Prompt tokens looked up."),
            "cached_tokens": self._counter("prefix_cache_hits", "Prompt tokens found in the cache."),
            "preemptions": self._counter("num_preemptions", "Requests that gave their blocks back."),
        }
        self._finished = Counter(
            "vllm:request_success",
            "Requests answered.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        lengths = [n * 10**e for e in range(7) for n in (1, 2, 5) if n * 10**e <= max_model_len]
        self._prompt_tokens = self._histogram("request_prompt_tokens", "Tokens of a prompt.", lengths)
        self._answer_tokens = self._histogram("request_generation_tokens", "Tokens of an answer.", lengths)
        self._step_tokens = self._histogram("iteration_tokens_total", "Tokens of a step.", _STEP_TOKENS)
        self._first_s = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_S
        )
        self._between_s = self._histogram("inter_token_latency_seconds", "Token to token.", _BETWEEN_TOKENS_S)
        self._mean_s = self._histogram(
            "request_time_per_output_token_seconds", "Mean time a token.", _BETWEEN_TOKENS_S
        )
        self._all_s = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", _REQUEST_S)
        self._queue_s = self._histogram("request_queue_time_seconds", "Arrival to first step.", _REQUEST_S)
        self._inference_s = self._histogram(
            "request_inference_time_seconds", "First step to end.", _REQUEST_S
        )
        self._prefill_s = self._histogram(
            "request_prefill_time_seconds", "First step to first token.", _REQUEST_S
        )
        self._decode_s = self._histogram("request_decode_time_seconds", "First token to end.", _REQUEST_S)

    def step(self, step: Step) -> None:
        """Take over what the scheduler has counted since the last step."""
        self._step_tokens.observe(step.batch.decodes + step.batch.prefill_tokens)
        totals, counted = self._scheduler.totals, self._counted
        for name, counter in self._counters.items():
            if grown := getattr(totals, name) - getattr(counted, name):
                counter.inc(grown)
                setattr(counted, name, getattr(totals, name))

    def token(self, since_last_s: float | None, since_arrival_s: float) -> None:
        if since_last_s is None:
            self._first_s.observe(since_arrival_s)
        else:
            self._between_s.observe(since_last_s)

    def finished(self, request: Request, reason: str) -> None:
        """Count a request that is answered in full."""
        self._finished.labels(*self._labels, reason).inc()
        self._prompt_tokens.observe(len(request.prompt))
        self._answer_tokens.observe(request.written)
        scheduled, first, last = request.scheduled_s, request.first_token_s, request.last_token_s
        if scheduled is None or first is None or last is None:
            return
        self._all_s.observe(last - request.arrived_s)
        self._queue_s.observe(scheduled - request.arrived_s)
        self._inference_s.observe(last - scheduled)
        self._prefill_s.observe(first - scheduled)
        self._decode_s.observe(last - first)
        if request.written > 1:
            self._mean_s.observe((last - first) / (request.written - 1))

    def text(self) -> bytes:
        """As /metrics shows it."""
        return generate_latest(self._registry)

    def _gauge(self, name: str, meaning: str, read: Callable[[], float]) -> None:
        gauge = Gauge(f"vllm:{name}", meaning, _LABELS, registry=self._registry)
        gauge.labels(*self._labels).set_function(read)

    def _counter(self, name: str, meaning: str) -> Counter:
        return Counter(f"vllm:{name}", meaning, _LABELS, registry=self._registry).labels(*self._labels)

    def _histogram(self, name: str, meaning: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"vllm:{name}", meaning, _LABELS, buckets=buckets, registry=self._registry).labels(
            *self._labels
        )
