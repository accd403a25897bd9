"""A real engine on a simulated host, without Ray: prints its port, and its load for each line of its input, until that ends.

For the line `late` it prints what was compiled since it was up.

Its arguments may be engine options, and keys of the model that differ from those below, as JSON.
"""

import asyncio
import dataclasses
import json
import os
import sys
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
