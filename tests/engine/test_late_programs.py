"""Programs that are compiled while an engine serves: counted, named, and told by the step that needed them."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from serving.engine.late_programs import (
    Compilations,
    Late,
    LateProgram,
    Step,
    StepRequest,
    lines,
    most,
    step_of,
)

STEP = Step(2, 40, (StepRequest("cmpl-a", 39, 39), StepRequest("cmpl-b", 1, None)))


def compiled(*names: str) -> Compilations:
    """A process that has compiled these since it serves, a second each."""
    made = Compilations()
    made.serve()
    for name in names:
        made.compiled(name, 1.0, thread=1, step=STEP)
    return made


@pytest.mark.unit
def test_programs_are_late_from_the_first_call_on() -> None:
    made = Compilations()
    made.compiled("step_fun", 20.0, thread=1)
    assert made.serve() == Late()
    made.compiled("sample", 2.0, thread=1)
    assert made.serve() == Late(1, 2.0, (LateProgram("sample", 2.0, False, None),))
    assert (made.programs, made.seconds) == (2, 22.0)


@pytest.mark.unit
def test_a_program_came_from_the_cache_where_its_own_thread_found_it_there() -> None:
    made = compiled()
    made.hit(thread=1)
    made.compiled("other", 1.0, thread=2)
    made.compiled("found", 0.1, thread=1)
    made.compiled("next", 1.0, thread=1)
    assert [(program.name, program.cached) for program in made.serve().newest] == [
        ("other", False),
        ("found", True),
        ("next", False),
    ]
    assert made.cache_hits == 1


@pytest.mark.unit
def test_all_are_counted_and_the_newest_are_named() -> None:
    late = compiled(*map(str, range(100))).serve()
    assert (late.programs, late.seconds) == (100, 100.0)
    assert [program.name for program in late.after(97)] == ["97", "98", "99"]
    assert len(late.after(0)) == len(late.newest) < 100
    assert late.after(100) == ()


@pytest.mark.unit
def test_a_step_names_new_requests_first_and_then_the_largest() -> None:
    cached = {f"cmpl-{at}": at + 1 for at in range(5)}
    new = SimpleNamespace(req_id="chatcmpl-new", prompt_token_ids=[1] * 600)
    scheduled = SimpleNamespace(
        scheduled_new_reqs=[new],
        num_scheduled_tokens={**cached, "chatcmpl-new": 2},
        total_num_scheduled_tokens=17,
    )
    assert str(step_of(scheduled)) == (
        "a step of 6 requests and 17 tokens: chatcmpl-new (2 tokens, new, prompt of 600), cmpl-4 (5 tokens), cmpl-3 (4 tokens) "
        "and 3 more"
    )


@pytest.mark.unit
def test_a_line_a_step_has_the_programs_that_it_needed() -> None:
    other = LateProgram("add", 0.01, True, None)
    made = compiled("step_fun", "sample")
    assert lines([*made.serve().newest, other]) == [
        (
            "step_fun (1.00 s), sample (1.00 s), for a step of 2 requests and 40 tokens: cmpl-a (39 tokens, new, prompt of 39), "
            "cmpl-b (1 token)"
        ),
        "add (0.01 s, from the cache), for no step of requests",
    ]
    assert lines(compiled(*"abcdef").serve().newest)[0].startswith(
        "a (1.00 s), b (1.00 s), c (1.00 s) and 3 more, for"
    )


@pytest.mark.unit
def test_the_worker_that_compiled_most_stands_for_its_engine() -> None:
    few, many = compiled("a").serve(), compiled("a", "b").serve()
    assert most([few, many, few]) == many
    assert most([]) == Late()


@pytest.mark.unit
def test_it_crosses_processes_unchanged() -> None:
    made = compiled("a")
    made.compiled("b", 0.5, thread=1)
    assert Late.of(json.loads(json.dumps(asdict(made.serve())))) == made.serve()


# A worker's module in a process of its own, and a step that needs a program before and after it is asked for late ones.
STEPS = """
import json, jax, jax.numpy as jnp
from types import SimpleNamespace
from serving.engine.start_facts import StartFacts
worker = StartFacts()

@jax.jit
def doubled(x):
    return 2 * x

def execute_model(scheduler_output):
    sample_tokens(scheduler_output.total_num_scheduled_tokens)

def sample_tokens(size):
    doubled(jnp.ones(size)).block_until_ready()

def step(size):
    new = SimpleNamespace(req_id=f"cmpl-{size}", prompt_token_ids=[0] * size)
    return SimpleNamespace(
        scheduled_new_reqs=[new], num_scheduled_tokens={new.req_id: size}, total_num_scheduled_tokens=size
    )

execute_model(step(3))
worker.serving_late_programs()
execute_model(step(3))
execute_model(step(5))
sample_tokens(7)
print(json.dumps(worker.serving_late_programs()))
"""


@pytest.mark.engine
@pytest.mark.slow
def test_jax_tells_a_worker_of_a_late_program_in_the_step_that_needs_it() -> None:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    done = subprocess.run(
        [sys.executable, "-c", STEPS],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    late = Late.of(json.loads(done.stdout.splitlines()[-1]))
    of_doubled = [program for program in late.newest if "doubled" in program.name]
    assert [program.step for program in of_doubled] == [Step(1, 5, (StepRequest("cmpl-5", 5, 5),)), None]
    assert all(program.seconds > 0 and not program.cached for program in of_doubled)
