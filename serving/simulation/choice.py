"""Which engine a host runs: the production engine, unless a simulated host was started for the simulated engine."""

import os
from pathlib import Path

from serving.engine.server import EngineServer, EngineSite
from serving.environment import CACHE, ENGINE, STARTUP, is_simulated
from serving.planning import Plan


def engine_here(plan: Plan, site: EngineSite) -> EngineServer:
    """The engine of the host that this process runs on; only that engine's modules are loaded."""
    if is_simulated() and os.environ.get(ENGINE) == "simulated":
        from serving.simulation.engine.server import SimulatorServer  # noqa: PLC0415

        return SimulatorServer(plan, site, os.environ.get(STARTUP, ""))
    from serving.engine.vllm import VllmServer  # noqa: PLC0415

    if not is_simulated():
        return VllmServer(plan, site)
    from serving.simulation.cpu_tpu.options import overrides  # noqa: PLC0415

    return VllmServer(plan, site, overrides(plan, Path(os.environ[CACHE])))
