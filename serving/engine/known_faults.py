"""Requests that end or hang an engine of the versions we run, and where: the router refuses them. Pure.

Each row says which versions it was seen in, so that a newer engine starts with an empty table.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from serving.errors import BadRequestError


@dataclass(frozen=True)
class KnownFault:
    """One fault: what a client asks, what comes of it, in which versions of tpu-inference, and who tells of it upstream.

    `holds` is given the request's fields and the number of hosts of the model's largest slice.
    """

    name: str
    asked: str
    comes: str
    versions: tuple[str, ...]
    instead: str
    upstream: str
    holds: Callable[[Mapping[str, Any], int], bool]


def _prompt_logprobs(fields: Mapping[str, Any], hosts: int) -> bool:
    sampling = fields.get("sampling_params")
    asked = [fields, sampling] if isinstance(sampling, Mapping) else [fields]
    if hosts > 1 and any(each.get("prompt_logprobs") is not None for each in asked):
        return True
    # As vLLM reads it: an echo takes its logprobs for the prompt too (of completions `logprobs`, of chat `top_logprobs`).
    told = fields.get("logprobs") is not None or fields.get("top_logprobs") is not None
    return hosts > 1 and bool(fields.get("echo")) and told


FAULTS = (
    KnownFault(
        name="prompt-logprobs-over-hosts",
        asked="logprobs of the prompt (prompt_logprobs, or echo with logprobs)",
        # By reading, 0.26.0: TPURunner._get_prompt_logprobs_dict forgets a finished prompt when a step's output is read, which only the first
        # host's is. The others go on computing logits of whole prompts, and the hosts' collectives no longer match.
        comes="ends an engine that runs over several hosts",
        versions=("0.26.0",),
        instead="leave them out, or serve the model on slices of one host",
        upstream="tpu_inference/runner/tpu_runner.py, _get_prompt_logprobs_dict; not reported yet",
        holds=_prompt_logprobs,
    ),
)


def refuse(fields: Mapping[str, Any], hosts: int) -> None:
    """Raises BadRequestError where no engine of a model on slices of so many hosts should see the request."""
    for fault in FAULTS:
        if fault.holds(fields, hosts):
            raise BadRequestError(
                f"The request asks for {fault.asked}, which {fault.comes} (tpu-inference {', '.join(fault.versions)}); "
                f"{fault.instead}."
            )
