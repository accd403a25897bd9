"""The door to vLLM: an AsyncLLM on a slice behind vLLM's own HTTP app.

Names that move between vLLM versions are imported here and nowhere else. From 0.32 on the app builders live under
vllm.entrypoints.launchers; everything else here was read in 0.26.0.
"""

import asyncio
import dataclasses
import json
import multiprocessing
import os
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from serving import tracing
from serving.engine import continuing, simulated, stand_in
from serving.engine.owner import OWNER
from serving.engine.server import HttpServer, Load
from serving.engine.simulator.scheduler import page_tokens
from serving.errors import EngineStartError
from serving.planning import Plan
from serving.planning.adapters import flag_values
from serving.slices.group import HeldSlice
from serving.slices.simulation import CACHE
from serving.slices.watch import actor_died

# A cold XLA compile of a large model takes minutes, weights from object storage more; Serve puts no limit on a start.
_READY_TIMEOUT_S = 3 * 3600
_LOOK_S = 0.2
# Simulated hosts: XLA's CPU backend pays for every padded token and every block of KV, so both stay small.
_SIMULATED_BATCHED_TOKENS = 256
_SIMULATED_SEQUENCES = 32
_SIMULATED_KV_TOKENS = 16384


class VllmServer:
    """One engine on one slice and the HTTP server in front of it. Lives in the replica's event loop."""

    def __init__(self, plan: Plan, held: HeldSlice, group: Any, ray_address: str) -> None:
        self.port = 0
        self.max_model_len = 0
        self._plan = plan
        self._held = held
        self._group = group
        self._ray_address = ray_address
        self._said = Load()
        self._workers = ""
        self._engine: Any = None
        self._http: HttpServer | None = None

    async def start(self) -> None:
        """Start EngineCore and workers, load the model, open the HTTP server; raises EngineStartError.

        Blocks the event loop while the engine comes up: EngineCore has to be this thread's child (see owner.py).
        """
        os.environ.update(self._environment())
        if len(self._held.hosts) == 1:  # tpu-inference then runs in EngineCore itself, without Ray workers
            os.environ.pop("TPU_MULTIHOST_BACKEND", None)
        from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415  a process that never serves must not load vLLM
        from vllm.entrypoints.openai.api_server import build_app, init_app_state  # noqa: PLC0415
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

        args = self._arguments()
        try:
            config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
            if len(self._held.hosts) > 1:
                config.parallel_config.placement_group = self._group
                self._workers = (
                    f"vllm_Worker_{config.instance_id}"  # build_actor_name in vllm.v1.executor.ray_utils
                )
            self._engine = AsyncLLM.from_vllm_config(config, stat_loggers=[self._stat_logger()])
        except Exception as error:
            raise EngineStartError(f"{self._plan.model.name} on slice {self._held.name}: {error}") from error
        self.max_model_len = config.model_config.max_model_len
        tasks = await self._engine.get_supported_tasks()
        app = build_app(args, tasks, self._engine.model_config)
        await init_app_state(self._engine, app.state, args, tasks)
        continuing.install(app.state)
        self._http = HttpServer(app, self._held.hosts[0].ip)
        self.port = self._http.port
        app.state.server = self._http.uvicorn  # vLLM's handlers of engine errors stop it
        self._http.start()

    @property
    def load(self) -> Load:
        """What EngineCore said in its last step, less what was ended since: an idle engine says nothing."""
        unfinished = self._engine.output_processor.get_num_unfinished_requests()
        running = min(self._said.running, unfinished)
        return dataclasses.replace(
            self._said,
            running=running,
            waiting=unfinished - running,
            kv_usage=self._said.kv_usage if unfinished else 0.0,
        )

    async def worker_died(self) -> str:
        """Wait until one of this start's workers is dead, which EngineCore overlooks until it has them all."""
        while not self._workers:  # noqa: ASYNC110  set in another event loop's thread
            await asyncio.sleep(_LOOK_S)
        return await actor_died(self._workers)

    async def probe(self) -> None:
        """Ask EngineCore and every worker for a sign of life; raises what they raise."""
        await self._engine.check_health()
        await self._engine.collective_rpc("check_health")

    async def died(self) -> str:
        """Wait until the engine is dead; returns how it was noticed."""
        while not self._engine.errored:
            if not all(child.is_alive() for child in multiprocessing.active_children()):
                return "the engine process ended"
            await asyncio.sleep(_LOOK_S)
        return "the engine reports itself dead"

    async def drain(self, drain_s: float) -> None:
        """Take no new connection, wait until requests are answered or drain_s is over, then end the engine."""
        if self._http:
            await self._http.drain(drain_s)
        if self._engine:
            self._engine.shutdown()
        self.kill()

    def kill(self) -> None:
        """End the engine's processes at once; requests in flight then end with an error."""
        for child in multiprocessing.active_children():
            child.kill()

    @property
    def requests_open(self) -> int:
        return self._http.requests_open if self._http else 0

    def _environment(self) -> dict[str, str]:
        environment = {
            OWNER: str(os.getpid()),
            "RAY_ADDRESS": self._ray_address,
            "VLLM_HOST_IP": self._held.hosts[0].ip,
            "VLLM_ENGINE_READY_TIMEOUT_S": str(_READY_TIMEOUT_S),
            "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "1",
            # Without it ranks follow node ids, and rank r would not be worker r of the slice.
            "VLLM_RAY_BUNDLE_INDICES": self._held.bundle_order,
            "TPU_MULTIHOST_BACKEND": "ray",
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": tracing.protocol(),  # vLLM's default is gRPC
        }
        environment |= self._plan.environment
        if simulated.is_simulated():
            environment["VLLM_XLA_CACHE_PATH"] = f"{os.environ[CACHE]}/xla"
        return environment

    def _arguments(self) -> Namespace:
        from vllm.entrypoints.openai.cli_args import make_arg_parser  # noqa: PLC0415
        from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

        flags = _flags(self._options())
        try:
            args: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args(flags)
        except SystemExit:
            raise EngineStartError(
                f"{self._plan.model.name}: vLLM does not take {' '.join(flags)}; see the log"
            ) from None
        return args

    def _options(self) -> dict[str, Any]:
        plan = self._plan
        options = dict(plan.engine) | {
            "model": plan.model.model,
            "served_model_name": [plan.model.name],
            "tensor_parallel_size": plan.tensor,
            "pipeline_parallel_size": plan.pipeline,
            "data_parallel_size": plan.data,
            "distributed_executor_backend": "ray" if len(self._held.hosts) > 1 else None,
            # Nobody's URL is fetched from inside the cluster unless the YAML allows its domain.
            "allowed_media_domains": plan.engine.get("allowed_media_domains", ["none.invalid"]),
            "otlp_traces_endpoint": plan.engine.get("otlp_traces_endpoint", tracing.endpoint()),
        }
        if plan.adapters:
            options["lora_modules"] = flag_values(plan.engine)
        if plan.pipeline > 1:
            options["async_scheduling"] = False  # IndexError in tpu-inference 0.26 otherwise
        return options | (_simulated_options(plan) if simulated.is_simulated() else {})

    def _stat_logger(self) -> Any:
        from vllm.v1.metrics.loggers import StatLoggerBase  # noqa: PLC0415

        said = self._said

        class LoadLogger(StatLoggerBase):  # type: ignore[misc]
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                pass

            def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
                if iteration_stats is not None:
                    said.last_output_s = time.monotonic()
                    said.prompt_tokens += iteration_stats.prompt_token_stats.total
                    said.cached_tokens += iteration_stats.prompt_token_stats.cached_tokens
                    said.output_tokens += iteration_stats.num_generation_tokens
                if scheduler_stats is not None:
                    said.running = scheduler_stats.num_running_reqs
                    said.kv_usage = scheduler_stats.kv_cache_usage

            def log_engine_initialized(self) -> None:
                pass

        return LoadLogger


