"""Requests that end or hang an engine of the versions we run, which the router refuses, and parameters without effect. Pure.

Each row names the versions with the fault, so that a newer engine starts with an empty table.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from serving.engine.protocol import sampling_holders
from serving.errors import BadRequestError
from serving.planning.fit import Fit, gib


@dataclass(frozen=True)
class KnownFault:
    """One fault: what a client asks, what happens, in which versions of tpu-inference, and the issue upstream.

    `holds` gets the request's fields and the number of hosts of the model's largest slice; it is false without any field of FIELDS.
    """

    name: str
    asked: str
    comes: str
    versions: tuple[str, ...]
    instead: str
    upstream: str
    holds: Callable[[Mapping[str, Any], int], bool]


# What tpu-inference 0.26.0 takes into its batch (runner/input_batch.py) and never samples by, and the value that asks for nothing.
# A test asks a real engine.
WITHOUT_EFFECT: Mapping[str, Any] = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "logit_bias": {},
    "bad_words": [],
}


# The fields that the faults are about. Nearly all requests have none of them.
FIELDS = frozenset(("allowed_token_ids", "logprob_token_ids", "prompt_logprobs", "echo", "sampling_params"))


def without_effect(fields: Mapping[str, Any]) -> list[str]:
    """The parameters of a request that no engine heeds, though it takes them."""
    return [
        name
        for holder in sampling_holders(fields)
        for name in WITHOUT_EFFECT.keys() & holder.keys()
        if holder[name] is not None and holder[name] != WITHOUT_EFFECT[name]
    ]


def _has(fields: Mapping[str, Any], name: str) -> bool:
    return any(holder.get(name) is not None for holder in sampling_holders(fields))


def _allowed_token_ids(fields: Mapping[str, Any], hosts: int) -> bool:  # noqa: ARG001
    return _has(fields, "allowed_token_ids")


def _logprob_token_ids(fields: Mapping[str, Any], hosts: int) -> bool:  # noqa: ARG001
    return _has(fields, "logprob_token_ids")


def _prompt_logprobs(fields: Mapping[str, Any], hosts: int) -> bool:
    return hosts > 1 and wants_prompt_logprobs(fields)


def wants_prompt_logprobs(fields: Mapping[str, Any]) -> bool:
    """Whether a request asks for logprobs of its prompt. vLLM has them for an echo too: of completions with logprobs, of any chat."""
    if _has(fields, "prompt_logprobs"):
        return True
    # `logprobs` of completions; `top_logprobs` of chat, which is 0 where it is left out
    asked = [fields.get("logprobs"), fields.get("top_logprobs", 0 if "messages" in fields else None)]
    return bool(fields.get("echo")) and any(count is not None for count in asked)


FAULTS = (
    KnownFault(
        name="prompt-logprobs-over-hosts",
        asked="logprobs of the prompt (prompt_logprobs, echo with logprobs, or echo in a chat)",
        # By reading 0.26.0: TPURunner._get_prompt_logprobs_dict forgets a finished prompt when the host reads a step's output,
        # which only the first host does. The others go on with logits of whole prompts, and collectives no longer match.
        comes="ends an engine that runs over several hosts",
        versions=("0.26.0",),
        instead="leave them out, or serve the model on slices of one host",
        upstream="tpu_inference/runner/tpu_runner.py, _get_prompt_logprobs_dict; not reported yet",
        holds=_prompt_logprobs,
    ),
    KnownFault(
        name="allowed-token-ids",
        asked="allowed_token_ids",
        # jnp.zeros gets the shape of the mask as two arguments: TypeError in the engine's loop.
        comes="ends every engine",
        versions=("0.26.0",),
        instead="leave it out, or bound the answer with structured_outputs",
        upstream="tpu_inference/runner/input_batch.py, InputBatch.add_request; not reported yet",
        holds=_allowed_token_ids,
    ),
    KnownFault(
        name="logprob-token-ids",
        asked="logprob_token_ids",
        # The runner knows SamplingParams.logprobs alone, which vLLM leaves out beside them; its server then fails on what is missing.
        comes="no engine answers",
        versions=("0.26.0",),
        instead="leave it out, and ask for top_logprobs or logprobs",
        upstream="tpu_inference/runner/input_batch.py, InputBatch.add_request; not reported yet",
        holds=_logprob_token_ids,
    ),
)


def refuse_too_large(fields: Mapping[str, Any], fits: Iterable[Fit]) -> None:
    """Raises BadRequestError where logprobs of a prompt take more HBM than one of the model's pools has left.

    The engine compiles their program at start and gives it no memory, so that the first such request would end it.
    """
    if FIELDS.isdisjoint(fields) or not wants_prompt_logprobs(fields):
        return
    for fit in fits:
        if not fit.prompt_logprobs_fit:
            raise BadRequestError(
                "The request asks for logprobs of the prompt (prompt_logprobs, echo with logprobs, or echo in a chat), which take about "
                f"{gib(fit.workspace.prompt_logprobs_bytes)} of a device for a step of prompts, and gpu_memory_utilization "
                f"{fit.utilization:g} leaves {gib(fit.withheld_bytes)}; leave them out, or have the service lower "
                "engine.max_num_batched_tokens or engine.gpu_memory_utilization."
            )


def refuse(fields: Mapping[str, Any], hosts: int) -> None:
    """Raises BadRequestError where no engine on slices of this many hosts should see the request."""
    if FIELDS.isdisjoint(fields):
        return
    for fault in FAULTS:
        if fault.holds(fields, hosts):
            raise BadRequestError(
                f"The request asks for {fault.asked}, which {fault.comes} (tpu-inference {', '.join(fault.versions)}); "
                f"{fault.instead}."
            )
