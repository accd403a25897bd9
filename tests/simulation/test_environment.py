import importlib.util
import re
from pathlib import Path

import pytest

from serving.simulation.cluster import SimulatedCluster


@pytest.mark.unit
def test_no_file_of_serves_haproxy_is_where_every_simulation_of_the_machine_has_its_own(
    tmp_path: Path,
) -> None:
    """Serve's own paths stay behind when a simulation ends, and are shared by all of them."""
    spec = importlib.util.find_spec("ray")
    assert spec
    assert spec.origin
    constants = (Path(spec.origin).parent / "serve" / "_private" / "constants.py").read_text()
    paths = set(re.findall(r'"(RAY_SERVE_\w+)",\s*"/tmp/haproxy-serve', constants))
    assert "RAY_SERVE_HAPROXY_SOCKET_PATH" in paths
    environment = SimulatedCluster(tmp_path, "0123456789ab", cluster_secret="s")._environment("head")
    assert {environment.get(name, "").rpartition("/sv")[2][:12] for name in paths} == {"0123456789ab"}
