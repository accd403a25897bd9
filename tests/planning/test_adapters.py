from typing import Any

import pytest

from serving.errors import ConfigError
from serving.planning.adapters import adapters, flag_values

pytestmark = pytest.mark.unit


def test_both_of_vllms_ways_to_name_an_adapter_are_taken() -> None:
    engine = {"enable_lora": True, "lora_modules": ["sql=/adapters/sql", {"name": "law", "path": "/a=b"}]}
    assert adapters(engine) == {"sql": "/adapters/sql", "law": "/a=b"}
    assert flag_values(engine)[1] == '{"name": "law", "path": "/a=b"}'
    assert adapters({}) == {}


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ({"lora_modules": "sql=/a"}, "a list is needed"),
        ({"lora_modules": ["sql"]}, "NAME=PATH"),
        ({"lora_modules": [{"name": "sql"}]}, "NAME=PATH"),
        ({"lora_modules": ["sql=/a", "sql=/b"]}, "two adapters are named 'sql'"),
        ({"lora_modules": ["s\nql=/a"]}, r"the name 's\nql' has control characters"),
        (
            {"lora_modules": ["sql=gs://b/sql"]},
            "vLLM reads adapter 'sql' from no URL (got gs://b/sql); name a Hugging Face id",
        ),
        ({"lora_modules": ["sql=/a"], "enable_lora": False}, "need engine.enable_lora: true"),
    ],
)
def test_a_wrong_entry_is_refused_with_what_is_needed(engine: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        adapters({"enable_lora": True} | engine)
    assert says in refusal.value.message
