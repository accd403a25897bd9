"""Reads a request's body, and refuses it where no engine could answer it.

The router checks only what would cost an engine, or make it reach into the network. vLLM knows what fields mean and which
ones exist; it ignores unknown fields, as OpenAI's clients of any age rely on, and so does the router. A key that stands twice
in one object is refused: router and engine must not read two requests in one body.
"""

import math
import re
from collections.abc import AsyncGenerator, Collection, Coroutine, Iterator, Mapping
from typing import Any, NamedTuple, Self, TypeVar
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException, MultiPartParser

from serving import bounded_json
from serving.asgi import check_form
from serving.bounded_json import SMALL_BYTES
from serving.config import RouterSpec
from serving.engine.protocol import MOST_PIXELS, sampling_holders
from serving.errors import BadRequestError
from serving.planning import Plan
from serving.router.http import grammars, steering
from serving.router.http.images import pixels
from serving.router.http.routes import Route
from serving.router.http.work import IMAGE, Work, repeated_bytes, texts

T = TypeVar("T")

# No tokenizer we serve has a longer token (Llama 3: 128 spaces), so that a longer text can't fit whatever it says.
_LONGEST_TOKEN_CHARS = 128
# vLLM compares every stop text with every new piece of every answer.
_MOST_STOPS = 64
_LONGEST_STOP_CHARS = 1024
_MOST_BIASES = 1024
_MOST_TOOLS = 512
# An engine tries each against every type that it may have: 65,000 items of `/v1/responses` stand its HTTP process still for 4 s.
_MOST_MESSAGES = 8192
# Parts of all of them, the entries of their lists: 60,000 of a chat, or of one function's output, take half a second and more, also
# those of a request that is refused then.
_MOST_PARTS = 8192
# Names of a message, of which an engine copies all for each type that it may have: 200,000 take 3 s. No API has more than 20.
_MOST_NAMES = 64
# Fields with messages, or with their parts.
_TALKS = ("messages", "input", "system", "previous_input_messages")
# Parts of a form: the head of each takes a millisecond and more to read, here and in an engine.
_MOST_FILES, _MOST_FIELDS = 4, 64
_WHOLE_NUMBERS = (
    "n",
    "best_of",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "min_tokens",
)
_SWITCHES = ("stream", "store")
# Prompts of one request times the answers to each, where none of them writes.
_MOST_SEQUENCES = 4096
# vLLM's `bytes` describe each result with 120 bytes of one header, and HAProxy passes on heads of 16 KiB.
_MOST_BYTES_RESULTS = 100
# What stands under these names are recordings; any other URL is a picture's.
_RECORDINGS = ("audio_url", "video_url", "file_url")
# About right for English text in JSON; the tokens that a request used correct it afterwards.
BYTES_PER_TOKEN = 4
# Fields with text for a chat template or tokenizer, and with media.
_CONTENT = (
    "messages",
    "input",
    "inputs",
    "images",
    "data",
    "items",
    "prompt",
    "queries",
    "query",
    "documents",
    "data_1",
    "data_2",
    "text_1",
    "text_2",
)
_NAMES_OF_TEXTS = frozenset((*_CONTENT, "content", "text", "arguments"))
# Fields of which most requests have none; each has a check.
_STOPS = ("stop", "stop_token_ids", "stop_sequences", "bad_words")
_CHECKED = frozenset(
    (
        "n",
        "best_of",
        *_STOPS,
        "logit_bias",
        "tools",
        *grammars.FIELDS,
        "repetition_detection",
    )
)
_TOKEN_IDS = ("prompt", "input", "tokens", "token_ids", "prompt_token_ids", "query", "items")
# The ends of names under which media stand (_is_url, _is_media), as they are in a body.
_MEDIA_NAMES = (b'url"', b'images"', b'data"', b'prompt_embeds"')
_ESCAPED_LETTER = b"\\u"
# vLLM compares an answer's last tokens for every token of it: sizes of patterns, and how often each stands there.
_MOST_REPETITION = {"max_pattern_size": 64, "min_pattern_size": 64, "min_count": 16}


def is_form(headers: Headers, route: Route) -> bool:
    """Whether a body is a form and no JSON; raises BadRequestError where the route takes none."""
    if not headers.get("content-type", "").lower().startswith("multipart/"):
        return False
    if not route.form:
        raise BadRequestError(
            f"{route.path} takes a JSON body, not a form; send Content-Type: application/json."
        )
    return True


