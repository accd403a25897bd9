"""The door to vLLM: an AsyncLLM on a slice behind vLLM's own HTTP app.

Only this module imports names that move between vLLM versions. From 0.32 on the app builders live under
vllm.entrypoints.launchers; everything else here was read in 0.26.0.
"""

import asyncio
import contextlib
import dataclasses
import io
import json
import multiprocessing
import os
import signal
import time
import traceback
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from serving import environment, tracing
from serving.engine import (
    client_mistakes,
    refusals,
    resume,
    short_texts,
    steps,
    stopped_answers,
    token_logprobs,
)
from serving.engine.compilation_watch import Sights
from serving.engine.late_programs import Late, most
from serving.engine.protocol import MOST_PIXELS
from serving.engine.redaction import redacted, secrets_of
from serving.engine.server import EngineSite, Load
from serving.environment import HOST_BOUNDS, OWNER, REPLICA, STAGES
from serving.errors import EngineStartError, ServingError
from serving.http_server import HttpServer
from serving.planning import Plan
from serving.planning.adapters import flag_values
from serving.planning.engine_options import ONLY_ON, TOOL_PARSER
from serving.planning.starts import compilations
from serving.slices.host_watch import actor_died, actor_processes, first
from serving.slices.preflight import Needs, cpus, engine_needs
from serving.slices.process_watch import descendants
from serving.state.gcs import Store
from serving.state.records import WorkerStart

# A cold XLA compile of a large model takes minutes, weights from object storage longer; Serve does not limit a start.
_READY_TIMEOUT_S = 3 * 3600
_LOOK_S = 0.2
_COMPILATIONS = "NUM_PRECOMPILE_WORKERS"
_EXTENSION = "serving.engine.start_facts.StartFacts"  # by name: it imports JAX, which only workers need
# With these, vLLM's events are for somebody else, or a dropped block may still lie elsewhere.
_OTHER_CACHES = frozenset({"kv_events_config", "kv_offloading_size", "kv_transfer_config"})


