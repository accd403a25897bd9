"""Bodies that are meant to hurt: measured before they are parsed, and refused with numbers."""

import base64
import json
import struct
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.patience import ends

from serving.config import ModelSpec, RouterSpec
from serving.errors import BadRequestError
from serving.planning import plan
from serving.router.http import grammars
from serving.router.http.routes import ROUTES
from serving.router.http.validation import Estimate, check, kept, parse

pytestmark = pytest.mark.unit

CHAT = "/v1/chat/completions"
UUID = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
TALK = [{"role": "user", "content": "Hello"}]
# Outlines made 2 GB of a text of this, 25 lists deep.
NESTED = {"properties": {"a": {"type": "array"}}, "patternProperties": {"^b": {"type": "string"}}}


def properties(count: int) -> dict[str, Any]:
    return {f"p{at}": {"type": "integer"} for at in range(count)}


def planned(**engine: Any) -> Any:
    return plan(
        ModelSpec.model_validate(
            {
                "name": "llama",
                "model": "meta-llama/Llama-3.1-8B-Instruct",
                "slice": {"generation": "v6e", "topology": "2x4", "hosts": 1},
                "engine": {"max_num_seqs": 64, "max_model_len": 2048, **engine},
            }
        )
    )


PLAN = planned()


def checked(path: str, plan: Any = PLAN, **fields: Any) -> Any:
    body = json.dumps(fields).encode()
    return check(ROUTES[path], parse(body), body, plan, RouterSpec())


@pytest.mark.parametrize(
    ("body", "says"),
    [
        pytest.param(
            b'{"a":[' + b"[]," * 1_300_000 + b"0]}", "more than 65536 lists and objects", id="wide lists"
        ),
        pytest.param(
            b'{"a":[' + b"{}," * 100_000 + b"0]}", "more than 65536 lists and objects", id="wide objects"
        ),
        pytest.param(b'{"a":[' + b"0," * 1_000_000 + b"0]}", "more than 262144 values", id="wide numbers"),
        pytest.param(b'{"a":[' + b'"",' * 1_000_000 + b'""]}', "more than 65536 texts", id="wide texts"),
        pytest.param(
            b'{"a":[' + b'"\\"",' * 1_000_000 + b'""]}', "more than 65536 texts", id="wide texts of quotes"
        ),
        pytest.param(
            b'{"a":{' + b",".join(b'"%d":0' % at for at in range(50_000)) + b"}}",
            "more than 32768 names in its objects",
            id="names",
        ),
        pytest.param(
            b'{"a":{' + b",".join(b'"%s%d" :0' % (b"x" * 400, at) for at in range(3_000)) + b"}}",
            "more than 1048576 bytes of names",
            id="long names",
        ),
        pytest.param(
            b'{"a":[' + b",".join([b"1" * 18] * 240_000) + b"]}",
            "bytes of numbers and signs",
            id="numbers of many bytes",
        ),
        pytest.param(
            b'{"a":[' + b",".join([b"9" * 25] * 10_000) + b"]}", "numbers of 19 digits", id="large numbers"
        ),
        pytest.param(
            b'{"a":[' + b",".join([b"1" * 4000] * 40) + b"]}", "numbers of 19 digits", id="long numbers"
        ),
        pytest.param(
            b'{"a":"' + b"\\u4e2d" * 1_100_000 + b'"}', "escaped letters", id="escapes as of \\u4e2d"
        ),
        pytest.param(b'{"a":"' + b'\\"' * 4_300_000 + b'"}', "4194304 escapes", id="escapes"),
        pytest.param(b'{"a":"' + b"\\\\" * 4_300_000 + b'"}', "4194304 escapes", id="escaped escapes"),
        pytest.param(b'{"a":"' + "é".encode() * 4_300_000 + b'"}', "bytes beyond ASCII", id="not ASCII"),
        pytest.param(b'{"a":' * 100_000, "recursion limit", id="deep"),
        pytest.param(b"[" * 10_000_000, "recursion limit", id="deep and large"),
        pytest.param(b'{"temperature":1e999}', "no computer keeps", id="infinity"),
        pytest.param(b'{"sampling_params":{"n":"256"}}', "whole number", id="sampling_params in a text"),
    ],
)
def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(body: bytes, says: str) -> None:
    with pytest.raises(BadRequestError, match=says):
        parse(body)


