import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import TopologyError
from serving.tpu import GENERATIONS, Slice, every_slice, resolve

pytestmark = pytest.mark.unit


EVERY_SLICE = list(every_slice())


@pytest.mark.parametrize(
    ("shape", "gives"),
    [
        ("v6e 1x1", (1, "ct6e-standard-1t", "v6e-1", 1)),
        ("v6e 2x2", (1, "ct6e-standard-4t", "v6e-4", 4)),
        ("v6e 4x4", (4, "ct6e-standard-4t", "v6e-16", 16)),
        ("v6e 16x16", (64, "ct6e-standard-4t", "v6e-256", 256)),
        ("v5e 4x8", (8, "ct5lp-hightpu-4t", "v5litepod-32", 32)),
        ("v5p 2x2x2", (2, "ct5p-hightpu-4t", "v5p-16", 8)),
        ("v4 2x2x4", (4, "ct4p-hightpu-4t", "v4-32", 16)),
        ("v7x 1x1x1", (1, "tpu7x-standard-1t", "v7x-2", 2)),
        ("v7x 2x2x1", (1, "tpu7x-standard-4t", "v7x-8", 8)),
        ("v7x 4x4x4", (16, "tpu7x-standard-4t", "v7x-128", 128)),
    ],
)
def test_a_shape_gives_its_hosts_machine_and_names(shape: str, gives: tuple[int, str, str, int]) -> None:
    found = resolve(*shape.split())
    assert (found.hosts, found.machine_type, found.pod_type, found.devices) == gives
    assert found.head_resource == f"TPU-{found.pod_type}-head"


def test_two_by_four_is_one_large_vm_or_two_small_ones() -> None:
    one = resolve("v6e", "2x4", hosts=1)
    two = resolve("v6e", "2x4", hosts=2)
    assert (one.machine_type, one.bundles()) == ("ct6e-standard-8t", [{"TPU-v6e-8-head": 1, "TPU": 8}])
    assert (two.machine_type, two.bundles()) == (
        "ct6e-standard-4t",
        [{"TPU-v6e-8-head": 1, "TPU": 4}, {"TPU": 4}],
    )
    assert resolve("v6e", "2x4", machine_type="ct6e-standard-4t") == two
    assert str(two) == "v6e 2x4 (2 hosts x 4 chips)"
    assert str(one) == "v6e 2x4 (1 host x 8 chips)"
    assert str(resolve("v6e", "1x1")) == "v6e 1x1 (1 host x 1 chip)"


def test_a_host_of_the_slice_knows_who_it_is() -> None:
    environment = resolve("v5e", "2x4", hosts=2).host_environment("slice-a", worker_id=1)
    assert environment == {
        "TPU_NAME": "slice-a",
        "TPU_WORKER_ID": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_TOPOLOGY": "2x4",
    }


@pytest.mark.parametrize("alias", ["V6E", " v6e ", "trillium"])
def test_a_generation_may_go_by_its_other_names(alias: str) -> None:
    assert resolve(alias, "4X4") == resolve("v6e", "4x4")


@given(st.sampled_from(EVERY_SLICE))
def test_chips_and_devices_are_conserved(found: Slice) -> None:
    bundles = found.bundles()
    assert len(bundles) == found.hosts
    assert (
        sum(bundle["TPU"] for bundle in bundles)
        == found.chips
        == math.prod(map(int, found.topology.split("x")))
    )
    assert found.chips_per_host * found.hosts == found.chips
    assert (
        found.devices_per_host * found.hosts == found.devices == found.chips * found.hardware.devices_per_chip
    )
    assert [found.head_resource in bundle for bundle in bundles] == [True] + [False] * (found.hosts - 1)


@given(st.sampled_from(EVERY_SLICE))
def test_a_slice_is_found_again_by_what_it_says_of_itself(found: Slice) -> None:
    assert resolve(found.generation, found.topology, hosts=found.hosts) == found
    assert resolve(found.generation, found.topology, found.hosts, found.machine_type) == found
    assert pickle.loads(pickle.dumps(found)) == found  # noqa: S301  our own bytes