def check_encoding(headers: Headers) -> None:
    """Raises BadRequestError where a body is packed: neither router nor engine unpacks any."""
    encoding = headers.get("content-encoding")
    if encoding and encoding.lower() != "identity":
        raise BadRequestError(
            f"The body has Content-Encoding {_short(encoding)}; the only one taken is identity: send the body as it is."
        )


def parse(body: bytes) -> dict[str, Any]:
    """The fields of a JSON body, of a bounded number of values; raises BadRequestError."""
    if not body:
        raise BadRequestError("The request has no body; a JSON object is needed.")
    fields = bounded_json.read(body)
    _check_types(fields)
    if isinstance(sampling := fields.get("sampling_params"), dict):
        _check_types(sampling)
    return fields


def _check_types(fields: dict[str, Any]) -> None:
    """Check the fields that the router counts with. vLLM would take "16" for 16, past every limit here."""
    for name in _WHOLE_NUMBERS:
        value = fields.get(name)
        if value is None:
            continue
        if isinstance(value, float) and value.is_integer():
            fields[name] = int(value)  # JSON takes 16.0 for an integer
        elif isinstance(value, bool) or not isinstance(value, int):
            raise BadRequestError(f"{name} is {_kind(value)}; send a whole number.")
    for name in _SWITCHES:
        if not isinstance(value := fields.get(name), bool | None):
            raise BadRequestError(f"{name} is {_kind(value)}; send true or false.")
    if any(
        isinstance(value, float) and not math.isfinite(value) for value in fields.values()
    ):  # 1e999 is JSON
        raise BadRequestError("The request has a number that no computer keeps; send a smaller one.")


def form(headers: Headers, body: bytes) -> dict[str, Any]:
    """The fields of a form that are no files; raises BadRequestError."""

    async def once() -> AsyncGenerator[bytes, None]:
        yield body
        yield b""

    check_form(headers["content-type"])
    parser = MultiPartParser(headers, once(), max_files=_MOST_FILES, max_fields=_MOST_FIELDS)
    parser.spool_max_size = len(body)  # a recording goes to no disk, and nothing waits for one
    try:
        parts = _at_once(parser.parse())
    except (MultiPartException, KeyError) as error:
        raise BadRequestError(f"The request body is not a form: {error}") from None
    fields: dict[str, Any] = {name: value for name, value in parts.multi_items() if isinstance(value, str)}
    _at_once(parts.close())
    for name in _WHOLE_NUMBERS:
        if name in fields:
            if not re.fullmatch(r"\d{1,9}", fields[name]):
                raise BadRequestError(f"{name} is {_short(fields[name])}; send a whole number.")
            fields[name] = int(fields[name])
    return fields