def _flags(options: dict[str, Any]) -> list[str]:
    """Options as vLLM's command line takes them: its parser turns JSON into the config classes that fields want."""
    flags: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        match value:
            case None:
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


def _simulated_options(plan: Plan) -> dict[str, Any]:
    """What a simulated host changes: the weights where the YAML names a hub's model, fp32, and small sizes."""
    checkpoint = stand_in.checkpoint(plan, Path(os.environ[CACHE]))
    asked = plan.engine
    length = min(asked.get("max_model_len") or stand_in.MAX_MODEL_LEN, stand_in.MAX_MODEL_LEN)
    return {
        "model": str(checkpoint),
        # Adapters of the real weights say nothing to the stand-in, which answers in their names.
        "served_model_name": [plan.model.name, *plan.adapters],
        "lora_modules": None,
        "enable_lora": False,
        "dtype": "float32",
        "quantization": None,
        "load_format": "auto",
        "max_model_len": length,
        "max_num_seqs": min(asked.get("max_num_seqs") or _SIMULATED_SEQUENCES, _SIMULATED_SEQUENCES),
        "max_num_batched_tokens": _SIMULATED_BATCHED_TOKENS,
        # A seeded model, left free to, fills an answer with white space to its end.
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        "num_gpu_blocks_override": _SIMULATED_KV_TOKENS // page_tokens(length),
    }
