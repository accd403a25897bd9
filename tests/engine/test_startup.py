import pytest

from serving.engine.startup import phase_of

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        ("Init worker | rank=0 | is_first_rank=True", "loading weights"),
        ("Precompile backbone --> num_tokens=16", "compiling"),
        ("GET /health", None),
    ],
)
def test_a_log_line_begins_a_phase_or_none(line: str, phase: str | None) -> None:
    assert phase_of(line) == phase
