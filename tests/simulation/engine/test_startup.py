"""Phases of a start, as the command line is given them."""

import pytest

from serving.errors import SimulationError
from serving.simulation.engine.startup import Startup

pytestmark = pytest.mark.unit


def test_phases_of_a_start_are_read_and_named() -> None:
    assert Startup.parse("") == Startup()
    assert Startup.parse("").phases() == []
    assert Startup.parse("compile=90,download=20.5").phases() == [
        ("downloading weights", 20.5),
        ("compiling", 90),
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("boil=3", "named 'boil'"),
        ("load", "load takes seconds"),
        ("load=x", "load=20"),
        ("load=-1", "at least 0"),
    ],
)
def test_phases_that_are_none_are_refused(text: str, problem: str) -> None:
    with pytest.raises(SimulationError, match=problem):
        Startup.parse(text)
