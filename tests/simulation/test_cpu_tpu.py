import pytest

from serving.environment import COMPILER
from serving.errors import ExtensionPointError
from serving.simulation import cpu_tpu
from serving.simulation.cluster import HOST

pytestmark = pytest.mark.unit


def test_patches_are_not_loaded_on_a_host_that_is_not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOST, raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert cpu_tpu.register() is None


def test_patches_are_not_loaded_where_jax_may_see_a_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOST, "slice-0/0")
    monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
    assert cpu_tpu.register() is None


def test_a_compile_process_has_tpu_inference_s_own_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMPILER, "1")
    path = cpu_tpu.register()
    assert path == "tpu_inference.platforms.tpu_platform.TpuPlatform"


def test_another_version_than_the_patches_were_written_for_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(cpu_tpu.WRITTEN_FOR, "jax", "0.0.1")
    with pytest.raises(ExtensionPointError, match=r"patch jax 0\.0\.1, but 0\.10\.2 is installed"):
        cpu_tpu.check_versions()
