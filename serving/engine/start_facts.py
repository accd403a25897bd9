"""What the workers of an engine find once it is up: devices, mesh, cache, compiled programs, then and later. Told by themselves.

A worker extension: vLLM adds the methods below to its worker's class, and EngineCore calls them on all workers at once. It
imports this module before a worker compiles anything.
"""

import os
import resource
import sys
import threading
from dataclasses import asdict
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity

from serving.engine import grammar_rows, greedy_drafts
from serving.engine.compilation_watch import COMPILED
from serving.engine.late_programs import Compilations, Step, step_of
from serving.state.records import WorkerStart

# An event of JAX 0.10: a program found in the cache, which COMPILED tells of too.
_CACHE_HIT = "/jax/compilation_cache/cache_hits"


_compilations = Compilations()


def _took(event: str, seconds: float, **details: Any) -> None:
    if event == COMPILED:
        step = _step() if _compilations.late is not None else None
        _compilations.compiled(str(details.get("fun_name")), seconds, threading.get_ident(), step)


def _happened(event: str, **_: Any) -> None:
    if event == _CACHE_HIT:
        _compilations.hit(threading.get_ident())


def _step() -> Step | None:
    """The step that this thread is in: JAX tells its listeners where it compiles, below the runner's and the worker's methods."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001  the callers, and what they were given
    while frame:
        if (scheduled := frame.f_locals.get("scheduler_output")) is not None:
            try:
                return step_of(scheduled)
            except Exception:  # noqa: BLE001  a step must not fail for what is told of it
                return None
        frame = frame.f_back
    return None


jax.monitoring.register_event_duration_secs_listener(_took)
jax.monitoring.register_event_listener(_happened)


class StartFacts:
    """Methods of a tpu-inference worker. Their names begin with ours, so that no worker has them already."""

    model_runner: Any
    vllm_config: Any

    def serving_start_facts(self) -> dict[str, Any]:
        """WorkerStart as plain data. Every worker has to be asked: they compute one sum together."""
        runner, mesh = self.model_runner, self.model_runner.mesh
        programs, seconds, hits = _compilations.programs, _compilations.seconds, _compilations.cache_hits
        stats = jax.local_devices()[0].memory_stats() or {}
        cached = runner.kv_cache_config
        tokens = get_kv_cache_capacity(self.vllm_config, cached)[0] if cached.kv_cache_groups else 0
        return asdict(
            WorkerStart(
                worker_id=int(os.environ.get("TPU_WORKER_ID", "0")),
                process_index=jax.process_index(),
                local_devices=jax.local_device_count(),
                devices=jax.device_count(),
                hbm_bytes=int(stats.get("bytes_limit", 0)),
                summed=_sum_over(mesh),
                mesh={name: int(size) for name, size in mesh.shape.items()},
                implementation=_implementation(runner.model),
                cache_tokens=int(tokens),
                memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
                programs=programs,
                compile_s=round(seconds, 1),
                cache_hits=hits,
                precompiles=os.environ.get("SKIP_JAX_PRECOMPILE", "0") in ("", "0"),
            )
        )

    def serving_mend(self) -> None:
        """Have this worker do right what tpu-inference does not, before it has a request."""
        grammar_rows.install()
        greedy_drafts.install()

    def serving_late_programs(self) -> dict[str, Any]:
        """Late as plain data: what this worker has compiled since the first call."""
        return asdict(_compilations.serve())


def _sum_over(mesh: Mesh) -> int:
    """A one on every device of the mesh, summed by all of them: the number of devices, if they all take part."""
    ones = jax.jit(
        lambda: jnp.ones(tuple(mesh.shape.values()), jnp.int32),
        out_shardings=NamedSharding(mesh, PartitionSpec(*mesh.axis_names)),
    )()
    total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))(ones)
    return int(total.addressable_data(0))


def _implementation(model: Any) -> str:
    """As MODEL_IMPL_TYPE names it: vLLM's own model through torchax, or tpu-inference's in JAX."""
    return "vllm" if ".models.vllm." in f"{type(model).__module__}." else "flax_nnx"
