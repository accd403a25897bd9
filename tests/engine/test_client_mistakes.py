import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from serving.engine import client_mistakes
from serving.engine.dead_grammars import DEAD_END

pytestmark = pytest.mark.unit

TASKS = ("generate",)


def validated(params: Any, tasks: Any) -> None:
    assert tasks is TASKS
    if params.temperature < 0:
        raise ValueError("temperature must be non-negative")


class Sent(msgspec.Struct):
    """Parameters as vLLM sends them: they are looked at where they are made, and where they are read."""

    min_tokens: int
    max_tokens: int
    extra: Any = None

    def __post_init__(self) -> None:
        if self.min_tokens > self.max_tokens:
            raise ValueError("min_tokens must be less than or equal to max_tokens")


def made(sampling_params: Any, pooling_params: Any = None) -> Any:
    return SimpleNamespace(sampling_params=sampling_params, pooling_params=pooling_params)


def engine_of() -> Any:
    looks = SimpleNamespace(_validate_params=validated, process_inputs=made)
    return SimpleNamespace(generate=answers, input_processor=looks)


def params(temperature: float) -> Any:
    return SimpleNamespace(temperature=temperature, structured_outputs=None, ignore_eos=False, min_tokens=0)


async def answers(*arguments: Any, **options: Any) -> Any:
    """vLLM's generators: what is wrong with a request shows when they are read."""
    yield arguments, options


async def conversation(item: Any, before: None = None) -> Any:
    """vLLM's, of an item that may have no role, no content, or content without text."""
    return item["role"], item["content"][0].text, before


class Messages:
    def create_error_response(self, error: Exception) -> tuple[str, str]:
        return "error", str(error)

    async def create_messages(self, request: str, **_: Any) -> str:
        if request == "too long":
            raise ValueError("the prompt is too long")
        return request

    count_tokens = create_messages


@pytest.fixture
def app() -> Any:
    engine = engine_of()
    state = SimpleNamespace(
        openai_serving_responses=SimpleNamespace(
            _generate_with_builtin_tools=answers, _make_request=conversation
        ),
        anthropic_serving_messages=Messages(),
    )
    client_mistakes.install(engine, state, TASKS, "")
    return SimpleNamespace(engine=engine, **vars(state))


def test_wrong_parameters_are_refused_before_an_answer_is_read(app: Any) -> None:
    for temperature in (-1.0, 1.0):
        for call in (
            lambda params: app.engine.generate("prompt", params, "id"),
            lambda params: app.engine.generate(prompt="prompt", sampling_params=params, request_id="id"),
            lambda params: app.openai_serving_responses._generate_with_builtin_tools(
                request_id="id", sampling_params=params
            ),
        ):
            if temperature < 0:
                with pytest.raises(ValueError, match="non-negative"):
                    call(params(temperature))
            else:
                assert call(params(temperature)).__anext__


def test_a_mistake_in_a_message_is_told_as_vllm_s_other_routes_tell_it(app: Any) -> None:
    messages = app.anthropic_serving_messages
    for ask in (messages.create_messages, messages.count_tokens):
        assert asyncio.run(ask("too long", raw_request=None)) == ("error", "the prompt is too long")
        assert asyncio.run(ask("hello")) == "hello"


@pytest.mark.parametrize(
    "item",
    [
        {"type": "custom_tool_call"},
        {"role": "assistant", "content": []},
        {"role": "assistant", "content": [SimpleNamespace(refusal="no")]},
    ],
)
def test_an_item_that_makes_no_message_is_the_client_s_mistake(app: Any, item: Any) -> None:
    with pytest.raises(ValueError, match="input has an item of a kind"):
        asyncio.run(app.openai_serving_responses._make_request(item, None))


def test_items_that_make_messages_pass(app: Any) -> None:
    item = {"role": "user", "content": [SimpleNamespace(text="a")]}
    assert asyncio.run(app.openai_serving_responses._make_request(item)) == ("user", "a", None)


def test_parameters_are_looked_at_once(app: Any) -> None:
    once = params(1.0)
    app.engine.generate("prompt", once, "id")
    once.temperature = -1.0  # what a second look would find
    app.engine.generate("prompt", once, "id")
    look = app.engine.input_processor._validate_params
    look(once, TASKS)
    with pytest.raises(ValueError, match="non-negative"):
        look(params(-1.0), TASKS)


