"""Answers that an engine was stopped in the middle of are errors, so that routers ask another slice.

vLLM 0.26's EngineCore ends all its requests with the reason `abort` where it gets SIGTERM, as at the end of a pod. The server
then ends their answers as if they were complete.
"""

from typing import Any


def install() -> None:
    """Teach this to vLLM's server."""
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing  # noqa: PLC0415  only a process that serves loads vLLM

    raise_if_error = GenerateBaseServing._raise_if_error  # noqa: SLF001

    def raise_if_stopped(serving: Any, finish_reason: str | None, request_id: str) -> None:
        raise_if_error(serving, "error" if finish_reason == "abort" else finish_reason, request_id)

    GenerateBaseServing._raise_if_error = raise_if_stopped  # noqa: SLF001
