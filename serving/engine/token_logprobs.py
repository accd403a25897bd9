"""Logprobs of an answer's own tokens alone: `logprobs: true` of a chat without `top_logprobs`, `logprobs: 0` of completions.

tpu-inference 0.26 computes none for a step in which every request asks for 0 (TPUSupportedSamplingMetadata), and vLLM's server
then fails on what it finds missing. So the engine is asked for one more, which the server leaves out of what it tells.
"""

import copy
from typing import Any


def install(engine: Any) -> None:
    """Teach this to an AsyncLLM."""
    generate = engine.generate

    def generating(prompt: Any, sampling_params: Any, *arguments: Any, **options: Any) -> Any:
        if sampling_params.logprobs == 0:
            sampling_params = copy.copy(sampling_params)  # the server counts by its own
            sampling_params.logprobs = 1
        return generate(prompt, sampling_params, *arguments, **options)

    engine.generate = generating
