"""Masks of grammars go to the rows of a step's logits that they are for.

vLLM's scheduler gives a step's masks in the order in which it scheduled the requests. A request has one mask more for each token
that was drafted for it. tpu-inference 0.26 takes the masks for one a request, in the order of the requests' ids (upstream:
tpu-inference#1531). So requests with grammars that run side by side get one another's, and end with errors.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np


def install() -> None:
    """Teach this to the workers of this process."""
    from tpu_inference.runner.structured_decoding_manager import StructuredDecodingManager  # noqa: PLC0415  only workers need it
    from tpu_inference.runner.tpu_runner import TPUModelRunner  # noqa: PLC0415

    sample_tokens = TPUModelRunner.sample_tokens

    def sampling(runner: Any, grammars: Any) -> Any:
        if step := runner.execute_model_state:  # `sample_tokens` forgets it before the masks are laid out
            runner.serving_drafted = step.scheduler_output.scheduled_spec_decode_tokens
        return sample_tokens(runner, grammars)

    TPUModelRunner.sample_tokens = sampling
    StructuredDecodingManager.prepare_structured_decoding_input = _laid_out


def _laid_out(manager: Any, logits: Any, grammars: Any) -> Any:
    """Which rows of the logits have a mask, the masks by row, and the numbers of a word's bits, on the devices."""
    from tpu_inference.utils import device_array  # noqa: PLC0415

    runner = manager.runner
    masked = np.zeros((logits.shape[0], 1), np.bool_)
    masks = np.zeros((logits.shape[0], runner.grammar_bitmask_cpu.shape[1]), np.int32)
    batch = runner.input_batch.req_ids[: runner.input_batch.num_reqs]
    rows = rows_of(grammars.structured_output_request_ids, batch, runner.serving_drafted)
    for mask, row in zip(grammars.grammar_bitmask, rows, strict=True):
        if row is not None:
            masked[row], masks[row] = True, mask
    return device_array(runner.mesh, (masked, masks, runner.structured_decode_arange))


def rows_of(
    names: Sequence[str], batch: Sequence[str], drafted: Mapping[str, Sequence[int]]
) -> Iterator[int | None]:
    """For each mask of these requests its row of the logits; None where the request is no more in the batch.

    A request has a row for each of its drafted tokens and one more, in the order of the batch.
    """
    first, row = {}, 0
    for name in batch:
        first[name] = row
        row += 1 + len(drafted.get(name, ()))
    for name in names:
        for position in range(1 + len(drafted.get(name, ()))):
            yield first[name] + position if name in first else None
