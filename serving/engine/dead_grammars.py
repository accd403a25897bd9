r"""An answer whose grammar has come to a dead end is told from one that an engine got wrong.

In `[^\s\S]`, or in a schema that needs itself, there is a place where the grammar allows no token and has not ended. An engine then
draws any token, which the grammar rejects: vLLM ends the answer with the reason `error`, as where the engine itself is at fault.
"""

import sys
from collections.abc import Callable
from typing import Any

DEAD_END = "serving_dead_end"  # the `stop_reason` of such an answer
_IS_DEAD = "serving_is_dead"  # an attribute of a grammar
_ENGINE_CORE = "vllm.v1.engine.core"  # not loaded by workers


def install() -> None:
    """Teach this to vLLM where this process may be an EngineCore."""
    if _ENGINE_CORE not in sys.modules:
        return
    from vllm.v1.core.sched import scheduler  # noqa: PLC0415  only an EngineCore needs any of these
    from vllm.v1.request import RequestStatus  # noqa: PLC0415
    from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar  # noqa: PLC0415

    XgrammarGrammar.fill_bitmask = _noticing(XgrammarGrammar.fill_bitmask)
    scheduler.check_stop = _ending(scheduler.check_stop, RequestStatus.FINISHED_ERROR)


def _noticing(fill_bitmask: Callable[[Any, Any, int], None]) -> Callable[[Any, Any, int], None]:
    """The same, which notes in a grammar that its mask has no token. A mask of 128,000 tokens is looked at in 5 microseconds."""

    def noticing(grammar: Any, bitmask: Any, row: int) -> None:
        fill_bitmask(grammar, bitmask, row)
        if not bitmask[row].any():
            setattr(grammar, _IS_DEAD, True)

    return noticing


def _ending(check_stop: Callable[[Any, int], bool], error: Any) -> Callable[[Any, int], bool]:
    """vLLM's check of a request that has one token more; `error` is the status of one that has failed."""

    def check(request: Any, max_model_len: int) -> bool:
        structured = request.structured_output_request
        if structured is not None and getattr(structured.grammar, _IS_DEAD, False):
            request.status, request.stop_reason = error, DEAD_END
            return True
        return check_stop(request, max_model_len)

    return check
