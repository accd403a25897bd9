from typing import Any

import pytest
from ray.serve.exceptions import RayServeException

from serving.app import build

pytestmark = pytest.mark.unit


def model(name: str, *adapters: str) -> dict[str, Any]:
    return {
        "name": name,
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "slice": {"generation": "v6e", "topology": "2x4", "hosts": 1},
        "engine": {
            "max_model_len": 2048,
            "enable_lora": True,
            "lora_modules": [f"{a}=/{a}" for a in adapters],
        },
    }


@pytest.mark.parametrize(
    "models",
    [[model("llama", "sql", "llama")], [model("llama", "sql"), model("other", "sql")]],
)
def test_an_adapter_with_the_name_of_another_is_refused(models: list[dict[str, Any]]) -> None:
    with pytest.raises(RayServeException, match="has the name of another; rename it"):
        build({"models": models})