def _at_once(work: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as done:
        returned: T = done.value
        return returned
    raise AssertionError("it waits")


class Checked(NamedTuple):
    """What a request makes an engine do, about the tokens of its prompts, and how many they are at most."""

    work: Work
    prompt_tokens: float
    most_prompt_tokens: float


def check(route: Route, fields: Mapping[str, Any], body: bytes, plan: Plan, spec: RouterSpec) -> Checked:
    """Raises BadRequestError, with value and limit, where no engine should see the request."""
    work = route.work(fields, len(body))
    steering.refuse(fields)
    for holder in sampling_holders(fields):
        if _CHECKED.isdisjoint(holder):
            continue
        _check_answers(holder, spec.max_n)
        for name in _STOPS:
            _check_stops(name, holder.get(name))
        _check_entries(holder, "logit_bias", _MOST_BIASES)
        _check_entries(holder, "tools", _MOST_TOOLS)
        grammars.check(holder)
        if route.opens and isinstance(holder.get("tool_choice"), Mapping):
            _check_functions(holder.get("tools"))
        _check_repetition(holder.get("repetition_detection"))
    # What an engine can't run at once would wait in the engine, where no key has a share.
    most = max(plan.most_sequences, spec.max_n) if work.generates else _MOST_SEQUENCES
    if work.sequences > most:
        raise BadRequestError(
            f"The request makes {work.sequences} sequences, prompts times n; send at most {most} at a time."
        )
    if fields.get("encoding_format") == "bytes" and work.sequences > _MOST_BYTES_RESULTS:
        raise BadRequestError(
            f"encoding_format bytes describes each of the {work.sequences} results in one header; send at most "
            f"{_MOST_BYTES_RESULTS} inputs at a time, or ask for base64."
        )
    for name in _TALKS:
        _check_messages(name, fields.get(name))
    _check_token_ids(fields, plan.fit.max_model_len)
    media_chars, has_media = _check_texts(fields, body, work.prompts, plan)
    if body.lstrip().startswith(b"{"):
        text_bytes, most_bytes = len(body) - media_chars, plan.fit.max_model_len * _LONGEST_TOKEN_CHARS
        if work.generates and text_bytes > most_bytes * max(1, work.prompts):
            # Also names and numbers: those in a tool call's arguments are part of the prompt.
            raise BadRequestError(
                f"The request has {text_bytes} bytes beside media; no prompt of that length fits the context of "
                f"{plan.fit.max_model_len} tokens."
            )
        most_read = _most_read(fields, work, math.inf if has_media else text_bytes, plan)
        return Checked(work, text_bytes / BYTES_PER_TOKEN, most_read)
    text_chars = sum(len(value) for value in fields.values() if isinstance(value, str))
    return Checked(work, text_chars / BYTES_PER_TOKEN, _most_read(fields, work, math.inf, plan))


def _most_read(fields: Mapping[str, Any], work: Work, text_bytes: float, plan: Plan) -> float:
    """No tokenizer makes more tokens of a text than it has bytes; of a picture or a recording an engine makes thousands."""
    most = plan.fit.max_model_len * max(1, work.prompts)
    return min(most, text_bytes + repeated_bytes(fields) * work.prompts)


class Estimate(NamedTuple):
    """What a request may use: its work, about the tokens of its prompts, of each answer, and about all of its tokens.

    `most_output_tokens` and `most_tokens` are what each answer, and all of it, comes to at most.
    """

    work: Work
    prompt_tokens: float
    output_tokens: float
    tokens: float
    most_output_tokens: float
    most_tokens: float

    @classmethod
    def of(cls, checked: Checked, left_out_tokens: float, longest: int) -> Self:
        """`left_out_tokens`: of one answer to which the request sets no bound; `longest`: the context."""
        work, prompt, most_prompt = checked
        output, most_output = left_out_tokens, float(longest)
        if work.output_tokens is not None:
            output, most_output = work.output_tokens, min(most_output, work.output_tokens)
        most = min(most_prompt + most_output * work.sequences, longest * work.sequences)
        return cls(work, prompt, output, prompt + output * work.sequences, most_output, most)


def _check_answers(fields: Mapping[str, Any], most: int) -> None:
    for name in ("n", "best_of"):
        if isinstance(asked := fields.get(name), int) and asked > most:
            raise BadRequestError(f"{name} is {_short(asked)}; at most {most} answers to a prompt are given.")


def _check_stops(name: str, stops: Any) -> None:
    entries = stops if isinstance(stops, list) else [stops]
    if len(entries) > _MOST_STOPS:
        raise BadRequestError(f"{name} has {len(entries)} entries; send at most {_MOST_STOPS}.")
    if name == "bad_words" and any(isinstance(text, str) and not text.strip() for text in entries):
        raise BadRequestError(
            "bad_words has a word of blanks alone, of which an engine makes no token; leave it out."
        )
    longest = max((len(text) for text in entries if isinstance(text, str)), default=0)
    if longest > _LONGEST_STOP_CHARS:
        raise BadRequestError(
            f"{name} has a text of {longest} characters; send at most {_LONGEST_STOP_CHARS}."
        )


def _check_repetition(detection: Any) -> None:
    """Refuse to look for long patterns: an engine does that for every token, in the step of all its requests."""
    if not isinstance(detection, Mapping):
        return
    for name, most in _MOST_REPETITION.items():
        value = detection.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value > most):
            raise BadRequestError(
                f"repetition_detection.{name} is {_kind(value)}; send a whole number of at most {most}."
            )


def _check_entries(fields: Mapping[str, Any], name: str, most: int) -> None:
    value = fields.get(name)
    if isinstance(value, Mapping | list) and len(value) > most:
        raise BadRequestError(f"{name} has {len(value)} entries; send at most {most}.")


def _check_functions(tools: Any) -> None:
    """Refuse tools that are no functions beside one that a chat has to call: vLLM fails on them."""
    for number, tool in enumerate(tools if isinstance(tools, list) else ()):
        if isinstance(tool, Mapping) and not isinstance(tool.get("function"), Mapping):
            raise BadRequestError(
                f'tools[{number}] has no function; send {{"type": "function", "function": {{"name": ...}}}}.'
            )


