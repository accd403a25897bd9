"""Refuses the fields by which a client would steer an engine: they are between router and engines. Pure."""

from collections.abc import Mapping
from typing import Any

from serving.engine.protocol import CONTINUED, CONTINUED_FINISH, CONTINUED_STEPS, CONTINUED_STOP, TELLS_TOKENS
from serving.errors import BadRequestError

# Fields that steer an engine past the router: its queue, its copies, other engines' caches and work without a client. Some say how
# many frames and pixels are made of media, or put tensors of media into the engine as they come. With the messages of gpt-oss's
# format an engine repeats a client's own objects behind its usage, by which keys are charged.
_STEERING = (
    "priority",
    "kv_transfer_params",
    "ec_transfer_params",
    "data_parallel_rank",
    "background",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "features",
    "enable_response_messages",
    TELLS_TOKENS,
)
# What of `chat_template_kwargs` vLLM hands to a tokenizer and to no template. With `tokenize` and `padding` it makes as many tokens as
# `max_length` says: 20 million take 2 GB, and with two billion no slice is left.
TOKENIZER_ARGUMENTS = (
    "conversation",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "sanitize_control_tokens",
    "tokenizer_kwargs",
)
_STEERED = frozenset((*_STEERING, "vllm_xargs", "sampling_params", "chat_template_kwargs"))
_STEERING_ARGUMENTS = (
    CONTINUED,
    CONTINUED_FINISH,
    CONTINUED_STEPS,
    CONTINUED_STOP,
    "kv_transfer_params",
    "ec_transfer_params",
    "kv_cache_report_mode",  # has an engine tell anew of all that a prompt found in its cache
)


def refuse(fields: Mapping[str, Any]) -> None:
    """Raises BadRequestError. A client that sends a default of these sends nothing."""
    if _STEERED.isdisjoint(fields):
        return
    for name in _STEERING:
        if fields.get(name):
            raise BadRequestError(f"{name} is not a client's to set on this service; leave it out.")
    template = fields.get("chat_template_kwargs")
    given = template if isinstance(template, Mapping) else {}
    for name in TOKENIZER_ARGUMENTS:
        if given.get(name):
            raise BadRequestError(
                f"chat_template_kwargs.{name} is an argument of the tokenizer and of no template; leave it out."
            )
    sampling = fields.get("sampling_params")
    holders: list[Any] = [fields.get("vllm_xargs")]
    if isinstance(sampling, Mapping):
        holders += [sampling.get("vllm_xargs"), sampling.get("extra_args")]
    for arguments in holders:
        for name in _STEERING_ARGUMENTS:
            if isinstance(arguments, Mapping | str) and name in arguments:
                raise BadRequestError(
                    f"vllm_xargs.{name} is not a client's to set on this service; leave it out."
                )