@dataclass(frozen=True)
class Overrides:
    """Changes to an engine's options (vLLM's names) and environment on a host that is no TPU VM.

    `left_out` are variables of the plan that such a host can't take.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()


class VllmServer:
    """One engine on one slice and the HTTP server in front of it. Lives in the replica's event loop."""

    def __init__(self, plan: Plan, site: EngineSite, overrides: Overrides | None = None) -> None:
        self.max_model_len = 0
        self._plan = plan
        self._site = site
        self._held = site.held
        self._overrides = overrides or Overrides()
        self._load = Load()
        self._workers = ""
        self._children: list[Any] = []
        self._engine: Any = None
        self._http: HttpServer | None = None
        self._store: Store | None = None
        self._sights = Sights()
        self._cache: Any = None  # KvEvents of an engine that tells what its prefix cache drops

    async def start(self) -> None:
        """Start EngineCore and workers, load the model, open the HTTP server; raises EngineStartError.

        Blocks the event loop while the engine comes up: EngineCore has to be this thread's child (see parent_death.py).
        """
        if _tells_drops(self._plan):
            from serving.engine.kv_events import KvEvents  # noqa: PLC0415  pyzmq and msgspec come with vLLM

            self._cache = KvEvents()
        try:
            await self._start()
        except ServingError:
            raise
        except Exception as error:  # noqa: BLE001  vLLM and its libraries raise anything
            failed = self._start_failed(error)
            raise failed from failed.__cause__
        finally:
            if self._cache:
                self._cache.close()

    async def _start(self) -> None:
        environment.write(self._environment())
        from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415  a process that never serves must not load vLLM
        from vllm.entrypoints.openai.api_server import build_app, init_app_state  # noqa: PLC0415
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

        args = self._arguments()
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
        if len(self._held.hosts) > 1:
            config.parallel_config.ray_runtime_env = self._worker_environment(config)
            config.parallel_config.placement_group = self._site.group
            # As build_actor_name in vllm.v1.executor.ray_utils does.
            self._workers = f"vllm_Worker_{config.instance_id}"
        self._engine = AsyncLLM.from_vllm_config(config, stat_loggers=[self._stat_logger()])
        # Kept: another call would reap dead children before it lists them.
        self._children = multiprocessing.active_children()
        if self._cache:
            await self._cache.follow()
        self.max_model_len = config.model_config.max_model_len
        tasks = await self._engine.get_supported_tasks()
        await self._engine.collective_rpc("serving_mend")
        app = build_app(args, tasks, self._engine.model_config)
        await init_app_state(self._engine, app.state, args, tasks)
        resume.install(app.state)
        steps.install(app.state)
        token_logprobs.install(self._engine)
        client_mistakes.install(self._engine, app.state, tasks, self._plan.no_grammars)
        short_texts.install(self._engine.renderer)
        stopped_answers.install()
        refusals.install(app)
        by_key = short_texts.known_by_key(app)
        self._http = HttpServer(by_key, self._held.hosts[0].ip, tls=self._site.tls)
        app.state.server = self._http.uvicorn  # vLLM's handlers of engine errors stop it
        self._http.start()

    @property
    def http(self) -> HttpServer:
        assert self._http is not None  # noqa: S101  `start` came first
        return self._http

    @property
    def load(self) -> Load:
        """EngineCore's report of its last step, less requests that ended since: an idle engine reports nothing."""
        processor = self._engine.output_processor
        unfinished = processor.get_num_unfinished_requests()
        running = min(self._load.running, unfinished)
        return dataclasses.replace(
            self._load,
            running=running,
            waiting=unfinished - running,
            reading=sum(state.is_prefilling for state in tuple(processor.request_states.values())),
            kv_usage=self._load.kv_usage if unfinished else 0.0,
            cache_age_s=self._cache.age_s(time.monotonic()) if self._cache else 0.0,
        )

    async def worker_starts(self) -> tuple[WorkerStart, ...]:
        """What every worker found; they compute a sum over the slice's devices together."""
        workers = await self._engine.collective_rpc("serving_start_facts")
        return tuple(WorkerStart(**worker) for worker in workers)

    async def late_programs(self) -> Late:
        """Of the worker that has compiled most since the first call, or read most from the cache."""
        return most(
            [Late.of(programs) for programs in await self._engine.collective_rpc("serving_late_programs")]
        )

    async def worker_died(self) -> str:
        """Wait until one of this start's workers is dead. EngineCore overlooks that until all workers are there."""
        while not self._workers:  # noqa: ASYNC110  set in another event loop's thread
            await asyncio.sleep(_LOOK_S)
        return await actor_died(self._workers)

    async def probe(self) -> None:
        """Ask EngineCore and every worker for a sign of life; raises what they raise."""
        await self._engine.check_health()
        await self._engine.collective_rpc("check_health")

    def needs(self) -> Needs:
        """Memory, and disk for the whole checkpoint on every host, unless it is there or is streamed."""
        return engine_needs(self._plan, str(self._options()["model"]))

    def processes(self) -> dict[str, dict[int, str]]:
        """EngineCore, its forks (one scheduler each with data parallelism), and the workers that are Ray actors."""
        workers = actor_processes(self._workers) if self._workers else {}
        own = workers.setdefault(self._held.hosts[0].node_id, {})
        for child in self._children:
            own |= {child.pid: child.name, **descendants(child.pid)}
        return workers

    def compiling_s(self) -> float | None:
        """What processes of this engine have told the control store (see startup.py)."""
        self._store = self._store or Store(self._site.gcs_address)
        return self._sights.longest_s(self._store.compiling(self._site.replica), time.monotonic())

    async def died(self) -> str:
        """Wait until the engine reports itself dead, or its HTTP server has ended; returns which."""
        return await first(self._errored, self.http.ended)

    async def _errored(self) -> str:
        while not self._engine.errored:  # noqa: ASYNC110  vLLM has no event for it
            await asyncio.sleep(_LOOK_S)
        return "the engine reports itself dead"

    def kill(self) -> None:
        """End the engine's processes on this host at once, with their forks; requests in flight end with an error."""
        children = self._children or multiprocessing.active_children()
        for pid in [pid for child in children if child.pid for pid in (*descendants(child.pid), child.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @property
    def requests_open(self) -> int:
        return self._http.requests_open if self._http else 0

    def _environment(self) -> dict[str, str | None]:
        return {
            OWNER: str(os.getpid()),
            REPLICA: self._site.replica,
            "RAY_ADDRESS": self._site.gcs_address,
            "VLLM_HOST_IP": self._held.hosts[0].ip,
            "VLLM_ENGINE_READY_TIMEOUT_S": str(_READY_TIMEOUT_S),
            "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "1",
            # A forked EngineCore would not load our plugins, and so outlive this process (parent_death.py).
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            # Without this, ranks follow node ids, and rank r would not be worker r of the slice.
            "VLLM_RAY_BUNDLE_INDICES": self._held.bundle_order,
            # Unset on one host: tpu-inference then runs in EngineCore itself, without Ray workers.
            "TPU_MULTIHOST_BACKEND": "ray" if len(self._held.hosts) > 1 else None,
            "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",  # an allowed domain must not send the engine on to another
            "VLLM_MAX_IMAGE_PIXELS": str(MOST_PIXELS),
            **self._pipeline_environment(),
            # tpu-inference 0.26 holds prompts back for up to 30 s to start them together (dp_scheduler.py).
            "DP_SCHED_BATCH_PREFILL": "0",
            **self._compiling(),
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": tracing.protocol(),  # vLLM's default is gRPC
            **self._planned_environment(),
            **self._overrides.environment,
        }

    def _worker_environment(self, config: Any) -> dict[str, Any]:
        """Ray's runtime environment of the workers on the slice's hosts, with the plan's variables for the engine.

        vLLM hands its own environment to workers that have already imported tpu-inference, and does not replace what is
        there: LIBTPU_INIT_ARGS and XLA_FLAGS, which tpu-inference sets itself, would be lost (env_override.py).
        """
        base = dict(config.parallel_config.ray_runtime_env or {})
        planned = {**self._compiling(), **self._planned_environment()}
        return {**base, "env_vars": {**base.get("env_vars", {}), **planned}}

    def _compiling(self) -> dict[str, str]:
        """How many programs tpu-inference compiles at once: as the pod says, else by this host's CPUs. Its own default is one."""
        return {_COMPILATIONS: os.environ.get(_COMPILATIONS) or str(compilations(int(cpus())))}

    def _planned_environment(self) -> dict[str, str]:
        planned = self._plan.environment
        return {name: value for name, value in planned.items() if name not in self._overrides.left_out}

    def _pipeline_environment(self) -> dict[str, str | None]:
        """What stages on several hosts need to find one another: see stages.py."""
        hosts = [host.ip for host in self._held.hosts]
        staged = self._plan.pipeline > 1 and len(hosts) > 1
        return {
            STAGES: ",".join(hosts) if staged else None,
            HOST_BOUNDS: self._plan.slice.host_bounds if staged else None,
        }

    def _arguments(self) -> Namespace:
        from vllm.entrypoints.openai.cli_args import make_arg_parser  # noqa: PLC0415
        from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

        flags = _flags(self._options())
        printed = io.StringIO()  # its usage, of some thousand lines, and the flags that it does not know
        try:
            with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
                args: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args(flags)
        except SystemExit:
            last = printed.getvalue().strip().splitlines()[-1:]
            reason = redacted(" ".join(last), {*self._secrets(), *_unknown_values(flags, last)})
            raise EngineStartError(
                f"{self._plan.model.name}: vLLM does not take its options: {reason}"
            ) from None
        return args

    def _start_failed(self, error: Exception) -> EngineStartError:
        """The error of a start, without the secrets that pydantic and others print with a wrong option."""
        secrets = self._secrets()
        failed = EngineStartError(
            f"{self._plan.model.name} on slice {self._held.name}: {redacted(str(error), secrets)}"
        )
        trace = "".join(traceback.format_exception(error))
        failed.__cause__ = error if redacted(trace, secrets) == trace else None
        failed.__suppress_context__ = True
        return failed

    def _secrets(self) -> set[str]:
        return secrets_of(self._plan.engine, self._overrides.options, os.environ)

    def _options(self) -> dict[str, Any]:
        plan = self._plan
        options = plan.options | {
            "worker_extension_cls": _EXTENSION,
            "distributed_executor_backend": "ray" if len(self._held.hosts) > 1 else None,
            # The engine fetches no URL from inside the cluster unless the YAML allows its domain.
            "allowed_media_domains": plan.engine.get("allowed_media_domains") or ["none.invalid"],
            "structured_outputs_config": {
                "backend": _grammar_backend(plan.engine),
                **(plan.engine.get("structured_outputs_config") or {}),
            },
            "otlp_traces_endpoint": plan.engine.get("otlp_traces_endpoint", tracing.endpoint()),
        }
        if self._cache:
            options["kv_events_config"] = self._cache.config
        if plan.adapters:
            options["lora_modules"] = flag_values(plan.engine)
        if plan.engine.get(TOOL_PARSER):
            options["enable_auto_tool_choice"] = True
        return options | dict(self._overrides.options)

    def _stat_logger(self) -> Any:
        from vllm.v1.metrics.loggers import StatLoggerBase  # noqa: PLC0415

        load = self._load

        class LoadLogger(StatLoggerBase):  # type: ignore[misc]
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                pass

            def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
                if iteration_stats is not None:
                    load.last_output_s = time.monotonic()
                    load.prompt_tokens += iteration_stats.prompt_token_stats.total
                    load.cached_tokens += iteration_stats.prompt_token_stats.cached_tokens
                    load.output_tokens += iteration_stats.num_generation_tokens
                    load.finished += len(iteration_stats.finished_requests)
                if scheduler_stats is not None:
                    load.running = scheduler_stats.num_running_reqs
                    load.kv_usage = scheduler_stats.kv_cache_usage

            def log_engine_initialized(self) -> None:
                pass

        return LoadLogger


def _grammar_backend(engine: Mapping[str, Any]) -> str:
    """The library that compiles grammars.

    vLLM's own choice, `auto`, is made by each request and kept for good by EngineCore with the first: a client's first schema decided
    which library compiled all others, also those that were checked with another. Mistral's tool parser alone writes grammars that
    xgrammar does not read.
    """
    return "auto" if engine.get(TOOL_PARSER) == "mistral" else "xgrammar"


def _tells_drops(plan: Plan) -> bool:
    """Whether the engine has one prefix cache and tells what it drops.

    tpu-inference 0.26 gives every copy of attention a scheduler of its own, and all would publish at one socket.
    """
    layout, engine = plan.layout, plan.engine
    schedulers = layout.data * layout.attention_groups
    return (
        schedulers == 1
        and engine.get("enable_prefix_caching") is not False
        and not _OTHER_CACHES & engine.keys()
    )


def _flags(options: dict[str, Any]) -> list[str]:
    """Options as vLLM's command line takes them: its parser turns JSON into config classes."""
    flags: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        match value:
            case None | []:
                continue
            case False if name in ONLY_ON:
                continue
            case bool():
                flags.append(f"--{flag}" if value else f"--no-{flag}")
            case list():
                flags += [f"--{flag}", *map(str, value)]
            case dict():
                flags += [f"--{flag}", json.dumps(value)]
            case _:
                flags += [f"--{flag}", str(value)]
    return flags


def _unknown_values(flags: list[str], printed: list[str]) -> set[str]:
    """Values of the flags that the parser names as unknown: nobody knows which of them are secret."""
    if not any("unrecognized arguments" in text for text in printed):
        return set()
    return {flag for flag in flags if not flag.startswith("--")}
