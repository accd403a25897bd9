"""What a pipeline's worker is told of addresses and chips, without an engine."""

from types import SimpleNamespace

import pytest

from serving.engine.stages import _addressed

pytestmark = pytest.mark.unit


def _config(vllm_config: object, rank: int, ip: str, previous_ip: str, stages: int) -> SimpleNamespace:
    """tpu-inference's PPConfig takes the same."""
    return SimpleNamespace(rank=rank, ip=ip, previous_ip=previous_ip, stages=stages, config=vllm_config)


@pytest.mark.parametrize(
    ("rank", "own", "before"),
    [(0, "10.0.0.1", "10.0.0.1"), (1, "10.0.0.2", "10.0.0.1"), (2, "10.0.0.3", "10.0.0.2")],
)
def test_a_stage_dials_the_host_of_the_stage_before_it(rank: int, own: str, before: str) -> None:
    made = _addressed(_config, ["10.0.0.1", "10.0.0.2", "10.0.0.3"], "2,2,1")
    stage = made("config", rank, "localhost", "localhost", 3)
    assert (stage.ip, stage.previous_ip, stage.rank, stage.stages) == (own, before, rank, 3)
    assert stage.default_tpu_chips_per_process_bounds == "2,2,1"
