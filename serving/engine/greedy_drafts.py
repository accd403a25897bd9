"""A greedy request keeps its tokens where others of its step are sampled and tokens are drafted.

tpu-inference 0.26 gives a greedy request the temperature -1 in its batch. Its sampler then takes the likeliest token. Its check of
drafted tokens (layers/jax/sample/rejection_sampler.py) divides by it, and so takes the unlikeliest, once any request of the step is
sampled. A temperature above 0 and below the sampler's own bound of 1e-5 is greedy to both.
"""

from typing import Any

_GREEDY = 1e-6


def install() -> None:
    """Teach this to the workers of this process."""
    from tpu_inference.runner.input_batch import InputBatch  # noqa: PLC0415  only workers need it

    InputBatch.add_request = _sharp(InputBatch.add_request)


def _sharp(add_request: Any) -> Any:
    def adding(batch: Any, request: Any, *arguments: Any, **options: Any) -> None:
        add_request(batch, request, *arguments, **options)
        row = batch.req_id_to_index[request.req_id]
        if request.sampling_params and batch.temperature_cpu[row] < 0:
            batch.temperature_cpu[row] = _GREEDY

    return adding
