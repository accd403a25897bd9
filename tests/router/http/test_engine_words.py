from importlib.util import find_spec
from pathlib import Path

import pydantic
import pytest
from support.patience import ends

from serving.router.http.engine_words import field, in_our_words

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("says", "asked"),
    [
        (
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set',
            '"auto"',
        ),
        ('tool_choice="required" requires --tool-call-parser to be set', '"required"'),
        (
            'tool_choice=function "my own secret" requires --tool-call-parser to be set',
            "a function's name",
        ),
    ],
)
def test_tools_of_a_model_without_a_parser_name_the_key_of_the_yaml(says: str, asked: str) -> None:
    assert in_our_words(says) == (
        f"tool_choice is {asked}, and this model has no tool parser: set engine.tool_call_parser in its YAML, or send "
        'tool_choice "none".'
    )


def test_a_long_message_is_read_at_once() -> None:
    """The place of a function's name was searched for from each `function "` of a client's text: a megabyte took a minute."""
    quoted = 'function "' * 1_000_000
    with ends():
        said = in_our_words(listed(problem("body", "temperature", says="No number", input=quoted)))
        assert said == "The request is not valid: temperature: No number."
        in_our_words(quoted)
        in_our_words(listed(*(problem("body", at) for at in range(20_000))))


def test_a_client_s_text_is_not_taken_for_the_engine_s() -> None:
    text = "requires --tool-call-parser"
    said = in_our_words(listed(problem("body", "temperature", says="No number", input=text)))
    assert said == "The request is not valid: temperature: No number."


def test_these_are_the_installed_vllm_s_own_words() -> None:
    package = find_spec("vllm")
    assert package
    assert package.origin
    source = (Path(package.origin).parent / "renderers" / "online_renderer.py").read_text()
    for words in (
        '"auto" tool choice requires ',
        "--enable-auto-tool-choice and --tool-call-parser to be set",
        "tool_choice={tool_choice_desc} requires ",
        '"--tool-call-parser to be set"',
    ):
        assert words in source


def test_flags_of_vllm_are_keys_of_the_yaml() -> None:
    said = in_our_words(
        "You must set `--enable-mm-embeds` to input `image_embeds`; see --help and -- or --x-y."
    )
    assert (
        said == "You must set `engine.enable_mm_embeds` to input `image_embeds`; see --help and -- or --x-y."
    )


def problem(*place: str | int, says: str = "Field required", **more: object) -> dict[str, object]:
    return {"type": "missing", "loc": place, "msg": says, "input": {"a": "b\nc', 'input': "}, **more}


def listed(*problems: object) -> str:
    """As vLLM's handler of validation errors writes them."""
    lines = "".join(f"  {error}\n" for error in problems).rstrip()
    return f"{len(problems)} validation errors:\n{lines}"


def test_fields_that_are_wrong_are_told_in_a_sentence() -> None:
    said = in_our_words(
        listed(
            problem("body", "messages", 0, "role"),
            problem("body", says="Value error, no tools.", ctx={"error": ValueError("no")}),
        )
    )
    assert said == "The request is not valid: messages.0.role: Field required; no tools."


def test_a_field_is_named_whose_problem_comes_with_python_s_own_error() -> None:
    wrong = {"type": "value_error", "loc": ("body", "max_tokens"), "msg": "Value error, must be positive"}
    said = in_our_words(listed({**wrong, "ctx": {"error": ValueError("must be positive")}}))
    assert said == "The request is not valid: max_tokens: must be positive."


def test_of_many_problems_the_first_are_told_and_each_once() -> None:
    said = in_our_words(listed(*(problem("body", f"field_{at // 2}") for at in range(20))))
    assert said.count("Field required") == 5
    assert said.endswith("field_4: Field required; and 5 more.")


def test_a_problem_that_can_t_be_read_is_not_passed_on() -> None:
    broken = "{'type': 'x', 'loc': ('body',), 'msg': 'open, 'input': 'secret'}"
    assert in_our_words(listed(broken)) == "The request is not valid: the engine does not take these fields."
    assert (
        in_our_words(listed("No image in the prompt.")) == "The request is not valid: No image in the prompt."
    )


def test_pydantic_s_own_text_loses_what_it_repeats() -> None:
    class Body(pydantic.BaseModel):
        count: int
        names: list[str]

    with pytest.raises(pydantic.ValidationError) as refused:
        Body.model_validate({"count": "secret", "names": ["a", 7]})
    said = in_our_words(str(refused.value))
    assert said == (
        "The request is not valid: count: Input should be a valid integer, unable to parse string as an integer; "
        "names.1: Input should be a valid string."
    )


def test_what_pydantic_says_of_all_fields_together_is_told() -> None:
    class Body(pydantic.BaseModel):
        @pydantic.model_validator(mode="after")
        def has_a_name(self) -> None:
            raise ValueError("send one kind of grammar")

    with pytest.raises(pydantic.ValidationError) as refused:
        Body.model_validate({"secret": "secret"})
    assert in_our_words(str(refused.value)) == "The request is not valid: send one kind of grammar."


def test_types_that_pydantic_tried_are_no_part_of_a_field_s_name() -> None:
    said = in_our_words(
        listed(
            problem("body", "messages", 2, "ChatCompletionDeveloperMessageParam", "content", "str"),
            problem("body", "messages", 2, "ChatCompletionSystemMessageParam", "content", "str"),
            problem("body", "response_format", "function-wrap[__log_extra_fields__()]", "type"),
            problem("body", "prompt", "list[list[constrained-int]]", 0),
        )
    )
    assert said == (
        "The request is not valid: messages.2.content: Field required; response_format.type: Field required; "
        "prompt.0: Field required."
    )


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("body.messages.2.ChatCompletionDeveloperMessageParam.content", "messages[2].content"),
        ("body.0.ChatCompletionMessageFunctionToolCallParam.function", "0.function"),
        ("body.user", "user"),
        ("body", None),
        ("", None),
        ("temperature", "temperature"),
        (None, None),
        (["secret"], None),
    ],
)
def test_a_wrong_field_is_named_as_openai_names_it(place: object, name: str | None) -> None:
    assert field(place) == name


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("'NoneType' object is not iterable", "a field is of a type that it can't have, or is null"),
        ("'str' object has no attribute 'get'", "a field is of a type that it can't have, or is null"),
        (
            "Expecting value: line 1 column 1 (char 0)",
            "a text that has to be JSON, as a tool call's arguments, is none",
        ),
        (
            "Expecting ',' delimiter: line 1 column 9 (char 8)",
            "a text that has to be JSON, as a tool call's arguments, is none",
        ),
    ],
)
def test_python_s_own_words_are_a_sentence(said: str, told: str) -> None:
    assert in_our_words(said) == f"The request is not valid: {told}."


def test_other_words_stay_as_they_are() -> None:
    assert in_our_words("This model's maximum context length is 10 tokens.") == (
        "This model's maximum context length is 10 tokens."
    )
    assert len(in_our_words("x" * 10_000)) == 4000
