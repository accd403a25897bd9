"""An answer whose grammar takes an engine too long is cut, as one that has reached its length.

xgrammar reads an answer in every way that its grammar allows. Of `root ::= root root | "a"`, or of the regex `(a+)+b`, there are the
more the longer it is: its 1,000th token takes a second, in the step of EngineCore in which all requests of the slice wait. Which
grammars do so can't be told beforehand.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

# Schemas and most regexes take a tenth of a millisecond a token; `(\w+\s?)*` takes 10.
_ALLOWED_S = 4.0
_ALLOWED_A_TOKEN_S = 0.01
_SPENT = "serving_spent_s"  # an attribute of a grammar
_ENGINE_CORE = "vllm.v1.engine.core"  # not loaded by workers


def install() -> None:
    """Teach this to vLLM where this process may be an EngineCore."""
    if _ENGINE_CORE not in sys.modules:
        return
    from vllm.v1.core.sched import scheduler  # noqa: PLC0415  only an EngineCore needs any of these
    from vllm.v1.request import RequestStatus  # noqa: PLC0415
    from vllm.v1.structured_output.backend_guidance import GuidanceGrammar  # noqa: PLC0415
    from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar  # noqa: PLC0415

    for kind in (XgrammarGrammar, GuidanceGrammar):
        kind.fill_bitmask = _timed(kind.fill_bitmask)
        kind.accept_tokens = _timed(kind.accept_tokens)
    scheduler.check_stop = _cutting(scheduler.check_stop, RequestStatus.FINISHED_LENGTH_CAPPED)


def _timed(work: Any) -> Any:
    """The same, which adds up the seconds of a CPU that it took for a grammar."""

    def timed(grammar: Any, *arguments: Any) -> Any:
        began_s = time.thread_time()
        try:
            return work(grammar, *arguments)
        finally:
            spent_s = getattr(grammar, _SPENT, 0.0) + time.thread_time() - began_s
            setattr(grammar, _SPENT, spent_s)

    return timed


def _cutting(check_stop: Callable[[Any, int], bool], cut: Any) -> Callable[[Any, int], bool]:
    """vLLM's check of a request that has one token more; `cut` is the status of one that has reached its length."""

    def check(request: Any, max_model_len: int) -> bool:
        if check_stop(request, max_model_len):
            return True
        if (structured := request.structured_output_request) is None:
            return False
        spent_s = getattr(structured.grammar, _SPENT, 0.0)
        if spent_s <= _ALLOWED_S + _ALLOWED_A_TOKEN_S * request.num_output_tokens:
            return False
        request.status = cut
        return True

    return check
