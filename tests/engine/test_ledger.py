"""The ledger of `serving compile` against the list that a real engine compiles at its start."""

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from support import one_engine
from support.one_engine import MODEL, SPEC

from serving.compiler import processes
from serving.compiler.libtpu import library
from serving.compiler.records import Job
from serving.config import IMPORT_PATH

pytestmark = [pytest.mark.engine, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
# As simulated hosts start an engine (serving/simulation/cpu_tpu/options.py).
SIMULATED = {"max_num_seqs": 32, "max_num_batched_tokens": 256}
PROGRAM = re.compile(r"Precompile (?:worker\d+ )?_?(\w+)(?: \[.*?\])? --> \{(.*)")
SIZE = re.compile(r"'(\w+)': (\d+|True|False)\b")


class Engine:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout
        self._says = process.stdout
        self.log: list[str] = []
        self._until("port ")

    def _until(self, beginning: str) -> str:
        for line in self._says:
            if line.startswith(beginning):
                return line
            self.log.append(line)
        raise AssertionError("".join(self.log[-50:]))


@contextmanager
def started(skips: str) -> Iterator[Engine]:
    """A real engine; `skips`: SKIP_JAX_PRECOMPILE."""
    with one_engine.started(changed={"engine_env": {"SKIP_JAX_PRECOMPILE": skips}}) as (process, _):
        yield Engine(process)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with started("0") as running:
        yield running


def own_list(log: list[str]) -> Counter[tuple[str, tuple[tuple[str, int], ...]]]:
    """The programs that the engine says it compiles, with their buckets."""
    found: Counter[tuple[str, tuple[tuple[str, int], ...]]] = Counter()
    for line in log:
        if told := PROGRAM.search(line):
            sizes = SIZE.findall(told[2].partition("'shared_attention_metadata'")[0])
            bucket = {key: int(value) if value.isdigit() else int(value == "True") for key, value in sizes}
            found[told[1], tuple(sorted(bucket.items()))] += 1
    return found


def test_the_ledger_is_the_list_that_a_real_engine_compiles(engine: Engine, tmp_path: Path) -> None:
    subprocess.run(["lock/install-libtpu.sh"], cwd=ROOT, check=True, timeout=600)
    file = tmp_path / "service.yaml"
    model = SPEC | {"engine": SPEC["engine"] | SIMULATED}
    application = {"name": "a", "import_path": IMPORT_PATH, "args": {"models": [model]}}
    file.write_text(yaml.safe_dump({"applications": [application]}))
    job = Job(str(file), MODEL, "v6e-1x1-1h-on-demand", str(library()))
    outcome = processes.run(job, tmp_path / "log", print, limit_s=300, running=processes.Running())
    assert outcome.built, outcome.reason
    ledger = Counter(
        (program.name, tuple(sorted(program.bucket.items()))) for program in outcome.built.programs
    )
    assert own_list(engine.log) == ledger
    assert ledger["backbone", (("num_reqs", 32), ("num_tokens", 256))] == 1
