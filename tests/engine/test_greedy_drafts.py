from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from serving.engine.greedy_drafts import _sharp

pytestmark = pytest.mark.unit


class Batch:
    """What tpu-inference's has of temperatures."""

    def __init__(self) -> None:
        self.req_id_to_index: dict[str, int] = {}
        self.temperature_cpu = np.zeros(3, np.float32)

    def add_request(self, request: Any, req_index: int | None = None) -> None:
        row = len(self.req_id_to_index) if req_index is None else req_index
        self.req_id_to_index[request.req_id] = row
        if request.sampling_params:
            self.temperature_cpu[row] = request.sampling_params.temperature or -1.0


@pytest.mark.parametrize(("temperature", "kept"), [(0.0, 1e-6), (0.7, 0.7)])
def test_a_greedy_request_has_a_temperature_by_which_may_be_divided(temperature: float, kept: float) -> None:
    batch = Batch()
    params = SimpleNamespace(temperature=temperature)
    _sharp(Batch.add_request)(batch, SimpleNamespace(req_id="a", sampling_params=params), req_index=2)
    assert batch.temperature_cpu[2] == np.float32(kept)


def test_a_request_that_draws_no_token_is_left_alone() -> None:
    batch = Batch()
    batch.temperature_cpu[0] = -1
    _sharp(Batch.add_request)(batch, SimpleNamespace(req_id="a", sampling_params=None))
    assert batch.temperature_cpu[0] == -1