@given(st.text(max_size=12))
def test_any_other_text_is_refused(text: str) -> None:
    for known, arguments in ((GENERATIONS, (text, "16x16")), (GENERATIONS["v5p"].topologies, ("v5p", text))):
        if text.strip().lower() not in known:
            with pytest.raises(TopologyError):
                resolve(*arguments)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("v6", "4x4"), ["no TPU generation 'v6'", "v4, v5e, v5p, v6e, v7x", "did you mean 'v6e'?"]),
        (("h100", "4x4"), ["no TPU generation 'h100'", "v4, v5e"]),
        (("v6e", "4x2"), ["no topology '4x2'", "1x1, 2x2, 2x4, 4x4", "nearest: 2x4"]),
        (("v6e", "3x3"), ["no topology '3x3'", "nearest: 2x4"]),
        (("v6e", "2x8"), ["no topology '2x8'", "nearest: 4x4"]),
        (("v6e", "2x2x2"), ["no topology '2x2x2'", "nearest: 2x4"]),
        (("v6e", ""), ["no topology ''", "nearest: 1x1"]),
        (("v6e", "9" * 5000 + "x1"), ["v6e has no topology", "nearest: 1x1"]),
        (("v5p", "4x4x6"), ["no topology '4x4x6'", "multiples of 4 with A<=B<=C", "up to 6144 chips"]),
        (("v4", "8x4x4"), ["v4 has no topology '8x4x4'", "with A<=B<=C, up to 4096 chips", "nearest: 4x4x8"]),
        (("v5p", "16x20x28"), ["v5p has no topology", "up to 6144 chips"]),
        (("v5p", "8x4x4"), ["nearest: 4x4x8"]),
        (
            ("v6e", "2x4"),
            ["2 hosts of ct6e-standard-4t", "1 host of ct6e-standard-8t", "name hosts or machine_type"],
        ),
        (("v6e", "2x4", 3), ["does not come as 3 hosts", "1 host of ct6e-standard-8t"]),
        (("v6e", "4x4", 2), ["does not come as 2 hosts", "16 chips are 4 hosts of ct6e-standard-4t"]),
        (
            ("v6e", "4x4", None, "ct6e-standard-8t"),
            ["machine type ct6e-standard-8t", "4 hosts of ct6e-standard-4t"],
        ),
        (
            ("v6e", "2x4", 1, "ct6e-standard-4t"),
            ["1 host on machine type ct6e-standard-4t", "1 host of ct6e"],
        ),
        (("v6e", "4x4", None, "ct6e-standard-4"), ["no machine type 'ct6e-standard-4'", "did you mean"]),
    ],
)
def test_a_refusal_says_what_there_is(arguments: tuple[str, ...], says: list[str]) -> None:
    with pytest.raises(TopologyError) as refusal:
        resolve(*arguments)
    for words in says:
        assert words in refusal.value.message


def test_usable_hbm_is_below_the_nameplate() -> None:
    for row in GENERATIONS.values():
        assert 0.9 * row.hbm_bytes < row.usable_hbm_bytes <= row.hbm_bytes
        assert row.sources


def test_the_largest_job_of_v5p_is_smaller_than_its_pod() -> None:
    assert resolve("v5p", "16x16x24").chips == max(
        slice_.chips for slice_ in EVERY_SLICE if slice_.generation == "v5p"
    )


def test_links_are_counted_both_ways_on_every_generation() -> None:
    """Google's pages give v4's one way (6 links of 50 GB/s) and the others' both ways."""
    assert GENERATIONS["v4"].ici_bytes_per_s == 2 * 6 * 50e9
    assert GENERATIONS["v5p"].ici_bytes_per_s == 2 * 6 * 100e9


def test_the_single_chip_host_of_v7x_has_its_memory() -> None:
    machine = GENERATIONS["v7x"].machine("tpu7x-standard-1t")
    assert machine is not None
    assert machine.memory_gb == 240


@pytest.mark.parametrize(
    ("generation", "topology", "hosts", "bounds"),
    [
        ("v6e", "4x4", None, "2,2,1"),
        ("v6e", "2x4", 1, "2,4,1"),
        ("v5e", "1x1", None, "1,1,1"),
        ("v5p", "2x2x2", None, "2,2,1"),
    ],
)
def test_a_hosts_chips_lie_as_gke_says(
    generation: str, topology: str, hosts: int | None, bounds: str
) -> None:
    assert resolve(generation, topology, hosts).host_bounds == bounds


def test_a_hosts_bounds_hold_its_chips() -> None:
    for slice_ in EVERY_SLICE:
        assert math.prod(map(int, slice_.host_bounds.split(","))) == slice_.chips_per_host
