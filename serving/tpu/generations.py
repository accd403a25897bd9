"""The hardware, as a literal table: every row names the pages its numbers come from.

Counts are per chip unless the name says otherwise. Where sources disagree the comment says which one was taken.
"""

import math
from dataclasses import dataclass, field
from functools import cache

GIB = 2**30
_DOCS = "https://docs.cloud.google.com"
# One list for every GKE machine type, its topologies and accelerator label.
_GKE_TPUS = f"{_DOCS}/kubernetes-engine/docs/concepts/plan-tpus"
_XPK = "https://github.com/AI-Hypercomputer/xpk src/xpk/core/system_characteristics.py"
# The disks that a generation's machines take (https://docs.cloud.google.com/tpu/docs/setup-persistent-disk): one kind each.
_PERSISTENT, _HYPERDISK = "pd-balanced", "hyperdisk-balanced"


@dataclass(frozen=True)
class Machine:
    """A TPU VM type. One VM is a slice of topology `alone`; `joins` says whether several make a larger slice.

    `vcpus` and `memory_gb` are None where no page gives them; `extra_nics` are network cards beside the first.
    """

    name: str
    chips: int
    alone: str
    joins: bool = False
    vcpus: int | None = None
    memory_gb: int | None = None
    extra_nics: bool = False


@dataclass(frozen=True)
class Generation:
    """One TPU generation. Rates are peak, per second; `usable_hbm_bytes` is what XLA lets a program have,
    `ici_bytes_per_s` counts both ways.

    `pod_prefix` and `cores_per_chip` make the pod type, Ray's and Google's name of a slice. It counts TensorCores: on
    v4, v5p and v7x twice the chips. `devices_per_chip` is what JAX sees and parallelism counts.
    """

    name: str
    pod_prefix: str
    cores_per_chip: int
    devices_per_chip: int
    machines: tuple[Machine, ...]
    topologies: tuple[str, ...] = field(repr=False)
    topology_rule: str
    gke_accelerator: str
    disk: str
    hbm_bytes: int
    usable_hbm_bytes: int
    bf16_flops: float
    int8_flops: float | None
    fp8_flops: float | None
    hbm_bytes_per_s: float
    ici_bytes_per_s: float
    sources: tuple[str, ...]

    @property
    def ray_accelerator_type(self) -> str:
        return f"TPU-{self.pod_prefix.upper()}"

    def machine(self, name: str) -> Machine | None:
        return next((machine for machine in self.machines if machine.name == name), None)


@cache
def chips_of(topology: str) -> int:
    return math.prod(int(axis) for axis in topology.split("x"))


# The one list of 2D slices: Ray also knows 2x8, which Google sells on neither v5e nor v6e.
_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_2D_RULE = "these are all"


