import json
import os
import subprocess
import sys

import pytest

from serving.engine.compilation_watch import Compiles, Sights, heard_s
from serving.timings import TIMINGS

LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.mark.unit
def test_a_process_compiles_while_one_of_its_threads_traces_lowers_or_compiles() -> None:
    compiles = Compiles()
    compiles.begins("/jax/pjit/anything", 1, 9)
    compiles.ends(COMPILED, 1)
    assert compiles.since() is None
    compiles.begins(LOWERED, 1, 10)
    compiles.begins(COMPILED, 2, 12)
    assert compiles.since() == 10
    compiles.ends(LOWERED, 1)  # a program that JAX has already is lowered, and not compiled
    assert compiles.since() == 12
    compiles.begins(COMPILED, 2, 13)  # a constant of the program is a program too
    compiles.ends(COMPILED, 2)
    assert compiles.since() == 12
    compiles.ends(COMPILED, 2)
    assert compiles.since() is None


@pytest.mark.unit
@pytest.mark.parametrize("clock_off_s", [0, -3600, 3600, 1e9])
def test_a_compilation_is_as_long_as_it_is_seen_by_the_reader_s_clock(clock_off_s: float) -> None:
    """The clock of the host that compiles may be wrong; it was by an hour, and a compilation took the slice."""
    sights, began = Sights(), 1000.0 + clock_off_s
    assert sights.longest_s({}, 999.0) is None
    assert sights.longest_s({"0-7": began}, 1000.5) == 0
    assert sights.longest_s({"0-7": began}, 1060.0) == 59.5
    assert heard_s(1060.0, 999.9, 59.5) == 1060.0
    assert sights.longest_s({"0-7": began, "1-8": 5.0}, 1061.0) == 60.5
    assert sights.longest_s({"0-7": began + 61, "1-8": 5.0}, 1063.0) == 2
    assert sights.longest_s({}, 1064.0) is None


@pytest.mark.unit
@pytest.mark.parametrize(
    ("compiling_s", "alive_until_s"),
    [
        (None, 1000),  # nobody compiles: by its last token
        (3, 1040),  # it compiles: now
        (45, 1040),  # a step before it gave its token meanwhile
    ],
)
def test_an_engine_is_alive_while_it_compiles(compiling_s: float | None, alive_until_s: float) -> None:
    assert heard_s(1040, 1000, compiling_s, limit_s=600) == alive_until_s


@pytest.mark.unit
def test_a_compilation_without_end_is_a_hang_from_its_limit_on() -> None:
    assert heard_s(1700, 1000, 690, limit_s=600) == 1610
    assert heard_s(5000, 1000, 3990) == 1010 + TIMINGS.compile_s


# A program that XLA takes seconds for, watched as in a process of an engine.
COMPILING = """
import json, jax, jax.numpy as jnp
from serving.engine import compilation_watch
told = []
compilation_watch.follow(told.append)

def long(x):
    for step in range(100):
        x = jnp.sort(jnp.sin(x) @ jnp.cos(x) + step, axis=step % 2)
    return x

before = len(told)
jax.jit(long)(jnp.ones((8, 8))).block_until_ready()
import time
deadline = time.monotonic() + 60
while not (told and told[-1] is None) and time.monotonic() < deadline:
    time.sleep(0.01)
print(json.dumps([since is None for since in told]))
"""


@pytest.mark.engine
def test_jax_tells_when_it_compiles() -> None:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILING],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
        timeout=300,
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert not told[0]
    assert told[-1]
