"""`python -m serving.compiler.worker FD PARENT`: one compile process. A job comes as JSON on stdin, events go as JSON lines to FD.

It ends with the process PARENT.

vLLM's and JAX's own words go to stdout and stderr. The events:

- `built` has the engine and its ledger
- `lowering` and `compiling` have a program's place in the ledger
- `done` has what became of the program
- `unbuildable` has the reason
"""

import json
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from serving import environment, hub
from serving.compiler.configs import checkpoint_config
from serving.compiler.records import Compiled, Job, chosen
from serving.compiler.schedule import schedule
from serving.config import load
from serving.engine.parent_death import die_with
from serving.errors import CompileError, ServingError
from serving.planning import Plan
from serving.planning.checkpoints import config_of
from serving.planning.plan import plan

_REASON_LINES = 12  # of a compiler's message, which may go on for pages


@dataclass(frozen=True)
class Report:
    """The parent's end of a pipe."""

    stream: TextIO

    def tell(self, event: str, **fields: Any) -> None:
        self.stream.write(json.dumps({"event": event, **fields}) + "\n")
        self.stream.flush()


def run(job: Job, report: Report) -> None:
    decided = planned(job)
    environment.write({"TPU_LIBRARY_PATH": job.libtpu, **_for_libtpu(decided.environment)})
    import jax  # noqa: PLC0415  only once its environment is set

    from serving.compiler import abstract, engine  # noqa: PLC0415

    stages = decided.pipeline > 1
    devices = engine.devices_of(decided.slice, 1 if stages else decided.slice.hosts)
    wanted = math.prod(decided.mesh.values())
    if len(devices) != wanted:
        raise CompileError(
            f"libtpu describes {decided.slice} with {len(devices)} devices, the plan has {wanted}"
        )
    abstract.install(devices, decided.slice.generation)
    abstract.install_torch()
    with tempfile.TemporaryDirectory() as folder:
        config = checkpoint_config(
            config_of(str(decided.engine.get("hf_config_path") or decided.model.model), hub.config_of),
            job.layers,
        )
        (Path(folder) / "config.json").write_text(json.dumps(config))
        options = decided.options | {
            "model": folder,
            "hf_config_path": None,
            "skip_tokenizer_init": True,
            "tokenizer": None,
            "reasoning_parser": "",  # it would ask a tokenizer, and compiles nothing
            "load_format": "auto",  # nothing is loaded; tpu-inference's DeepSeek takes no dummy weights
        }
        built = engine.build(decided, options, devices, stage=job.stage, blocks=job.blocks)
    report.tell("built", engine=asdict(built.built))
    if job.cache:  # from here on: what the build has compiled is for this machine's CPU
        jax.config.update("jax_compilation_cache_dir", job.cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    programs = job.programs
    if programs is None:
        programs = chosen(built.built.programs, sequences=decided.most_sequences, full=job.full)
    for index in programs:
        report.tell("done", program=asdict(_compiled(built, index, report)))


def _for_libtpu(variables: Mapping[str, str]) -> dict[str, str]:
    """A plan's variables, with XLA's flags told to libtpu: the XLA of this process is that of CPUs, which ends at a TPU's flag."""
    flags = [variables[name] for name in ("LIBTPU_INIT_ARGS", "XLA_FLAGS") if variables.get(name)]
    others = {name: value for name, value in variables.items() if name != "XLA_FLAGS"}
    return {**others, "LIBTPU_INIT_ARGS": " ".join(flags)} if flags else others


def planned(job: Job) -> Plan:
    """The plan that the job names: the file, the model and the pool are the parent's, which planned them too."""
    services = load(Path(job.file)).services.values()
    pools = [spec for service in services for model in service.models for spec in model.per_pool()]
    plans = (plan(spec, hub.config_of, estimated=True) for spec in pools if spec.name == job.model)
    return next(candidate for candidate in plans if candidate.pool == job.pool)


def _compiled(built: Any, index: int, report: Report) -> Compiled:
    import jax  # noqa: PLC0415

    call = built.calls[index]
    began = time.monotonic()
    report.tell("lowering", program=index)
    with jax.set_mesh(built.runner.mesh):
        try:
            lowered = call.function.lower(*call.arguments, **call.keywords)
        except Exception as error:  # noqa: BLE001  tracing runs model code, which raises anything
            traceback.print_exc()
            return Compiled(index, "not lowered", reason=_reason(error))
        lower_s = time.monotonic() - began
        report.tell("compiling", program=index)
        try:
            compiled = lowered.compile()
        except Exception as error:  # noqa: BLE001  XLA's errors have several types
            return Compiled(index, "refused", reason=_reason(error), lower_s=round(lower_s, 1))
    compiled_s = time.monotonic() - began - lower_s
    memory = compiled.memory_analysis()
    return Compiled(
        index,
        "compiled",
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        resident_bytes=built.resident_bytes(call),
        lower_s=round(lower_s, 1),
        compile_s=round(compiled_s, 1),
        schedule=schedule(compiled.as_text()),
    )


def _reason(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return "\n".join(lines[:_REASON_LINES]) or type(error).__name__


def main() -> int:
    if sys.platform == "linux":
        die_with(int(sys.argv[2]))
    with os.fdopen(int(sys.argv[1]), "w") as stream:
        report = Report(stream)
        try:
            run(Job.of(json.load(sys.stdin)), report)
        except ServingError as error:
            report.tell("unbuildable", reason=error.message)
            return 1
        except Exception as error:  # noqa: BLE001  vLLM and tpu-inference raise anything
            traceback.print_exc()
            report.tell("unbuildable", reason=f"{type(error).__name__}: {_reason(error)}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
