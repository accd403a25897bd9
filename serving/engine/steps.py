"""Lets vLLM go on with a message or a response that another engine began, and says the tokens of each step of a stream.

Of both APIs' streams vLLM makes numbered blocks with texts of their own: a state that a second engine lacks. So it gets the
state by the same way: vLLM's own parsers and converters read the other engine's tokens as if the model had just given them.
What they make of these is dropped, and later events go on behind it with the blocks, texts and usage of one answer. The engine
itself gets the tokens behind the prompt, and bounds less by their number.

An event of tokens (serving.engine.protocol) ends what each step brings. So vLLM's generators are run by hand, from one
step to the next: what a step brings is complete when they ask for another. vLLM has no such option; the places below were
read in 0.26.0.
"""

import asyncio
import contextlib
import copy
import json
from collections.abc import AsyncIterator, Callable, Generator
from functools import partial
from http import HTTPStatus
from itertools import islice
from types import SimpleNamespace, coroutine
from typing import Any

from serving.engine.protocol import (
    CONTINUED,
    CONTINUED_FINISH,
    CONTINUED_STEPS,
    CONTINUED_STOP,
    TELLS_TOKENS,
    includes_logprobs,
    tokens_event,
)
from serving.engine.resume import continued_ids, replayed

_END = object()
_HUNGRY = object()  # a generator awaits the next item
_STEPS_AT_ONCE = 16  # of another engine's, between two looks at other requests
_STOPPED = '"stop_reason":"end_turn"'


def install(state: Any) -> None:
    """Teach this to an app that vLLM built; `state` is its app.state."""
    if messages := getattr(state, "anthropic_serving_messages", None):
        messages.engine_client = Replaying(messages.engine_client, messages)
        messages.create_chat_completion = _as_asked(messages.create_chat_completion, messages)
        messages.chat_completion_stream_generator = _Chat.maker(messages.chat_completion_stream_generator)
        messages.message_stream_converter = _converting(messages.message_stream_converter)
        messages.messages_full_converter = _naming_stops(messages.messages_full_converter)
    responses = getattr(state, "openai_serving_responses", None)
    if responses and not responses.use_harmony:  # whose context is another, and its encoding
        responses.engine_client = Replaying(responses.engine_client, responses)
        responses.create_responses = _if_sane(responses.create_responses, responses)
        responses.responses_stream_generator = _responding(responses.responses_stream_generator)


class Replaying:
    """An engine's client whose answers begin with what another engine gave, in pieces as a parser reads them."""

    def __init__(self, engine: Any, serving: Any) -> None:
        self._engine = engine
        self._serving = serving

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(
        self, engine_input: Any, sampling_params: Any, request_id: str, *arguments: Any, **options: Any
    ) -> Any:
        ids = continued_ids(sampling_params.extra_args)
        if not ids:
            return self._engine.generate(engine_input, sampling_params, request_id, *arguments, **options)
        prompt = list(engine_input["prompt_token_ids"])
        if finish := sampling_params.extra_args.get(CONTINUED_FINISH):
            return self._again(request_id, prompt, ids, sampling_params, finish)
        rest = copy.copy(sampling_params)
        rest.max_tokens = max(1, sampling_params.max_tokens - len(ids))
        rest.min_tokens = max(0, sampling_params.min_tokens - len(ids))
        longer = {**engine_input, "prompt_token_ids": [*prompt, *ids]}
        outputs = self._engine.generate(longer, rest, request_id, *arguments, **options)
        return self._behind(outputs, self._again(request_id, prompt, ids, sampling_params), prompt)

    async def _behind(
        self, outputs: AsyncIterator[Any], before: AsyncIterator[Any], prompt: list[int]
    ) -> AsyncIterator[Any]:
        """The rest of an answer behind its beginning, which waits for it: only the rest says what was cached."""
        cached = None
        async for output in outputs:
            output.prompt_token_ids = prompt
            if output.num_cached_tokens is not None:
                cached = output.num_cached_tokens = min(output.num_cached_tokens, len(prompt))
            async for earlier in before:
                earlier.num_cached_tokens = cached
                yield earlier
            yield output

    async def _again(
        self, request_id: str, prompt: list[int], ids: list[int], params: Any, finish: str | None = None
    ) -> AsyncIterator[Any]:
        """What vLLM's engine gave out for these tokens; `finish`: why it ended the answer with the last of them."""
        from vllm.outputs import CompletionOutput, RequestOutput  # noqa: PLC0415  only a process that serves loads vLLM

        parsers = getattr(self._serving, "parser_cls", None) or getattr(self._serving, "parser", None)
        given = (params.extra_args or {}).get(CONTINUED_STEPS)
        sizes = (given or [1] * len(ids)) if parsers else [len(ids)]
        stop_reason = (params.extra_args or {}).get(CONTINUED_STOP)
        texts = self._texts(prompt, ids, params, finish, stop_reason)
        left = iter(ids)
        for number, size in enumerate(sizes, 1):
            if number % _STEPS_AT_ONCE == 0:
                await asyncio.sleep(0)
            piece = list(islice(left, size))
            over = finish is not None and number == len(sizes)
            output = CompletionOutput(
                index=0,
                text="".join(next(texts) for _ in piece),
                token_ids=piece,
                cumulative_logprob=None,
                logprobs=None,
                finish_reason=finish if over else None,
                stop_reason=stop_reason if over else None,
            )
            yield RequestOutput(
                request_id=request_id,
                prompt=None,
                prompt_token_ids=prompt,
                prompt_logprobs=None,
                outputs=[output],
                finished=over,
            )

    def _texts(
        self, prompt: list[int], ids: list[int], params: Any, finish: str | None, stop_reason: Any
    ) -> Generator[str]:
        """The text that each token added."""
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer  # noqa: PLC0415

        params = copy.copy(params)
        params.extra_args = None
        made = SimpleNamespace(
            request_id="", prompt_token_ids=prompt, prompt_embeds=None, sampling_params=params
        )
        detokenizer = IncrementalDetokenizer.from_new_request(self._serving.renderer.get_tokenizer(), made)
        if finish is None:
            yield from replayed(detokenizer, ids)
            return
        least = detokenizer.min_tokens
        detokenizer.min_tokens = len(ids)  # before the last token no stop string ended the answer
        for token in ids[:-1]:
            detokenizer.update([token], stop_terminated=False)
            yield detokenizer.get_next_output_text(finished=False, delta=True)
        detokenizer.min_tokens = least
        by_token = finish == "stop" and not isinstance(stop_reason, str)
        detokenizer.update(ids[-1:], stop_terminated=by_token)
        yield detokenizer.get_next_output_text(finished=True, delta=True)