def _check_messages(name: str, value: Any) -> None:
    """`value`: messages, or conversations of them, or anything else that stands there."""
    if not isinstance(value, list):
        return
    messages = [
        message
        for entry in value
        for message in (entry if isinstance(entry, list) else (entry,))
        if isinstance(message, dict)
    ]
    parts = [part for message in messages for part in _parts(message)]
    objects = [part for part in parts if isinstance(part, dict)]
    count = len(parts) + sum(len(_parts(part)) for part in objects)  # of a tool's result
    widest = max((len(item) for item in (*messages, *objects)), default=0)
    for what, number, most in (
        ("entries", len(messages), _MOST_MESSAGES),
        ("parts", count, _MOST_PARTS),
        ("names in one of its messages", widest, _MOST_NAMES),
    ):
        if number > most:
            raise BadRequestError(f"{name} has {number} {what}; send at most {most}.")


def _parts(message: Mapping[str, Any]) -> list[Any]:
    """The entries of its lists: content, calls of tools, what a function gave."""
    return [entry for value in message.values() if isinstance(value, list) for entry in value]


def _check_token_ids(fields: Mapping[str, Any], max_model_len: int) -> None:
    """Refuse what is no token, in lists of them. Of embeddings vLLM looks at the largest alone, and takes "-5" for -5.

    tpu-inference keeps tokens of a batch in 32 bits: `{"input": [-1099511627776]}` ended an engine.
    """
    for name in _TOKEN_IDS:
        for ids in _lists_of_ids(fields.get(name)):
            if set(map(type, ids)) != {int} or min(ids) < 0:
                raise BadRequestError(f"{name} has a token that is no whole number from 0 on.")
            if len(ids) > max_model_len:
                raise BadRequestError(
                    f"{name} has {len(ids)} tokens; the context of this model is {max_model_len}."
                )


def _lists_of_ids(value: Any) -> Iterator[list[Any]]:
    if isinstance(value, list) and value:
        if isinstance(value[0], int | float):
            yield value
        else:  # texts, messages, or several lists
            yield from (
                item for item in value if isinstance(item, list) and item and not isinstance(item[0], dict)
            )


def _check_texts(fields: Mapping[str, Any], body: bytes, prompts: int, plan: Plan) -> tuple[int, bool]:
    """Look at every text once: refuse those too long for any tokenizer, media from elsewhere and pictures of too many pixels.

    Returns the characters of media, as a picture becomes some hundred tokens at any size, and whether there are any media. Most
    bodies have no text to look at.
    """
    longest_chars = plan.fit.max_model_len * _LONGEST_TOKEN_CHARS
    long = len(body) > longest_chars  # a body has a byte or more for each character of its texts
    if not long and not _may_have_media(body):
        return 0, False
    content = _content(fields)
    has_media = False
    whole_chars = media_chars = total = 0
    for at, part in enumerate(
        (content, {name: fields[name] for name in fields if name not in content} if long else {})
    ):
        for holder, name, text in texts(part):
            is_media = _is_media(holder, name, text)
            if at == 0:
                total += _checked_pixels(name, text, plan)
                has_media = has_media or is_media or _is_url(name)
            if is_media:
                media_chars += len(text) if at == 0 else 0
                continue
            whole_chars += len(text)
            if long and (len(text) > longest_chars or whole_chars > longest_chars * max(1, prompts)):
                told = (
                    name if name in _NAMES_OF_TEXTS else "A text of the request"
                )  # a client's own name is its own
                raise BadRequestError(
                    f"{told} has {len(text)} characters, and all texts up to it {whole_chars}; no text of that length "
                    f"fits the context of {plan.fit.max_model_len} tokens."
                )
    if total > MOST_PIXELS:
        raise BadRequestError(
            f"The images have {total} pixels together; send at most {MOST_PIXELS}. One whose size the router can't read counts as all."
        )
    return media_chars, has_media


def _checked_pixels(name: str, text: str, plan: Plan) -> int:
    """The pixels of a text that is a picture; raises BadRequestError where it is a URL that no engine should fetch."""
    is_url = _is_url(name)
    if is_url or (name == "data" and _reaches_out(text)):
        local = bool(plan.engine.get("allowed_local_media_path"))
        _check_url(text, plan.engine.get("allowed_media_domains") or (), local=local)
    return _pixels(name, text) if name == IMAGE or (is_url and text.lstrip()[:5].lower() == "data:") else 0


