"""Fields of a request: those that both engines know beyond vLLM's own, and where sampling parameters stand. Pure."""

from collections.abc import Mapping
from typing import Any

# In `vllm_xargs`: ids of the tokens that another engine gave already. This engine goes on behind them.
CONTINUED = "continued_token_ids"
# A small file may unpack to gigabytes; a photograph of a good camera has 50 million pixels. A router bounds a request's pictures
# by this, an engine each of them.
MOST_PIXELS = 64 << 20


def sampling_holders(fields: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """What of a request may hold sampling parameters: itself, and on vLLM's token routes its `sampling_params`."""
    sampling = fields.get("sampling_params")
    return (fields, sampling) if isinstance(sampling, dict) else (fields,)