def _as_asked(create: Any, serving: Any) -> Any:
    """vLLM's own chat for a message; what of the message's body only our engines know goes with it."""

    async def creating(chat: Any, raw_request: Any = None) -> Any:
        fields = await raw_request.json() if raw_request is not None else {}  # parsed already, and kept
        extra = fields.get("vllm_xargs")
        chat.vllm_xargs = extra if isinstance(extra, dict) and CONTINUED in extra else None
        setattr(chat, TELLS_TOKENS, bool(fields.get(TELLS_TOKENS)))
        if refusal := _refusal(serving, chat):
            return refusal
        return await create(chat, raw_request)

    return creating


def _if_sane(create: Any, serving: Any) -> Any:
    async def creating(request: Any, raw_request: Any = None) -> Any:
        return _refusal(serving, request) or await create(request, raw_request)

    return creating


def _refusal(serving: Any, request: Any) -> Any:
    """An error where no answer can go on from what the request says that another engine gave; None for all others."""
    ids = continued_ids(request.vllm_xargs)
    if not ids:
        return None
    known = serving.model_config.get_vocab_size()
    if not all(type(token) is int and 0 <= token < known for token in ids):
        problem = "are ids of the model's tokens"
    elif sum(request.vllm_xargs.get(CONTINUED_STEPS) or [len(ids)]) != len(ids):
        problem = "are as many as their steps have"
    elif not request.stream or includes_logprobs(getattr(request, "include", None)):
        problem = "goes with a stream, and without logprobs"
    else:
        return None
    return serving.create_error_response(
        f"{CONTINUED} {problem}.", status_code=HTTPStatus.BAD_REQUEST, param="vllm_xargs"
    )


class _Chat:
    """A message's chat before it streams: what its converter needs to run it step by step."""

    def __init__(
        self, generate: Any, request: Any, outputs: Any, more: tuple[Any, ...], options: Any
    ) -> None:
        self.request = request
        self.outputs = outputs
        self._generate = generate
        self._more = more
        self._options = options

    @classmethod
    def maker(cls, generate: Any) -> Any:
        def making(request: Any, outputs: Any, *more: Any, **options: Any) -> "_Chat":
            return cls(generate, request, outputs, more, options)

        return making

    def events(self, outputs: Any) -> Any:
        return self._generate(self.request, outputs, *self._more, **self._options)


def _converting(convert: Any) -> Any:
    async def converting(chat: _Chat) -> AsyncIterator[str]:
        tells = getattr(chat.request, TELLS_TOKENS, False)
        story = _Story(len(continued_ids(chat.request.vllm_xargs)))
        steps = _Steps(lambda outputs: convert(chat.events(outputs)))
        head = tokens_event() if tells else ""
        async for events in _stepped(steps, chat.outputs, story, lambda output: output):
            shown = "".join(events)
            if story.stop and _STOPPED in shown:
                shown = _with_stop(shown, story.stop)
            if tells:
                shown = head + shown + story.event()
                head = ""
            if shown:
                yield shown

    return converting


def _with_stop(events: str, stop: str) -> str:
    """A message's last events, with the stop sequence that ended it; vLLM says of each that the turn has ended."""
    named = f'"stop_reason":"stop_sequence","stop_sequence":{json.dumps(stop, ensure_ascii=False)}'
    return events.replace(_STOPPED, named, 1)


def _naming_stops(convert: Any) -> Any:
    def converting(chat: Any) -> Any:
        message = convert(chat)
        stop = chat.choices[0].stop_reason
        if isinstance(stop, str) and message.stop_reason == "end_turn":
            message.stop_reason, message.stop_sequence = "stop_sequence", stop
        return message

    return converting