@given(st.lists(st.text('[]{},"\\\\:a', max_size=200), max_size=30), st.integers(1, 50))
def test_signs_within_texts_are_no_values_wherever_the_body_is_cut(parts: list[str], times: int) -> None:
    fields = {"metadata": ["x" * 70_000, *parts * times, "x" * 1_000_000]}
    assert parse(json.dumps(fields).encode()) == fields


def test_the_largest_conversations_of_agents_are_read() -> None:
    schema = {f"field_{at}": {"type": "string", "description": "é \n"} for at in range(20)}
    tools = [
        {"type": "function", "function": {"name": f"tool_{at}", "parameters": {"properties": schema}}}
        for at in range(128)
    ]
    calls = [
        {"id": "call_1", "type": "function", "function": {"name": "tool_1", "arguments": '{"a": "\\n"}'}}
    ]
    turn = [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "слово " * 100}]},
    ]
    fields = {"messages": turn * 1000, "tools": tools}
    assert parse(json.dumps(fields, ensure_ascii=False).encode()) == fields


def test_a_text_may_be_of_any_signs() -> None:
    text = '[]{},:"\\u' * 300_000
    assert parse(json.dumps({"prompt": text}).encode()) == {"prompt": text}
    assert parse(json.dumps({"prompt": list(range(200_000))}).encode())["prompt"][-1] == 199_999


