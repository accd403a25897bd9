"""One replica on one slice of two hosts, a pipeline stage on each."""

import pytest
from support.leases import Leases
from support.reference import answers, greedy
from support.service import service

from serving.simulation import stand_in
from serving.simulation.cluster import cache_directory

pytestmark = pytest.mark.engine
BORROWS = "two hosts, 1"


def test_greedy_tokens_equal_hugging_face_s_with_a_stage_on_each_host(leases: Leases) -> None:
    with service(leases, slices=1, parallel={"tensor": 4, "pipeline": 2}) as running:
        expected = greedy(stand_in.ensure(running.plan().shape, cache_directory(), pipeline=2))
        for _ in range(3):
            assert answers(running) == expected
