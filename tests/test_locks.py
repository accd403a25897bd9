import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.unit
LOCKS = Path(__file__).parents[1] / "lock"
LINE = re.compile(r"(?P<requirement>[^#]+?)(?P<hashes>( --hash=sha256:[0-9a-f]{64})+)(  # .*)?")


@pytest.mark.parametrize("name", ["requirements.txt", "image.txt", "tools.txt", "libtpu.txt"])
def test_every_package_of_every_lock_has_hashes(name: str) -> None:
    lines = [line for line in (LOCKS / name).read_text().splitlines() if not line.startswith("#")]
    assert lines
    for line in lines:
        found = LINE.fullmatch(line)
        assert found, line[:100]
        pins = list(Requirement(found["requirement"]).specifier)
        assert [pin.operator for pin in pins] == ["=="], line[:100]


def test_what_audits_the_locks_is_locked_itself() -> None:
    wanted = {
        Requirement(line).name
        for line in (LOCKS / "tools.in").read_text().splitlines()
        if not line.startswith("#")
    }
    locked = {line.partition("==")[0] for line in (LOCKS / "tools.txt").read_text().splitlines()}
    assert wanted <= locked


def test_nothing_is_installed_whose_hash_is_not_asked_for() -> None:
    """But torch, whose wheel is another wherever it comes from, and this project."""
    commands = re.findall(r"pip install [^\n]*", (LOCKS / "install.sh").read_text())
    open_ones = [command for command in commands if "--require-hashes" not in command]
    assert len(commands) > len(open_ones)
    assert all('"$torch"' in command or command.endswith(" -e .") for command in open_ones)
