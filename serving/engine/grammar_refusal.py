"""Which engines would end on a grammar, whichever field or tool parser it is from.

Read in 0.26.0 and tried: with data parallelism tpu-inference's scheduler (core/sched/dp_scheduler.py) hands requests to processes,
and a grammar that is being compiled goes to none: EngineCore ends. With `enable_continue_decode` tokens are drawn ahead of the
grammar, which then rejects them (upstream: tpu-inference#3463).
"""

from typing import Any

from serving.planning import Plan
from serving.planning.cache import separate_batches


def reason(plan: Plan) -> str:
    """Why engines of a plan take no grammars; empty where they do."""
    if separate_batches(plan.layout) > 1:
        return "this model's engines run with parallel.data or parallel.attention_data"
    if (plan.engine.get("additional_config") or {}).get("enable_continue_decode"):
        return "this model's engines run with additional_config.enable_continue_decode"
    return ""


def check(sampling_params: Any, why: str) -> None:
    """Raises ValueError where a request has a grammar, for the reason `why`; empty: there is none."""
    grammar = sampling_params.structured_outputs
    if why and grammar is not None and not grammar.all_constraints_none():
        raise ValueError(
            "No grammar can bind an answer here (structured_outputs, response_format, a required or strict tool): "
            f"{why}, which tpu-inference 0.26 can't do together. Leave it out."
        )
