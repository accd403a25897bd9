"""What a request makes an engine do, read from its fields: one function a route. Pure.

Every route that a client reaches has one (`serving.router.http.routes`), so that no path of vLLM's passes work by admission.
Each function is sane whatever types the fields have: the engine refuses a wrong one.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from pydantic_core import to_json

Fields = Mapping[str, Any]

# vLLM's max_tokens of a completion that names none.
_COMPLETION_TOKENS = 16
# The fields that bound a chat's answer. Those that bound other routes' answers vLLM passes over, and so must whoever counts.
_OF_CHAT = ("max_completion_tokens", "max_tokens")
# The key under which `texts` has the data of an Anthropic picture.
IMAGE = "image source"
# Fields of which one text goes with each text of another.
_PAIRED = ("query", "queries", "documents", "items", "text_1", "text_2", "data_1", "data_2")
_ARGUMENTS = "arguments"  # of a tool call: its template writes all of it into the prompt
# The largest number that is counted with: sums of it stay exact.
_MOST_TOKENS = 1 << 30
# vLLM cuts audio into pieces of 30 s and decodes each by itself; this is 30 s of speech at 32 kbit/s. It takes no more than ten
# minutes (VLLM_MAX_AUDIO_DECODE_DURATION_S).
_AUDIO_BYTES = 120 << 10
_MOST_PIECES = 20


class Work(NamedTuple):
    """What a request asks of an engine.

    `prompts` are read and each is answered `answers` times, with at most `output_tokens` a time; None: with as many as the
    context has room for. A request that does not `generate` writes no tokens.
    """

    prompts: int
    answers: int = 1
    output_tokens: int | None = 0
    generates: bool = True

    @property
    def sequences(self) -> int:
        return self.prompts * self.answers


Extractor = Callable[[Fields, int], Work]


def chat(fields: Fields, body_bytes: int) -> Work:  # noqa: ARG001  every extractor takes both
    """One conversation."""
    return _generating(fields, 1, *_OF_CHAT)


def response(fields: Fields, body_bytes: int) -> Work:  # noqa: ARG001
    """One conversation of the Responses API."""
    return _generating(fields, 1, "max_output_tokens")


def message(fields: Fields, body_bytes: int) -> Work:  # noqa: ARG001
    """One conversation of Anthropic's."""
    return _generating(fields, 1, "max_tokens")


def chats(fields: Fields, body_bytes: int) -> Work:  # noqa: ARG001
    """A list of conversations."""
    return _generating(fields, _conversations(fields), *_OF_CHAT)


def completion(fields: Fields, body_bytes: int) -> Work:  # noqa: ARG001
    """Prompts as texts, as token ids or as embeddings."""
    prompts = _items(fields.get("prompt")) + _items(fields.get("prompt_embeds"))
    work = _generating(fields, prompts, "max_tokens")
    if work.output_tokens is not None:
        return work
    return Work(work.prompts, work.answers, _COMPLETION_TOKENS)


def generation(fields: Fields, body_bytes: int) -> Work:  # noqa: ARG001
    """Tokens to tokens, where vLLM's own sampling parameters say how many. Without a number vLLM 0.26 writes to the context's end."""
    sampling = fields.get("sampling_params")
    sampling = sampling if isinstance(sampling, Mapping) else {}
    return Work(1, _answers(sampling), _asked(sampling, "max_tokens"))


def reading(*names: str) -> Extractor:
    """Prompts in any of these fields, or conversations, that are read and not answered."""

    def extract(fields: Fields, body_bytes: int) -> Work:  # noqa: ARG001
        prompts = sum(_items(fields.get(name)) for name in names)
        return Work(max(1, prompts, _conversations(fields)), generates=False)

    return extract


def scoring(fields: Fields, body_bytes: int) -> Work:  # noqa: ARG001
    """Items by the next token of a prompt: one token each."""
    return Work(max(1, _items(fields.get("items"))), output_tokens=1)


def rendering(fields: Fields, body_bytes: int) -> Work:  # noqa: ARG001
    """Texts or tokens that only the engine's tokenizer sees."""
    names = ("prompt", "prompt_embeds", "generate_responses")
    return Work(max(1, sum(_items(fields.get(name)) for name in names)), generates=False)