def _responding(respond: Any) -> Any:
    async def responding(
        request: Any, params: Any, contexts: Any, context: Any, *more: Any, **options: Any
    ) -> AsyncIterator[Any]:
        if not (request.model_extra or {}).get(TELLS_TOKENS):
            async for event in respond(request, params, contexts, context, *more, **options):
                yield event
            return
        story = _Story(len(continued_ids(request.vllm_xargs)))
        steps = _Steps(lambda fed: respond(request, params, fed, context, *more, **options))
        head = tokens_event()
        async for events in _stepped(steps, contexts, story, lambda each: each.last_output):
            yield _Step(head, events, story.event())
            head = ""

    return responding


class _Step:
    """The events of a step in the place of one: vLLM's server writes `event: `, its type, `data: ` and its JSON."""

    def __init__(self, head: str, events: list[Any], end: str) -> None:
        texts = [f"event: {event.type}\ndata: {event.model_dump_json(by_alias=True)}\n\n" for event in events]
        whole = "".join([head, *texts, end]).removeprefix("event: ").removesuffix("\n\n")
        self.type, _, self._data = whole.partition("\ndata: ")

    def model_dump_json(self, **_: Any) -> str:
        return self._data


class _Story:
    """What of an answer its client has: tokens of another engine first, which are not shown again."""

    def __init__(self, had: int) -> None:
        self.stop = ""
        self.had = had  # of these tokens, those that are still to be read again
        self._began = False
        self._facts: dict[str, Any] = {}
        self._ids: list[int] = []

    def read(self, output: Any) -> bool:
        """A step's output has come; whether the client is to have what it brings."""
        if output is None or not output.outputs:
            return not self.had
        self._began = True
        part = output.outputs[0]
        if isinstance(part.stop_reason, str):
            self.stop = part.stop_reason
        if self.had:
            self.had -= len(part.token_ids)
            return False
        if part.finish_reason is not None:
            self._facts |= {"finish_reason": part.finish_reason, "stop_reason": part.stop_reason}
        self._facts["prompt_tokens"] = len(output.prompt_token_ids or ())
        self._ids += part.token_ids
        return True

    def event(self) -> str:
        """The event of the tokens since the last one; none before an output, where the step is not over."""
        if not self._began:
            return ""
        event = tokens_event(self._ids, **self._facts)
        self._ids, self._facts = [], {}
        return event


async def _stepped(
    steps: "_Steps", source: AsyncIterator[Any], story: _Story, output_of: Callable[[Any], Any]
) -> AsyncIterator[list[Any]]:
    """What each item of `source` brings, where the client is to have it; the source's end brings the last."""
    events = await steps.feed(None)
    if events and not story.had:
        yield events
    try:
        while not steps.over:
            try:
                item = await anext(source)
            except StopAsyncIteration:
                item = _END
            except Exception as error:  # noqa: BLE001  vLLM's generator gets it where it reads its source
                item = error
            shown = item is _END or isinstance(item, Exception) or story.read(output_of(item))
            events = await steps.feed(item)
            if shown:
                yield events
    finally:
        steps.close()


class _Steps:
    """A generator of vLLM's that reads another one, run by hand: what an item brings is whole when it asks for the next."""

    def __init__(self, make: Callable[[AsyncIterator[Any]], Any]) -> None:
        self.over = False
        self._item: Any = None
        self._made = make(self._items())
        self._next: Any = None

    async def feed(self, item: Any) -> list[Any]:
        """What comes of an item: `_END` ends the source, an error is raised there. The first brings what comes without any."""
        self._item = item
        events: list[Any] = []
        while True:
            if self._next is None:
                self._next = self._made.__anext__()
            try:
                event = await _advanced(self._next)
            except StopAsyncIteration:
                self.over = True
                return events
            except BaseException:
                self.over = True
                raise
            if event is _HUNGRY:
                return events
            events.append(event)
            self._next = None

    def close(self) -> None:
        """Have the generator end where it stands. Left alone it could not be closed: its next event is under way."""
        if self._next is not None and not self.over:
            self.over = True
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration, StopIteration):
                self._next.throw(asyncio.CancelledError())

    async def _items(self) -> AsyncIterator[Any]:
        while True:
            await _NextItem()
            if isinstance(self._item, Exception):
                raise self._item
            if self._item is _END:
                return
            yield self._item


class _NextItem:
    """What a generator awaits that needs the next item."""

    def __await__(self) -> Generator[Any]:
        yield _HUNGRY


@coroutine
def _advanced(step: Any) -> Generator[Any, Any, Any]:
    """What an asynchronous generator yields next, or `_HUNGRY`. What else it awaits is the event loop's."""
    go_on: Callable[[], Any] = partial(step.send, None)
    while True:
        try:
            awaited = go_on()
        except StopIteration as event:
            return event.value
        if awaited is _HUNGRY:
            return _HUNGRY
        try:
            yield awaited
        except BaseException as error:  # noqa: BLE001  it is the generator's
            go_on = partial(step.throw, error)
        else:
            go_on = partial(step.send, None)