def test_what_no_engine_core_can_read_is_refused_before_it_is_sent(app: Any) -> None:
    """It ended the reading of all further requests there."""
    make = app.engine.input_processor.process_inputs
    good, late, wide = Sent(1, 5), Sent(1, 5), Sent(1, 5, {"a": 1 << 70})
    late.min_tokens = 6  # vLLM sets max_tokens itself once it has looked
    assert make(good).sampling_params is good
    assert make(None, good).pooling_params is good
    assert make(Sent(1, 5, object())), "vLLM's own way of sending may know it"
    for bad, says in ((late, "less than or equal"), (wide, "No engine can read")):
        for arguments in ((bad,), (None, bad)):
            with pytest.raises(ValueError, match=says):
                make(*arguments)


GRAMMARS = {
    "none": None,
    "empty": SimpleNamespace(all_constraints_none=lambda: True),
    "one": SimpleNamespace(all_constraints_none=lambda: False),
}


@pytest.mark.parametrize("no_grammars", ["", "they end it"])
@pytest.mark.parametrize("name", GRAMMARS)
def test_a_grammar_is_refused_only_where_the_engine_takes_none(name: str, no_grammars: str) -> None:
    engine = engine_of()
    client_mistakes.install(engine, SimpleNamespace(), TASKS, no_grammars)
    asked = params(1.0)
    asked.structured_outputs = GRAMMARS[name]
    if name == "one" and no_grammars:
        with pytest.raises(ValueError, match="they end it"):
            engine.generate("prompt", asked, "id")
    else:
        assert engine.generate("prompt", asked, "id").__anext__


def test_an_app_without_these_routes_is_left_as_it_is() -> None:
    engine = engine_of()
    client_mistakes.install(engine, SimpleNamespace(openai_serving_responses=None), TASKS, "")


def output(
    finish_reason: str | None, tokens: tuple[int, ...] = (), stop_reason: str | None = None, index: int = 0
) -> Any:
    answer = SimpleNamespace(
        index=index, finish_reason=finish_reason, token_ids=tokens, stop_reason=stop_reason
    )
    return SimpleNamespace(outputs=[answer])


def read(grammar: str, *outputs: Any, **asks: Any) -> list[Any]:
    """What a client's answer is made of, where an engine writes `outputs` under one of GRAMMARS."""

    async def generate(*_: Any, **__: Any) -> Any:
        for written in outputs:
            yield written

    async def whole() -> list[Any]:
        return [written async for written in engine.generate("prompt", asked, "id")]

    engine, asked = engine_of(), params(1.0)
    engine.generate, asked.structured_outputs = generate, GRAMMARS[grammar]
    vars(asked).update(asks)
    client_mistakes.install(engine, SimpleNamespace(), TASKS, "")
    return asyncio.run(whole())


@pytest.mark.parametrize(
    "outputs",
    [
        [output("error")],  # it was not compiled
        [output("error", (7,), DEAD_END)],
        [output(None, (5,)), output("error", (7,), DEAD_END)],
    ],
)
def test_a_grammar_that_no_answer_follows_is_the_client_s_mistake(outputs: list[Any]) -> None:
    with pytest.raises(ValueError, match="No answer can follow the request's grammar"):
        read("one", *outputs)


@pytest.mark.parametrize("asks", [{"ignore_eos": True}, {"min_tokens": 2}])
def test_an_answer_that_is_to_go_on_behind_the_end_of_its_grammar_is_the_client_s_mistake(
    asks: dict[str, Any],
) -> None:
    """vLLM's scheduler ends it as an error of its own: a router asked four slices for it."""
    outputs = [output(None, (5,)), output("error", (7,))]
    with pytest.raises(ValueError, match=f"leave out {next(iter(asks))}"):
        read("one", *outputs, **asks)
    assert read("none", *outputs, **asks) == outputs
    assert read("one", output("length", (5,)), **asks) != []


def test_an_answer_that_is_long_enough_and_fails_is_the_engine_s_error() -> None:
    outputs = [output(None, (5, 6)), output("error", (7,))]
    assert read("one", *outputs, min_tokens=2) == outputs


def test_one_of_several_answers_that_fails_before_its_first_token_is_the_engine_s_error() -> None:
    """The grammar could be compiled: another answer has a token of it."""
    outputs = [output(None, (5,)), output("error", index=1)]
    assert read("one", *outputs) == outputs


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_an_engine_s_own_error_stays_one(grammar: str) -> None:
    outputs = [output(None, (5,)), output("error", (7,))]
    assert read(grammar, *outputs) == outputs
    assert read(grammar, output("stop", (5,))) != []


def test_an_answer_without_a_grammar_is_read_as_vllm_gives_it() -> None:
    failed = output("error")
    assert read("none", failed) == read("empty", failed) == [failed]
