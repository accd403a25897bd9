from pathlib import Path

import pytest

from serving.cli.simulated_service import refusal

pytestmark = pytest.mark.unit
GIVEN_UP = "INFO 2026-11-23 15:04:01,932 controller 3165 -- Failed to update the deployments ['router'].\n"


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("INFO all is well\n", None),
        (GIVEN_UP, "Failed to update the deployments ['router']."),
        (
            "(ServeController pid=1) serving.errors.ConfigError: router.door: port 8080 is taken\n"
            + GIVEN_UP,
            "Failed to update the deployments ['router']. router.door: port 8080 is taken",
        ),
    ],
)
def test_what_serve_gave_up_is_told_with_the_reason_of_the_replica(
    tmp_path: Path, log: str, said: str | None
) -> None:
    path = tmp_path / "serve.log"
    path.write_text(log)
    assert refusal(path) == said