def speech(fields: Fields, body_bytes: int) -> Work:
    """A file of audio, by its size: a form's fields say nothing of its length."""
    pieces = min(_MOST_PIECES, max(1, -(-body_bytes // _AUDIO_BYTES)))
    return Work(pieces, _answers(fields), _asked(fields, "max_completion_tokens"))


def anything(fields: Fields, body_bytes: int) -> Work:
    """The most that any of the JSON routes would make of these fields. vLLM writes before it reads, where it may do either."""
    writes = [
        extract(fields, body_bytes)
        for name, extract in (
            ("messages", chats),
            ("prompt", completion),
            ("prompt_embeds", completion),
            ("items", scoring),
        )
        if name in fields
    ]
    reads = [
        extract(fields, body_bytes)
        for extract in (
            reading("input", "texts", "images", "inputs", "data"),
            reading("text_1", "text_2"),
            reading("data_1", "data_2"),
            reading("queries", "query", "documents", "items"),
        )
    ]
    prompts = max(work.sequences for work in (*writes, *reads))
    if not writes:
        return Work(prompts, generates=False)
    bounds = [work.output_tokens for work in writes if work.output_tokens is not None]
    return Work(prompts, output_tokens=max(bounds) if len(bounds) == len(writes) else None)


def repeated_bytes(fields: Fields) -> int:
    """Bytes of what is read again with each prompt: a query stands before every document."""
    return sum(len(to_json(fields[name])) for name in _PAIRED if name in fields and _items(fields[name]) == 1)


def texts(fields: Fields) -> Iterator[tuple[Mapping[str, Any], str, str]]:
    """Every text in a request's fields at any depth, with the object it stands in and its key there.

    A text in a list has the key of the list, the URL within an `image_url` that name. Within the `source` of an Anthropic picture,
    of which vLLM takes `data` whatever type it says it has, the data's key is IMAGE.
    """
    todo: list[tuple[Mapping[str, Any], str, Any]] = [(fields, name, value) for name, value in fields.items()]
    while todo:
        holder, name, value = todo.pop()
        if isinstance(value, str):
            yield holder, name, value
        elif isinstance(value, dict):
            if name == _ARGUMENTS:  # text, whatever it is called there
                todo.extend((value, name, item) for item in value.values())
                continue
            url, data = (name if name.endswith("_url") else "url"), (IMAGE if name == IMAGE else "data")
            source = IMAGE if value.get("type") == "image" else "source"
            names = {"url": url, "data": data, "source": source}
            todo.extend(
                (value, names[inner] if inner in names else inner, item)  # noqa: SIM401  mypy
                for inner, item in value.items()
            )
        elif isinstance(value, list) and not (value and isinstance(value[0], int | float)):  # token ids
            todo.extend((holder, name, item) for item in value)


def _generating(fields: Fields, prompts: int, *bounds: str) -> Work:
    return Work(max(1, prompts), _answers(fields), _asked(fields, *bounds))


def _answers(fields: Fields) -> int:
    return max(1, _asked(fields, "n", "best_of") or 1)


def _asked(fields: Fields, *names: str) -> int | None:
    """The most output tokens that these fields ask for; None where none of them does."""
    counts = [min(fields[name], _MOST_TOKENS) for name in names if name in fields and _is_count(fields[name])]
    return max(counts, default=None)


def _items(value: Any) -> int:
    """The prompts in a field: a text is one, a list of numbers is one, any other list has one an item.

    vLLM scores each part of an object's `content` by itself.
    """
    if isinstance(value, Mapping) and isinstance(value.get("content"), list):
        value = value["content"]
    if isinstance(value, list):
        return 1 if value and isinstance(value[0], int | float) else len(value)
    return 0 if value is None else 1


def _conversations(fields: Fields) -> int:
    """The conversations of `messages` or `input`: lists of messages in a list are several."""
    conversations = 1
    for name in ("messages", "input"):
        value = fields.get(name)
        if isinstance(value, list) and value and isinstance(value[0], list):
            conversations = max(conversations, len(value))
    return conversations


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