def _3d(*, cubes: int) -> tuple[str, ...]:
    """The small shapes, then every box AxBxC, A<=B<=C, of whole 4x4x4 cubes, up to `cubes` of them (xpk's rule)."""
    boxes = [
        (x, y, z)
        for x in range(1, cubes + 1)
        for y in range(x, cubes // x + 1)
        for z in range(y, cubes // (x * y) + 1)
        if max(x, y, z) <= 64  # xpk's longest axis: 256 chips
    ]
    boxes.sort(key=lambda axes: (math.prod(axes), axes))
    return ("2x2x1", "2x2x2", "2x2x4", "2x4x4", *("x".join(str(4 * edge) for edge in axes) for axes in boxes))


_ROWS = (
    Generation(
        name="v4",
        pod_prefix="v4",
        cores_per_chip=2,
        devices_per_chip=1,  # megacore: JAX sees both cores as one device
        machines=(Machine("ct4p-hightpu-4t", chips=4, alone="2x2x1", joins=True, vcpus=240, memory_gb=407),),
        topologies=_3d(cubes=64),
        topology_rule="and AxBxC in multiples of 4 with A<=B<=C, up to 4096 chips",
        gke_accelerator="tpu-v4-podslice",
        disk=_PERSISTENT,
        hbm_bytes=32 * GIB,
        usable_hbm_bytes=int(30.75 * GIB),  # "of 30.75G hbm": https://github.com/erfanzar/EasyDeL/issues/166
        bf16_flops=275e12,
        int8_flops=275e12,
        fp8_flops=None,
        hbm_bytes_per_s=1200e9,
        ici_bytes_per_s=600e9,  # the page gives 300 one way; the other pages give both ways
        sources=(f"{_DOCS}/tpu/docs/v4", _GKE_TPUS, _XPK),
    ),
    Generation(
        name="v5e",
        pod_prefix="v5litepod",
        cores_per_chip=1,
        devices_per_chip=1,
        machines=(
            Machine("ct5lp-hightpu-1t", chips=1, alone="1x1", vcpus=24, memory_gb=48),
            Machine("ct5lp-hightpu-4t", chips=4, alone="2x2", joins=True, vcpus=112, memory_gb=192),
            Machine("ct5lp-hightpu-8t", chips=8, alone="2x4", vcpus=224, memory_gb=384),
        ),
        topologies=_2D,
        topology_rule=_2D_RULE,
        gke_accelerator="tpu-v5-lite-podslice",
        disk=_PERSISTENT,
        hbm_bytes=16 * GIB,
        # "of 15.75G hbm": https://github.com/GoogleCloudPlatform/kubernetes-engine-samples/pull/1467
        usable_hbm_bytes=int(15.75 * GIB),
        bf16_flops=197e12,
        int8_flops=393e12,
        fp8_flops=None,
        hbm_bytes_per_s=819e9,
        ici_bytes_per_s=400e9,
        sources=(f"{_DOCS}/tpu/docs/v5e", _GKE_TPUS),
    ),
    Generation(
        name="v5p",
        pod_prefix="v5p",
        cores_per_chip=2,
        devices_per_chip=1,  # megacore, as on v4
        machines=(Machine("ct5p-hightpu-4t", chips=4, alone="2x2x1", joins=True, vcpus=208, memory_gb=448),),
        # A pod has 8960 chips, a job at most 6144 of them, 16x16x24.
        topologies=_3d(cubes=96),
        topology_rule="and AxBxC in multiples of 4 with A<=B<=C, up to 6144 chips",
        gke_accelerator="tpu-v5p-slice",
        disk=_PERSISTENT,
        hbm_bytes=95 * GIB,
        # XLA prints "of 95.74G hbm"; plans take the page's 95, the smaller.
        usable_hbm_bytes=95 * GIB,
        bf16_flops=459e12,
        int8_flops=918e12,
        fp8_flops=459e12,  # no native fp8: the bf16 rate
        hbm_bytes_per_s=2765e9,
        ici_bytes_per_s=1200e9,
        sources=(f"{_DOCS}/tpu/docs/v5p", _GKE_TPUS, _XPK),
    ),
    Generation(
        name="v6e",
        pod_prefix="v6e",
        cores_per_chip=1,
        devices_per_chip=1,
        machines=(
            Machine("ct6e-standard-1t", chips=1, alone="1x1", vcpus=44, memory_gb=176),
            Machine(
                "ct6e-standard-4t",
                chips=4,
                alone="2x2",
                joins=True,
                vcpus=180,
                memory_gb=720,
                extra_nics=True,
            ),
            Machine("ct6e-standard-8t", chips=8, alone="2x4", vcpus=180, memory_gb=1440),
        ),
        topologies=_2D,
        topology_rule=_2D_RULE,
        gke_accelerator="tpu-v6e-slice",
        disk=_HYPERDISK,
        hbm_bytes=32 * GIB,
        # libtpu's compiler refuses a program "of 31.24G hbm"; boot logs of v6e hosts print 31.25.
        usable_hbm_bytes=int(31.24 * GIB),
        bf16_flops=918e12,
        int8_flops=1836e12,
        fp8_flops=918e12,  # no native fp8: the bf16 rate at best, 545e12 measured
        hbm_bytes_per_s=1638e9,
        ici_bytes_per_s=800e9,
        sources=(f"{_DOCS}/tpu/docs/v6e", _GKE_TPUS),
    ),
    Generation(
        name="v7x",
        pod_prefix="v7x",
        cores_per_chip=2,
        devices_per_chip=2,  # each TensorCore is a device of its own, with half the chip's HBM
        machines=(
            Machine("tpu7x-standard-1t", chips=1, alone="1x1x1", memory_gb=240),
            Machine(
                "tpu7x-standard-4t",
                chips=4,
                alone="2x2x1",
                joins=True,
                vcpus=224,
                memory_gb=960,
                extra_nics=True,
            ),
        ),
        topologies=("1x1x1", *_3d(cubes=144)),
        topology_rule="and AxBxC in multiples of 4 with A<=B<=C, up to 9216 chips",
        gke_accelerator="tpu7x",
        disk=_HYPERDISK,  # a user's report of 2026: v7 takes no persistent disk
        hbm_bytes=192 * GIB,
        # "of 94.75G hbm" a device: https://github.com/AI-Hypercomputer/tpu-recipes inference/ironwood
        usable_hbm_bytes=int(2 * 94.75 * GIB),
        bf16_flops=2307e12,
        int8_flops=None,
        fp8_flops=4614e12,
        hbm_bytes_per_s=7380e9,
        ici_bytes_per_s=1200e9,
        sources=(
            f"{_DOCS}/tpu/docs/tpu7x",
            _GKE_TPUS,
            _XPK,  # 1x1x1 on tpu7x-standard-1t, whose memory tpu-inference's own CI has in a table
            "https://github.com/vllm-project/tpu-inference tpu_inference/utils.py: two devices a chip",
        ),
    ),
)

GENERATIONS = {row.name: row for row in _ROWS}
