"""What a simulation's processes start with."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from serving.simulation.host_environment import inherited, of_serve
from serving.simulation.ports import Ports

pytestmark = pytest.mark.unit


def test_serve_reads_every_variable_that_a_simulation_sets() -> None:
    spec = find_spec("ray")
    assert spec
    assert spec.origin
    sources = (Path(spec.origin).parent / "serve" / "_private").glob("*.py")
    text = "".join(source.read_text() for source in sources)
    names = of_serve(Ports.of("abc"), Path("/tmp/sv"))  # noqa: S108  nothing is written
    assert "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S" in names
    assert [name for name in names if f'"{name}"' not in text] == []


def test_hosts_inherit_nothing_that_would_change_what_a_host_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TPU_NAME", "JAX_PLATFORMS", "RAY_ADDRESS", "VLLM_TARGET_DEVICE", "OTHER"):
        monkeypatch.setenv(name, "x")
    kept = inherited()
    assert kept["OTHER"] == "x"
    assert not [name for name in kept if name.startswith(("TPU_", "JAX_", "RAY_"))]
