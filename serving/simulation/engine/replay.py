"""A load on a simulated engine in simulated time: a run of minutes is measured in a second."""

import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from serving.planning import Plan
from serving.simulation.engine.calibration import Load
from serving.simulation.engine.physics import Factors, Parts, Physics
from serving.simulation.engine.scheduler import Limits, Request, Scheduler

_SEED = 100


@dataclass(frozen=True)
class Outcome:
    """The measurements of a run; `parts` is the plan's time of all steps together."""

    seconds: float
    tokens_per_s: float
    tpot_s: float
    ttft_s: float
    steps: int
    preemptions: int
    parts: Parts


def replay(plan: Plan, load: Load, factors: Factors) -> Outcome:
    """A client that always has `concurrency` requests in flight, until all prompts are answered."""
    scheduler, physics = Scheduler(Limits.of(plan)), Physics(plan, Factors())
    requests = _requests(load)
    done: list[Request] = []
    parts: list[Parts] = []
    now_s = 0.0
    for request, _ in zip(requests, range(load.concurrency), strict=False):
        scheduler.add(request)
    while step := scheduler.schedule(now_s):
        parts.append(physics.parts(step.batch))
        now_s += parts[-1].seconds(factors)
        for request in scheduler.complete(step, now_s):
            if request.done:
                done.append(request)
                if (following := next(requests, None)) is not None:
                    following.arrived_s = now_s
                    scheduler.add(following)
    return Outcome(
        seconds=now_s,
        tokens_per_s=scheduler.totals.written_tokens / now_s,
        tpot_s=statistics.median(_tpot_s(request) for request in done),
        ttft_s=statistics.median((request.first_token_s or 0) - request.arrived_s for request in done),
        steps=scheduler.totals.steps,
        preemptions=scheduler.totals.preemptions,
        parts=Parts(
            decode_s=sum(step.decode_s for step in parts),
            prefill_s=sum(step.prefill_s for step in parts),
            cache_s=sum(step.cache_s for step in parts),
            attention_s=sum(step.attention_s for step in parts),
        ),
    )


def _requests(load: Load) -> Iterator[Request]:
    """Prompts that share nothing, of lengths drawn as the benchmark draws them."""
    draw = random.Random(_SEED)
    for number in range(load.prompts):
        prompt = draw.randint(int(load.prompt * load.shortest), load.prompt)
        answer = draw.randint(int(load.answer * load.shortest), load.answer)
        yield Request([number + 1] * prompt, [0] * answer, 0.0)


def _tpot_s(request: Request) -> float:
    first, last = request.first_token_s or 0.0, request.last_token_s or 0.0
    return (last - first) / max(1, request.written - 1)
