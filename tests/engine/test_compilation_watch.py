import json
import os
import subprocess
import sys

import pytest

from serving.engine.compilation_watch import Compiles, heard_s
from serving.timings import TIMINGS

LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.mark.unit
def test_a_process_compiles_from_a_program_s_lowering_to_its_end() -> None:
    compiles = Compiles()
    compiles.on("/jax/core/compile/jaxpr_trace_duration", 1, 9)
    assert compiles.since() is None
    compiles.on(LOWERED, 1, 10)
    compiles.on(LOWERED, 2, 12)
    assert compiles.since() == 10
    compiles.on(COMPILED, 1, 13)
    assert compiles.since() == 12
    compiles.on(COMPILED, 2, 14)
    assert compiles.since() is None


@pytest.mark.unit
@pytest.mark.parametrize(
    ("compiling_s", "alive_until_s"),
    [
        (None, 1000),  # nobody compiles: by its last token
        (3, 1040),  # it compiles: now
        (50, 1000),  # begun before the last token: it has ended, and nobody told
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
    assert told[:2] == [False, True]
