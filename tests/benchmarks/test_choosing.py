import itertools

import pytest

from benchmarks.choosing import OPEN_A_SLICE, Fleet

pytestmark = pytest.mark.unit


def test_the_fleet_of_the_benchmark_sends_a_conversation_s_turns_to_one_slice() -> None:
    fleet = Fleet(3, conversations=2)
    taken = [fleet.send(conversation.ask()) for conversation in fleet.conversations for _ in range(3)]
    assert len(set(taken[:3])) == len(set(taken[3:])) == 1
    assert len(list(fleet.open)) == 6 <= OPEN_A_SLICE * 3
    assert len(list(itertools.islice(fleet.turns(), 5))) == 5
