"""Whether a host's memory holds what loading puts there.

tpu-inference 0.26 reads FP8 checkpoints whole on every host where vLLM's implementation of the model runs: DeepSeek R1's
files are about 700 GB, on hosts of 720 and 960 GB.
"""

from serving.planning.engine_sizes import EngineSizes
from serving.tpu import Slice

_GB = 10**9
_OF_THE_HOST = 0.9  # beside it stand the system, Ray and the engine's processes


def notes(sizes: EngineSizes, slice_: Slice, checkpoint_bytes: int) -> tuple[str, ...]:
    """What a plan says of its hosts' memory; nothing where loading needs little, or no page gives the machine's."""
    machine = slice_.hardware.machine(slice_.machine_type)
    if not loads_whole(sizes) or machine is None or machine.memory_gb is None:
        return ()
    needed_gb, available = checkpoint_bytes / _GB, f"each host's {machine.memory_gb} GB of memory"
    if needed_gb > _OF_THE_HOST * machine.memory_gb:
        return (
            (
                f"loading may not fit: FP8 weights by vLLM's implementation are read whole, {needed_gb:.0f} GB of {available}; take "
                "machines with more, or a model that tpu-inference implements itself"
            ),
        )
    if needed_gb > machine.memory_gb / 2:
        return (f"loading reads all {needed_gb:.0f} GB of FP8 weights into {available}",)
    return ()


def loads_whole(sizes: EngineSizes) -> bool:
    """Whether every host reads the checkpoint whole before it cuts it."""
    return sizes.by_vllm and sizes.quantization is not None and sizes.quantization.method == "fp8"
