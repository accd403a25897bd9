"""What a client did wrong is told as such, before its answer has begun.

vLLM 0.26 looks at sampling parameters when an answer is read for the first time. By then a stream has its 200. On `/v1/responses` vLLM
cuts the connection, which to a router is a slice that broke off; elsewhere the error is an event. On `/v1/messages` every mistake is a
500 of the engine's, such as a prompt that is too long. On `/v1/responses` every item is one that vLLM makes no message of. Here
parameters are looked at before, and a mistake is a 400 on every route.

EngineCore looks at the parameters of a request once more as it reads it. Where they are wrong then, it reads no other request: a
`min_tokens` beyond what the prompt leaves of the context ends an engine without a sign. So they are read here before they are sent.

EngineCore compiles grammars. vLLM makes a 500 of one that can't be compiled, that nothing can follow, or whose answer is to go on behind
its end (`ignore_eos`, `min_tokens`): routers would take slices that met it for broken, and ask another.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import msgspec

from serving.engine.dead_grammars import DEAD_END

_CHECKED = "serving_checked"  # an attribute of sampling parameters, which a copy lacks


def install(engine: Any, state: Any, tasks: Any, no_grammars: str) -> None:
    """Teach this to an AsyncLLM and to an app that vLLM built; `state` is its app.state.

    `tasks` are the engine's; `no_grammars`: why it takes no grammars, where it takes none.
    """
    validate = engine.input_processor._validate_params  # noqa: SLF001  nothing public does it alone

    def check(sampling_params: Any) -> None:
        if not hasattr(sampling_params, _CHECKED):
            _check_grammar(sampling_params, no_grammars)
            validate(sampling_params, tasks)
            setattr(sampling_params, _CHECKED, True)

    def unless_checked(params: Any, supported_tasks: Any) -> None:
        """A schema of some hundred values takes 5 ms to look at."""
        if not hasattr(params, _CHECKED):
            validate(params, supported_tasks)

    engine.input_processor._validate_params = unless_checked  # noqa: SLF001
    engine.generate = _checked(_following(engine.generate), check)
    engine.input_processor.process_inputs = _readable(engine.input_processor.process_inputs)
    if responses := getattr(state, "openai_serving_responses", None):
        responses._make_request = _read(responses._make_request)  # noqa: SLF001
        generate = responses._generate_with_builtin_tools  # noqa: SLF001
        responses._generate_with_builtin_tools = _checked(generate, check)  # noqa: SLF001
    if messages := getattr(state, "anthropic_serving_messages", None):
        messages.create_messages = _told(messages.create_messages, messages)
        messages.count_tokens = _told(messages.count_tokens, messages)


def _check_grammar(sampling_params: Any, no_grammars: str) -> None:
    """Whichever field or tool parser a grammar is from, here it is in one place."""
    if no_grammars and _has_grammar(sampling_params):
        raise ValueError(
            "No grammar can bind an answer here (structured_outputs, response_format, a required or strict tool): "
            f"{no_grammars}. Leave it out."
        )


def _following(generate: Any) -> Any:
    """An AsyncLLM's `generate`, which tells what is a grammar's fault."""

    async def following(stream: Any, params: Any) -> AsyncIterator[Any]:
        written: Counter[int] = Counter()  # tokens by answer
        async with aclosing(stream) as outputs:
            async for output in outputs:
                for answer in output.outputs:
                    written[answer.index] += len(answer.token_ids)
                    if answer.finish_reason != "error":
                        continue
                    if not written.total() or answer.stop_reason == DEAD_END:
                        raise ValueError(
                            "No answer can follow the request's grammar (structured_outputs, response_format, a required or strict tool) "
                            "to its end: a part of it fits no text, or is none that can be compiled."
                        )
                    # The grammar rejects what comes behind its end; the token that it rejected counts as written.
                    if asks := _goes_on(params, written[answer.index]):
                        raise ValueError(
                            f"The request's grammar allows no more than the answer has, and {asks} asks for more; leave out {asks}."
                        )
                yield output

    def generating(*arguments: Any, **options: Any) -> Any:
        stream, params = generate(*arguments, **options), _params(arguments, options)
        return following(stream, params) if _has_grammar(params) else stream

    return generating


def _goes_on(params: Any, written: int) -> str:
    """The parameter by which an answer of so many tokens goes on behind its end; empty where none does."""
    if params.ignore_eos:
        return "ignore_eos"
    return "min_tokens" if 0 < written <= params.min_tokens else ""


def _params(arguments: Any, options: Any) -> Any:
    return options["sampling_params"] if "sampling_params" in options else arguments[1]


def _has_grammar(sampling_params: Any) -> bool:
    grammar = sampling_params.structured_outputs
    return grammar is not None and not grammar.all_constraints_none()


def _readable(process_inputs: Any) -> Any:
    """vLLM's making of what is sent to EngineCore, by which `max_tokens` is known."""

    def processing(*arguments: Any, **options: Any) -> Any:
        request = process_inputs(*arguments, **options)
        for params in (request.sampling_params, request.pooling_params):
            if params is None:
                continue
            try:
                msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=type(params))
            except TypeError:
                continue  # of a kind that vLLM has its own way for
            except (msgspec.MsgspecError, ValueError, OverflowError) as error:
                raise ValueError(f"No engine can read the request's parameters: {error}") from error
        return request

    return processing


def _checked(generate: Any, check: Callable[[Any], None]) -> Any:
    def checking(*arguments: Any, **options: Any) -> Any:
        check(_params(arguments, options))
        return generate(*arguments, **options)

    return checking


def _read(make_request: Any) -> Any:
    async def reading(*arguments: Any, **options: Any) -> Any:
        try:
            return await make_request(*arguments, **options)
        except (AttributeError, IndexError, KeyError) as error:
            raise ValueError(
                "input has an item of a kind that no chat template knows, or without what its kind needs; send messages with "
                "content, reasoning, function_call and function_call_output."
            ) from error

    return reading


def _told(answer: Any, serving: Any) -> Any:
    async def telling(*arguments: Any, **options: Any) -> Any:
        try:
            return await answer(*arguments, **options)
        except Exception as error:  # noqa: BLE001  vLLM's own door would make a 500 of each; this knows the client's
            return serving.create_error_response(error)

    return telling
