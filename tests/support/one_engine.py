"""A real engine on a simulated host, without Ray: prints its port, and its load for each line of its input, until that ends.

For the line `late` it prints what was compiled since it was up.

Its arguments may be engine options, and keys of the model that differ from those below, as JSON.
"""

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serving.config import ModelSpec
from serving.engine.server import EngineSite
from serving.engine.vllm import VllmServer
from serving.planning import Plan, plan
from serving.simulation.cluster import CACHE, HOST, cache_directory
from serving.simulation.cpu_tpu.options import overrides
from serving.slices.held_slice import HeldSlice, SliceHost

MODEL = "llama-3.1-8b-instruct"


SPEC: dict[str, Any] = {
    "name": MODEL,
    "model": "meta-llama/Llama-3.1-8B-Instruct",
    "slice": {"generation": "v6e", "topology": "1x1"},
    "engine": {"max_model_len": 2048},
}


@contextmanager
def started(
    options: Mapping[str, Any] | None = None, changed: Mapping[str, Any] | None = None, **environment: str
) -> Iterator[tuple["subprocess.Popen[str]", Path]]:
    """The script's process, and the folder for what its engine leaves; both end with the block."""
    command = [sys.executable, __file__, json.dumps(options or {}), json.dumps(changed or {})]
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,  # a socket's path has a hundred letters at most
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"TMPDIR": folder} | environment,
        ) as engine,
    ):
        yield engine, Path(folder)
        assert engine.stdin
        engine.stdin.close()
        assert engine.wait(60) == 0


def address_of(engine: "subprocess.Popen[str]") -> str:
    """Where it listens, once it is up."""
    assert engine.stdout
    port = next(line.split()[1] for line in engine.stdout if line.startswith("port "))
    return f"http://127.0.0.1:{port}"


async def main(found: Plan) -> None:
    os.environ.update(found.slice.host_environment("slice-0", 0))
    host = SliceHost(worker_id=0, node_id="", ip="127.0.0.1", bundle=0)
    site = EngineSite(HeldSlice("slice-0", (host,)), group=None, gcs_address="", replica="")
    server = VllmServer(found, site, overrides(found, cache_directory()))
    await server.start()
    await server.late_programs()
    print(f"port {server.http.port}", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        told: Any = await server.late_programs() if line == "late\n" else server.load
        print(json.dumps(dataclasses.asdict(told)), flush=True)
    server.kill()
    os._exit(0)


if __name__ == "__main__":
    options, changed = [*map(json.loads, sys.argv[1:]), {}, {}][:2]
    engine = SPEC["engine"] | options
    planned = plan(ModelSpec.model_validate({**SPEC, **changed, "engine": engine}))
    os.environ |= {
        HOST: "slice-0/0",
        CACHE: str(cache_directory()),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={planned.slice.devices}",
        "OMP_NUM_THREADS": "1",
        "SKIP_JAX_PRECOMPILE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    asyncio.run(main(planned))