@given(
    st.recursive(
        st.none() | st.text() | st.integers(-9, 9),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_what_is_small_is_read_as_it_is(value: Any) -> None:
    assert parse(json.dumps({"metadata": value}).encode()) == {"metadata": value}


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        ("/v1/chat/completions/batch", {"messages": [TALK] * 1000}, "makes 1000 sequences.* at most 128"),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {"n": 256}},
            "n is 256; at most 128",
        ),
        (
            "/inference/v1/generate",
            {"token_ids": [1] * 2049, "sampling_params": {}},
            "token_ids has 2049 tokens",
        ),
        *(
            (path, {name: ids, "sampling_params": {}, "items": ["a"]}, f"{name} has a token that is no whole")
            for ids in (
                [-1],
                [5, -(1 << 40)],
                [1, "-5"],
                [1, True],
                [1, 2.5],
                [1.0, "2"],
                [1, [2]],
                [1, None],
            )
            for path, name in (
                ("/inference/v1/generate", "token_ids"),
                ("/v1/completions", "prompt"),
                ("/v1/embeddings", "input"),
                ("/detokenize", "tokens"),
                ("/generative_scoring", "query"),
            )
        ),
        *(
            (path, {name: [[5], ids], "query": "a"}, f"{name} has a token that is no whole")
            for ids in ([-1], ["-5"], [1, "-5"], [1, {}], [[1]], [None])
            for path, name in (
                ("/v1/completions", "prompt"),
                ("/v1/embeddings", "input"),
                ("/generative_scoring", "items"),
            )
        ),
        ("/rerank", {"query": "a", "documents": ["b"] * 10_000}, "makes 10001 sequences.* at most 4096"),
        ("/v2/embed", {"texts": ["b"] * 10_000}, "makes 10000 sequences"),
        ("/v1/responses", {"input": [{}] * 10_000}, "input has 10000 entries; send at most 8192"),
        ("/v1/chat/completions", {"messages": [{}] * 10_000}, "messages has 10000 entries"),
        ("/v1/chat/completions/batch", {"messages": [[{}] * 5_000] * 2}, "messages has 10000 entries"),
        (CHAT, {"messages": [{"content": [{}] * 5_000}] * 2}, "messages has 10000 parts; send at most 8192"),
        ("/v1/messages", {"messages": [{"content": [{"content": [{}] * 9}] * 1_000}]}, "has 10000 parts"),
        ("/v1/responses", {"input": [{"output": [{}] * 10_000}]}, "input has 10000 parts; send at most 8192"),
        (CHAT, {"messages": [{"content": "a", "tool_calls": [{}] * 10_000}]}, "messages has 10000 parts"),
        ("/v1/messages", {"messages": TALK, "system": [{}] * 10_000}, "system has 10000 entries"),
        (
            "/v1/responses",
            {"input": [{"role": "user", **{f"k{at}": 1 for at in range(99)}}]},
            "input has 100 names in one of its messages; send at most 64",
        ),
        (CHAT, {"messages": [{"content": [{f"k{at}": 1 for at in range(99)}]}]}, "has 99 names in one"),
        # Routers took an answer with too long a head for a slice that breaks off, and left out one after the other.
        (
            "/v1/embeddings",
            {"input": ["b"] * 101, "encoding_format": "bytes"},
            "101 results in one header.* 100",
        ),
        ("/v1/completions", {"prompt": ["b"] * 4096}, "makes 4096 sequences.* at most 128"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "a" * (2048 * 128 + 1)}]},
            "no text of that length",
        ),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 2048 * 64}] * 3}, "no text of that length"),
        (
            CHAT,
            {"messages": TALK, "tools": [{"description": "a" * (2048 * 128 + 1)}]},
            "no text of that length",
        ),
        *(
            (
                CHAT,
                {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": held}}]}]},
                says,
            )
            for held, says in (
                ({"url": "data:" + "a" * (2048 * 128)}, "arguments has 262149 characters"),
                ({"a" * (2048 * 128): 1}, "bytes beside media; no prompt of that length"),
                ({"a": [1000] * 60_000}, "bytes beside media; no prompt of that length"),
            )
        ),
        ("/v2/embed", {"images": ["http://10.0.0.1/a.png"]}, "is not fetched"),
        (
            "/v2/embed",
            {"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "http://10.0.0.1"}}]}]},
            "is not fetched",
        ),
        ("/pooling", {"data": {"data": "http://169.254.169.254/", "data_format": "url"}}, "is not fetched"),
        ("/score", {"text_1": {"content": [{"image_url": "http://a"}]}, "text_2": "b"}, "is not fetched"),
        # A 500 of vLLM's, asked of four slices.
        (CHAT, {"messages": TALK, "bad_words": ["a", " "]}, "bad_words has a word of blanks alone"),
        (CHAT, {"messages": TALK, "priority": -1}, "priority is not a client's"),
        (CHAT, {"messages": TALK, "vllm_xargs": {"continued_token_ids": [1]}}, "continued_token_ids is not"),
        (
            "/v1/responses",
            {"input": "hello", "enable_response_messages": True},
            "enable_response_messages is not",
        ),
        (
            CHAT,
            {"messages": TALK, "media_io_kwargs": {"video": {"num_frames": -1}}},
            "media_io_kwargs is not",
        ),
        (
            CHAT,
            {"messages": TALK, "mm_processor_kwargs": {"min_pixels": 1 << 30}},
            "mm_processor_kwargs is not",
        ),
        (
            CHAT,
            {"messages": TALK, "chat_template_kwargs": {"tokenize": True, "padding": "max_length"}},
            "chat_template_kwargs.tokenize is an argument of the tokenizer",
        ),
        (
            "/v1/messages",
            {"messages": TALK, "max_tokens": 1, "chat_template_kwargs": {"return_tensors": "np"}},
            "chat_template_kwargs.return_tensors is an argument",
        ),
        (
            "/v1/embeddings",
            {"messages": TALK, "chat_template_kwargs": {"max_length": 2_000_000_000}},
            "chat_template_kwargs.max_length is an argument",
        ),
        (CHAT, {"messages": TALK, "kv_transfer_params": {"remote_host": "a"}}, "kv_transfer_params is not"),
        (
            CHAT,
            {"messages": TALK, "vllm_xargs": {"kv_cache_report_mode": "full"}},
            "kv_cache_report_mode is not",
        ),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {}, "features": {"mm_hashes": {"image": ["a"]}}},
            "features is not",
        ),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {"extra_args": {"continued_token_ids": [1]}}},
            "continued_token_ids is not",
        ),
        ("/v1/responses", {"input": "a", "background": True}, "background is not"),
        ("/v1/responses", {"input": "a", "tells_token_ids": True}, "tells_token_ids is not"),
        (
            "/v1/messages",
            {"messages": TALK, "vllm_xargs": {"continued_finish_reason": "stop"}},
            "continued_finish_reason is not",
        ),
        (
            CHAT,
            {"messages": TALK, "tools": [{"type": "function"}], "tool_choice": {"function": {"name": "f"}}},
            r"tools\[0\] has no function",
        ),
        (CHAT, {"messages": TALK, "logit_bias": {str(one): 1 for one in range(2000)}}, "logit_bias has 2000"),
        (CHAT, {"messages": TALK, "tools": [{}] * 513}, "tools has 513 entries"),
        (CHAT, {"messages": TALK, "structured_outputs": "json"}, "structured_outputs is no object"),
        (CHAT, {"messages": TALK, "structured_outputs": []}, "structured_outputs is no object"),
        (CHAT, {"messages": TALK, "structured_outputs": {"regex": "a" * 5000}}, "regex has 5000 characters"),
        (
            CHAT,
            {"messages": TALK, "structured_outputs": {"regex": "((a{1,99}){1,99}){9,99}"}},
            "970299 times",
        ),
        (CHAT, {"messages": TALK, "guided_regex": "a{10000000000}"}, "ten digits"),
        (CHAT, {"messages": TALK, "guided_regex": "a{1,0000000000000}"}, "ten digits"),
        (
            CHAT,
            {"messages": TALK, "repetition_detection": {"max_pattern_size": 65, "min_count": 2}},
            "at most 64",
        ),
        (
            CHAT,
            {"messages": TALK, "repetition_detection": {"max_pattern_size": "999"}},
            "is 999; .* at most 64|'999'",
        ),
        (CHAT, {"messages": TALK, "repetition_detection": {"max_pattern_size": 9e9}}, "at most 64"),
        (
            CHAT,
            {"messages": TALK, "repetition_detection": {"max_pattern_size": 64, "min_count": 17}},
            "at most 16",
        ),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {"repetition_detection": {"max_pattern_size": 999}}},
            "max_pattern_size is 999",
        ),
        (CHAT, {"messages": TALK, "structured_outputs": {"grammar": "a" * 70_000}}, "grammar has 70000"),
        (
            CHAT,
            {"messages": TALK, "response_format": {"json_schema": [0] * 10_001}},
            "response_format has 10003",
        ),
        (
            "/v1/responses",
            {"input": "a", "text": {"format": {"schema": [0] * 10_001}}},
            "text has 10004 values",
        ),
        (
            "/v1/messages",
            {"messages": TALK, "output_config": {"format": {"schema": [0] * 10_001}}},
            "output_config has 10004 values",
        ),
        (
            CHAT,
            {"messages": TALK, "tool_choice": "required", "tools": [{"parameters": [0] * 10_001}]},
            "tools has 10004 values",
        ),
        (
            CHAT,
            {
                "messages": TALK,
                "response_format": {"schema": [{"pattern": f"[a-z]{{{least},1000}}"} for least in range(20)]},
            },
            "response_format has 20000 repetitions in all of its patterns",
        ),
        (
            CHAT,
            {"messages": TALK, "structured_outputs": {"json": {"pattern": "(a{99}){999}"}}},
            "98901 times",
        ),
        (
            CHAT,
            {"messages": TALK, "structured_outputs": {"json": '{"pattern": "(a{99}){999}"}'}},
            "98901 times",
        ),
        # vLLM's own reading of JSON takes both.
        (CHAT, {"messages": TALK, "structured_outputs": {"json": '{"a": "\\ud800"}'}}, "json is no JSON"),
        (CHAT, {"messages": TALK, "structured_outputs": {"json": "[" * 300 + "]" * 300}}, "json is no JSON"),
        (CHAT, {"messages": TALK, "response_format": {"schema": NESTED}}, "has patternProperties"),
        (
            CHAT,
            {"messages": TALK, "structured_outputs": {"regex": "[a-z]?" * 33}},
            "regex has too many parts that",
        ),
        (CHAT, {"messages": TALK, "structured_outputs": {"regex": "(ab|)(?:c)*" * 17}}, "too many parts"),
        (
            CHAT,
            {
                "messages": TALK,
                "structured_outputs": {"grammar": "root ::= " + "any? " * 33 + '\nany ::= "?"'},
            },
            "grammar has too many parts",
        ),
        (
            CHAT,
            {"messages": TALK, "structured_outputs": {"grammar": "root ::= root"}},
            "grammar: rule root never ends",
        ),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {"structured_outputs": {"grammar": "root ::= root"}}},
            "grammar: rule root never ends",
        ),
        (CHAT, {"messages": TALK, "guided_grammar": "root ::= root"}, "grammar: rule root never ends"),
        (
            CHAT,
            {
                "messages": TALK,
                "response_format": {"schema": [{"pattern": "a?" * 20 + str(of)} for of in range(5)]},
            },
            "response_format has too many parts that may be left out",
        ),
        (
            CHAT,
            {"messages": TALK, "response_format": {"schema": {"properties": properties(201)}}},
            "sum of squares of each object's optional properties",
        ),
        (
            CHAT,
            {"messages": TALK, "structured_outputs": {"choice": ["a" * 100] * 700}},
            "70000 characters in names of properties, enum and const",
        ),
        (
            CHAT,
            {"messages": TALK, "response_format": {"schema": {"const": {"a": [{"b" * 70_000: 1}]}}}},
            "70001 characters",
        ),
        (
            CHAT,
            {"messages": TALK, "response_format": {"schema": [{"format": "email"}] * 513}},
            "513 texts with a format",
        ),
        (
            CHAT,
            {
                "messages": TALK,
                "response_format": {"schema": [{"minimum": of, "maximum": 9e9} for of in range(600)]},
            },
            "600 texts with a format and numbers with a range",
        ),
        (
            CHAT,
            {"messages": TALK, "tools": [{"function": {"strict": True, "parameters": [0] * 10_001}}]},
            "tools has 10006 values",
        ),
        (
            CHAT,
            {
                "messages": TALK,
                "response_format": {"schema": [{"minLength": least, "maxLength": 99} for least in range(40)]},
            },
            "40 different pairs of minLength",
        ),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {"stop": ["a"] * 65}},
            "stop has 65 entries",
        ),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {"structured_outputs": {"regex": "a" * 5000}}},
            "regex has 5000",
        ),
    ],
)
def test_what_would_cost_an_engine_is_refused_on_every_route(
    path: str, fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(BadRequestError, match=says):
        checked(path, **fields)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": TALK, "priority": 0, "kv_transfer_params": None, "vllm_xargs": {"other": 1}}),
        (
            CHAT,
            {"messages": TALK, "structured_outputs": {"regex": r"\d{4}-\d{2}-\d{2}"}, "logit_bias": {"1": 2}},
        ),
        (CHAT, {"messages": TALK, "guided_regex": r"a{100}\{\d+"}),
        (CHAT, {"messages": TALK, "tool_choice": "auto", "tools": [{"parameters": [0] * 10_001}]}),
        (
            CHAT,
            {
                "messages": TALK,
                "response_format": {"schema": [{"pattern": UUID + str(of)} for of in range(99)]},
            },
        ),
        (CHAT, {"messages": TALK, "response_format": {"schema": [{"maxLength": 5000}] * 999}}),
        (
            CHAT,
            {
                "messages": TALK,
                "response_format": {"schema": {"properties": properties(150), "required": ["p0"]}},
            },
        ),
        # A text of JSON as Outlines' regexes have it: its blanks may be left out, each before what may not.
        (
            CHAT,
            {
                "messages": TALK,
                "structured_outputs": {"regex": r'\{([ ]?"a"[ ]?:[ ]?(x|y)[ ]?(,[ ]?"b")?)+' * 9},
            },
        ),
        (CHAT, {"messages": TALK, "structured_outputs": {"regex": "[?*]" * 100 + r"\?" * 100}}),
        (
            CHAT,
            {
                "messages": TALK,
                "structured_outputs": {"grammar": 'root ::= (ws? "?" ws* [a-z]* name)+ ws?\n' * 40},
            },
        ),
        (
            CHAT,
            {
                "messages": TALK,
                "response_format": {
                    "schema": {"properties": properties(2000), "required": [f"p{at}" for at in range(2000)]}
                },
            },
        ),
        ("/v1/responses", {"input": "a", "text": {"format": {"type": "text"}}}),
        (CHAT, {"messages": TALK, "repetition_detection": {"max_pattern_size": 20, "min_count": 3}}),
        (CHAT, {"messages": TALK, "repetition_detection": None}),
        (CHAT, {"messages": TALK, "chat_template_kwargs": {"enable_thinking": False, "tokenize": False}}),
        (CHAT, {"messages": TALK, "chat_template_kwargs": None}),
        ("/v1/embeddings", {"input": ["a"] * 2048}),
        ("/rerank", {"query": "a", "documents": ["b"] * 1000}),
        ("/v1/completions", {"prompt": ["a"] * 100}),
        ("/v1/completions", {"prompt": [0, 5, 128_000]}),
        ("/v1/completions", {"prompt": [[0, 5], [7]]}),
        ("/v1/embeddings", {"input": [[0, 5], [7]]}),
        ("/v1/embeddings", {"input": [TALK, TALK]}),
        ("/v1/responses", {"input": TALK}),
        ("/v2/embed", {"images": ["data:image/png;base64,aGVsbG8="]}),
    ],
)
def test_what_clients_send_passes(path: str, fields: dict[str, Any]) -> None:
    checked(path, **fields)