def _may_have_media(body: bytes) -> bool:
    """Whether a body may name media. Exact where it is false: a name stands in a body as it is, or with an escape.

    A long body is not searched: it has few values for its length, or is bounded by the number of its values.
    """
    return len(body) >= SMALL_BYTES or _ESCAPED_LETTER in body or any(name in body for name in _MEDIA_NAMES)


def _content(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: fields[name] for name in _CONTENT if isinstance(fields.get(name), list | dict)}


def _is_url(name: str) -> bool:
    return name in ("url", "images") or name.endswith("_url")


def _is_media(holder: Mapping[str, Any], name: str, text: str) -> bool:
    return (
        name == IMAGE
        or (text.startswith("data:") and _is_url(name))
        or (name in ("data", "prompt_embeds") and (holder.get("type") == "base64" or "format" in holder))
    )


def _reaches_out(text: str) -> bool:
    return text[:16].lstrip().lower().startswith(("http:", "https:", "file:", "ftp:", "gs:", "s3:"))


def _check_url(url: str, allowed: Collection[str], *, local: bool) -> None:
    try:
        parts = urlsplit(url.strip()) if len(url) < SMALL_BYTES else urlsplit(url[:_LONGEST_STOP_CHARS])
        scheme, host = parts.scheme.lower(), parts.hostname
    except ValueError:
        raise BadRequestError(
            "The URL of a picture or recording is not one; send media as data: URLs."
        ) from None
    if scheme == "data" or (scheme == "file" and local) or (scheme in ("http", "https") and host in allowed):
        return
    domains = ", ".join(allowed) or "none"
    raise BadRequestError(
        f"Media of {_short(host or scheme)} is not fetched: send media as a data: URL. Domains this service fetches from: {domains} "
        "(engine.allowed_media_domains)."
    )


def _pixels(name: str, text: str) -> int:
    """The pixels of a picture within the request, the most of one where they are not known. Recordings have none."""
    if name not in _RECORDINGS:
        packed = text if name == IMAGE else text.partition(",")[2]
        return pixels(packed) or MOST_PIXELS
    kind, _, packed = text.partition(",")
    # vLLM reads such a video as pictures in base64 with commas between them.
    frames = packed.split(",") if "video/jpeg" in kind.lower() else ()
    return sum(pixels(frame) or MOST_PIXELS for frame in frames)


def _kind(value: Any) -> str:
    """What a client sent in the place of a number: its own words stay out of errors, which clients log."""
    match value:
        case str() if value.isdecimal():
            return _short(value)
        case str():
            return f"a text of {len(value)} characters"
        case list():
            return "a list"
        case dict():
            return "an object"
    return _short(value)


def _short(value: Any) -> str:
    text = (
        repr(value)
        if not isinstance(value, int) or abs(value) < 1 << 64
        else f"a number of {value.bit_length()} bits"
    )
    return text if len(text) <= 100 else text[:97] + "..."


# What the router looks at after admission, of whichever type it has to be. No other field stays in memory while the answer runs.
_LOOKED_AT: dict[str, type | tuple[type, ...]] = {
    "model": str,
    "stream": bool,
    "n": int,
    "prompt": (str, list),
    "token_ids": list,
    "messages": list,
    "input": (str, list),
    "system": (str, list),
    "instructions": str,
    "tools": list,
    "tool_choice": (str, dict),
    "user": str,
    "prompt_cache_key": str,
    "cache_salt": str,
    "max_tokens": int,
    "max_completion_tokens": int,
    "min_tokens": int,
    "echo": bool,
    "logprobs": (bool, int),
    "prompt_logprobs": int,
    "use_beam_search": bool,
    "modalities": list,
    "stream_options": dict,
    "return_token_ids": bool,
    "include_reasoning": bool,
    "include": list,
    "thinking_token_budget": int,
    "repetition_detection": dict,
    "truncate_prompt_tokens": int,
    "vllm_xargs": dict,
}


def kept(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that the router looks at after admission. Of a grammar, that it is there."""
    slim = {
        name: value
        for name, value in fields.items()
        if (kind := _LOOKED_AT.get(name)) and isinstance(value, kind)
    }
    if fields.get("structured_outputs"):
        slim["structured_outputs"] = True
    form = fields.get("response_format")
    if isinstance(form, dict) and form != {"type": "text"}:
        slim["response_format"] = {"type": form.get("type")}
    for name in ("output_config", "text"):  # Anthropic's, and the Responses API's
        holder = fields.get(name)
        if isinstance(holder, dict) and holder.get("format") not in (None, {"type": "text"}):
            slim[name] = True
    return slim
