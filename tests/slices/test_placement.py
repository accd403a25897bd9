from types import ModuleType

import pytest
import ray

from serving.errors import ExtensionPointError
from serving.slices import placement
from serving.tpu import resolve

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("generation", "topology", "hosts"), [("v6e", "1x1", 1), ("v6e", "2x4", 2), ("v7x", "2x2x2", 2)]
)
def test_the_bundles_of_a_slice_are_known_as_such(generation: str, topology: str, hosts: int) -> None:
    assert placement.is_slice(resolve(generation, topology, hosts).bundles())


@pytest.mark.parametrize(
    "bundles", [[], [{"CPU": 1}], [{"TPU": 4}, {"TPU": 4}], [{"TPU": 4}, {"TPU-v6e-8-head": 1, "TPU": 4}]]
)
def test_other_bundles_are_left_to_serve(bundles: list[dict[str, float]]) -> None:
    assert not placement.is_slice(bundles)


@pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20")  # Ray's
def test_this_version_of_ray_has_the_extension_point() -> None:
    from ray.serve._private import default_impl

    assert callable(placement._extension_point(default_impl))


def test_a_ray_without_the_extension_point_is_refused_by_version_and_name() -> None:
    module = ModuleType("ray.serve._private.default_impl")
    with pytest.raises(ExtensionPointError) as refusal:
        placement._extension_point(module)
    assert refusal.value.message.startswith(
        f"Ray {ray.__version__} has no ray.serve._private.default_impl._default_create_placement_group"
    )
    assert "install ray[serve]==2.60.0" in refusal.value.message