def test_a_regex_is_looked_at_in_no_time_whatever_stands_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """4095 digits after a brace took the event loop for a second, and could be sent in four places."""
    for bound in ("_LONGEST_REGEX_CHARS", "_MOST_DENSE_CHARS"):
        monkeypatch.setattr(grammars, bound, 1 << 20)
    with ends():
        for regex in (
            "{" + "1" * 200_000,
            "{" * 200_000,
            "{1," * 60_000,
            "{9," + "1" * 200_000 + "}",
            "{111111111" * 20_000,
            "(a?x" * 50_000,
        ):
            with suppress(BadRequestError):
                checked(CHAT, messages=TALK, structured_outputs={"regex": regex}, guided_regex=regex)


def png(width: int, height: int) -> str:
    head = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII9xI4s", 13, b"IHDR", width, height, 0, b"IDAT")
    return "data:image/png;base64," + base64.b64encode(head + b"\0" * 40).decode()


def test_an_image_of_more_pixels_than_anybody_unpacks_is_refused() -> None:
    def asked(*urls: str) -> Any:
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        return checked(CHAT, messages=[{"role": "user", "content": parts}])

    asked(png(4000, 3000))
    with pytest.raises(BadRequestError, match="900000000 pixels"):
        asked(png(30_000, 30_000))
    with pytest.raises(BadRequestError, match="72000000 pixels"):
        asked(*[png(4000, 3000)] * 6)
    gif = "data:image/gif;base64," + base64.b64encode(b"GIF89a\xff\xff\xff\xff\0\0\0," + b"\0" * 40).decode()
    with pytest.raises(BadRequestError, match="4294836225 pixels"):
        asked(gif)


