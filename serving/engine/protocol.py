"""Fields of a request: those that both engines know beyond vLLM's own, and where sampling parameters stand. Pure."""

from collections.abc import Mapping
from typing import Any

# In `vllm_xargs`: ids of the tokens that another engine gave already. This engine goes on behind them.
CONTINUED = "continued_token_ids"


def sampling_holders(fields: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """What of a request may hold sampling parameters: itself, and on vLLM's token routes its `sampling_params`."""
    sampling = fields.get("sampling_params")
    return (fields, sampling) if isinstance(sampling, Mapping) else (fields,)
