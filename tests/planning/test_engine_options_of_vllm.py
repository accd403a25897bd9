import dataclasses

import pytest

from serving.planning import engine_options


@pytest.mark.engine
def test_the_options_are_those_of_the_installed_vllm() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    names = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert names == engine_options.SETTABLE | engine_options.DERIVED.keys()


@pytest.mark.engine
def test_the_values_of_options_are_those_of_the_installed_vllm() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    choices = {
        action.dest: {value for value in action.choices if value != "None"}
        for action in parser._actions
        if action.choices and action.dest != "collect_detailed_traces"
    }
    assert choices == {name: set(values) for name, values in engine_options.CHOICES.items()}


@pytest.mark.engine
def test_the_parsers_are_those_of_the_installed_vllm() -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    assert {
        "tool_call_parser": tuple(sorted(ToolParserManager.list_registered())),
        "reasoning_parser": tuple(sorted(ReasoningParserManager.list_registered())),
    } == engine_options.PARSERS