def test_a_picture_counts_in_whatever_it_is_packed() -> None:
    large, unknown = png(8000, 8000), "data:image/heic;base64,aGVsbG8="
    data = large.partition(",")[2]

    def asked(*parts: Any, path: str = CHAT) -> Any:
        return checked(path, messages=[{"role": "user", "content": list(parts)}])

    def image(url: str) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": url}}

    def anthropic(kind: str) -> dict[str, Any]:
        return {"type": "image", "source": {"type": kind, "media_type": "image/png", "data": data}}

    def video(kind: str) -> dict[str, Any]:
        return {"type": "video_url", "video_url": {"url": f"data:{kind};base64,{data},{data}"}}

    for one in (large, unknown):
        asked(
            image(one),
            {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}},
            video("video/mp4"),
        )
    asked(anthropic("base64"), path="/v1/messages")
    for two in (
        [image(unknown), image(png(10, 10))],
        [{"type": "input_image", "image_url": unknown}] * 2,
        [anthropic("base64"), anthropic("text")],
        [{"type": "tool_result", "content": [anthropic("base64")]}] * 2,
        [video("Video/JPEG")],
    ):
        with pytest.raises(BadRequestError, match="pixels together"):
            asked(*two)


def test_an_empty_list_of_domains_allows_none() -> None:
    url = {"messages": [{"role": "user", "content": [{"image_url": {"url": "https://example.com/a"}}]}]}
    checked(CHAT, planned(allowed_media_domains=["example.com"]), **url)
    with pytest.raises(BadRequestError, match="is not fetched"):
        checked(CHAT, planned(allowed_media_domains=None), **url)


