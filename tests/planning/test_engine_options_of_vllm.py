import dataclasses

import pytest

from serving.planning import engine_options


@pytest.mark.engine
def test_the_options_are_those_of_the_installed_vllm() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    names = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert names == engine_options.SETTABLE | engine_options.DERIVED.keys()
