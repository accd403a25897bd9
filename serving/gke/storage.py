"""Where a host's weights come from, and the disk and memory that takes.

Each host downloads a model from Hugging Face's site to its disk, reads it from a mounted bucket (`/weights/...`), or streams it
from a bucket (`gs://...`). vLLM takes the Run:ai streamer for such paths.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serving.config import GkeSpec
from serving.planning.adapters import adapters
from serving.planning.plan import Plan

WEIGHTS = "/weights"  # where the bucket is mounted
STORE = "/var/lib/tpu-serving"  # where the head's claim is mounted
_PATHS = ("/", ".", "~")  # what a path begins with
CACHE = "/cache"  # on the host's disk: what Hugging Face's client and XLA keep

GB = 10**9
# Ray's logs, temporary files, programs that XLA compiled.
_SCRATCH_BYTES = 20 * GB
# The image unpacked, and the next one before the old one is collected.
_IMAGE_BYTES = 15 * GB
_SMALLEST_DISK_GB = 100  # what GKE gives a node by itself
# Of the host's memory. What the cache takes, the engine's pod does not get.
_FILE_CACHE_SHARE = 0.15


@dataclass(frozen=True)
class Storage:
    """What one host stores: the weights that it downloads, and a cache of what it reads from the mounted bucket.

    Each host reads the whole checkpoint: tpu-inference's loaders cut tensors after they are read.
    """

    download_bytes: int
    file_cache_bytes: int
    file_cache_in_memory: bool

    @property
    def pod_disk_bytes(self) -> int:
        """Disk that the pod fills: its scratch space, downloaded weights, and the file cache unless that is in memory."""
        return (
            _SCRATCH_BYTES + self.download_bytes + (0 if self.file_cache_in_memory else self.file_cache_bytes)
        )

    @property
    def boot_disk_gb(self) -> int:
        """Size of the node's boot disk, in steps of 10 GB, that leaves the pod its disk.

        GKE keeps a tenth for eviction, and the least of half the disk, 6 GiB and 35%, and 100 GiB for itself
        (https://cloud.google.com/kubernetes-engine/docs/concepts/plan-node-sizes).
        """
        needed = (self.pod_disk_bytes + _IMAGE_BYTES) / GB
        size = _SMALLEST_DISK_GB
        while size * 0.9 - min(0.5 * size, 6.5 + 0.35 * size, 107.4) < needed:
            size += 10
        return size


def asks_the_hub(plan: Plan) -> bool:
    """Whether vLLM reads something of the model from Hugging Face's site: weights, or what an option names by an id."""
    return any(_is_an_id(name) for name in _named(plan))


def folders(plan: Plan) -> list[str]:
    """Paths on the hosts that vLLM reads: weights, or what an option names by a path."""
    return [name for name in _named(plan) if name.startswith(_PATHS)]


def buckets(plan: Plan) -> list[str]:
    """Buckets of Google's that vLLM reads by their API: of weights, or of what an option names by a URL."""
    return [name.split("/")[2] for name in _named(plan) if name.startswith("gs://")]


def is_mounted(path: str) -> bool:
    """Whether a path is in the bucket that is mounted."""
    return path == WEIGHTS or path.startswith(f"{WEIGHTS}/")


def _named(plan: Plan) -> list[str]:
    """What of a model is named by an id, a path or a URL."""
    engine = plan.engine
    draft = engine.get("speculative_config") or {}
    named = [
        plan.model.model,
        engine.get("hf_config_path"),
        engine.get("tokenizer"),
        engine.get("spec_model"),
        draft.get("model"),
        *adapters(engine).values(),
    ]
    return [str(name) for name in named if name]


def _is_an_id(name: str) -> bool:
    return not name.startswith(_PATHS) and "://" not in name and name not in ("ngram", "[ngram]")


def storage_of(plans: Sequence[Plan], gke: GkeSpec) -> Storage:
    """What a host stores that may get an engine of any of these plans, which are of one shape: Ray does not tell such slices apart."""
    machine = plans[0].slice.hardware.machine(plans[0].slice.machine_type)
    memory = machine.memory_gb * GB if machine and machine.memory_gb else 0
    # Without an explicit size GCS FUSE fills its volume and fails. Weights are all that is read there but compiled programs.
    cache = _SCRATCH_BYTES // 2 + _largest(plans, is_mounted) if gke.weights_bucket else 0
    return Storage(
        download_bytes=_largest(plans, lambda model: not is_mounted(model) and "://" not in model),
        file_cache_bytes=cache,
        file_cache_in_memory=cache <= memory * _FILE_CACHE_SHARE,
    )


def _largest(plans: Sequence[Plan], read: Callable[[str], bool]) -> int:
    """Bytes of the largest checkpoint among those whose path or id is read in one way."""
    return max((plan.checkpoint_bytes for plan in plans if read(plan.model.model)), default=0)