@pytest.mark.parametrize("letter", range(len("image_url")))
def test_a_name_with_an_escaped_letter_is_the_same_name(letter: int) -> None:
    name = "image_url"
    escaped = name[:letter] + f"\\u{ord(name[letter]):04x}" + name[letter + 1 :]
    body = b'{"messages":[{"role":"user","content":[{"%s":"http://10.0.0.1/"}]}]}' % escaped.encode()
    with pytest.raises(BadRequestError, match="is not fetched"):
        check(ROUTES[CHAT], parse(body), body, PLAN, RouterSpec())


@given(
    st.recursive(
        st.text("urldat_mgesx:/\u00e9", max_size=8) | st.just("http://10.0.0.1/"),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["url", "data", "images", "image_url", "text", "curl"]), inner, max_size=3
            )
        ),
        max_leaves=10,
    ),
    st.booleans(),
)
def test_a_short_body_is_refused_for_its_media_where_a_long_one_is(content: Any, ascii_only: bool) -> None:
    def refusal(**more: Any) -> str:
        fields = {"messages": [{"role": "user", "content": content}], **more}
        body = json.dumps(fields, ensure_ascii=ascii_only).encode()
        try:
            check(ROUTES[CHAT], parse(body), body, PLAN, RouterSpec())
        except BadRequestError as error:
            return error.message
        return ""

    assert refusal() == refusal(metadata="x" * 70_000)


def test_only_what_the_router_looks_at_stays_in_memory() -> None:
    fields = {
        "model": "llama",
        "messages": TALK,
        "logit_bias": {"1": 2},
        "metadata": {"a": "b"},
        "structured_outputs": {"json": {"type": "object"}},
        "response_format": {"type": "json_schema", "json_schema": {}},
        "modalities": 5,
        "stream_options": "no",
    }
    assert kept(fields) == {
        "model": "llama",
        "messages": TALK,
        "structured_outputs": True,
        "response_format": {"type": "json_schema"},
    }


def test_whitespace_before_a_body_hides_nothing_of_its_prompt() -> None:
    body = b" " * 100 + json.dumps({"messages": [{"role": "user", "content": "word " * 1000}]}).encode()
    assert check(ROUTES[CHAT], parse(body), body, PLAN, RouterSpec()).prompt_tokens > 1000


QUERY = "word " * 100


@pytest.mark.parametrize(
    ("path", "fields", "least", "most"),
    [
        (CHAT, {"messages": TALK, "max_tokens": 5}, 20, 100),
        (CHAT, {"messages": TALK, "max_tokens": 5, "n": 4}, 35, 115),
        (CHAT, {"messages": TALK}, 2048, 2048),
        (CHAT, {"messages": TALK, "max_tokens": 10**9}, 2048, 2048),
        (CHAT, {"messages": TALK, "n": 3}, 6144, 6144),
        ("/v1/completions", {"prompt": ["word " * 200] * 3, "max_tokens": 1}, 3000, 3100),
        ("/v1/completions", {"prompt": "word " * 4000, "max_tokens": 16}, 2048, 2048),
        ("/v1/embeddings", {"input": ["word"] * 100}, 400, 1000),
        ("/v1/embeddings", {"input": "word " * 4000}, 2048, 2048),
        ("/rerank", {"query": QUERY, "documents": ["word"] * 100}, 100 * 500, 120 * 500),
        ("/score", {"text_1": [QUERY], "text_2": ["word"] * 100}, 100 * 500, 120 * 500),
        ("/score", {"data_1": ["word"] * 100, "data_2": {"content": QUERY}}, 100 * 500, 120 * 500),
        ("/generative_scoring", {"query": QUERY, "items": ["word"] * 100}, 100 * 500, 120 * 500),
    ],
)
def test_what_a_request_may_use_at_most_is_known_before(
    path: str, fields: dict[str, Any], least: int, most: int
) -> None:
    found = Estimate.of(checked(path, **fields), 64, PLAN.fit.max_model_len)
    assert least <= found.most_tokens <= most


def test_a_prompt_with_a_picture_may_be_as_long_as_the_context() -> None:
    talk = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": png(64, 64)}}]}]
    found = Estimate.of(checked(CHAT, messages=talk, max_tokens=5), 64, PLAN.fit.max_model_len)
    assert found.most_tokens == PLAN.fit.max_model_len
