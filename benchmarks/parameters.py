"""What of a request ends an engine: every parameter of vLLM's request models, alone and in pairs, sent to a two-host slice.

    python -m benchmarks.parameters                        # all routes, alone and in pairs
    python -m benchmarks.parameters --only singles --routes completions
    python -m benchmarks.parameters --results walked.jsonl --seconds 3000    # a part; the same again goes on behind it

The engine is vLLM with the stand-in model on simulated hosts. Requests go to the slice's own address, past the router,
which refuses what is known (serving/engine/known_faults.py). A group of requests goes out together; where the slice does
not answer a plain request afterwards, Serve starts another engine and the group's requests go out one by one, so that
the one at fault is named. Pairs with a known fault in them, or with a request that ended an engine alone, are left out.
"""

import argparse
import dataclasses
import itertools
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from benchmarks import accounting
from benchmarks.service import Service, serving
from serving.engine import known_faults
from serving.state.records import SliceRecord

ANSWER_S = 60.0  # for an answer of three tokens, on cores that other engines may share
RESTART_S = 600.0
GROUP = 8
HOSTS = 2
KILLS, HANGS = "ends the engine", "hangs"
ENDS = (KILLS, HANGS)
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}

# A value or several that change what the engine does; beside them what vLLM refuses, since refusing is code too.
SAMPLING: dict[str, list[Any]] = {
    "frequency_penalty": [1.5],
    "ignore_eos": [True],
    "include_stop_str_in_output": [True],
    "logit_bias": [{"5": 50.0}],
    "presence_penalty": [1.5],
    "priority": [1],
    "repetition_penalty": [1.3],
    "request_id": ["walk"],
    "seed": [7],
    "skip_special_tokens": [False],
    "stop": ["a", ["a", "e"]],
    "stream": [True],
    "temperature": [0.0, 1.0],
    "top_k": [1, 5],
    "top_p": [0.5],
    "user": ["someone"],
    "cache_salt": ["salt"],
    "kv_transfer_params": [{"do_remote_decode": True}],
    "ec_transfer_params": [{"some": "thing"}],
    "vllm_xargs": [{"some": "thing"}],
    "structured_outputs": [{"regex": "[ab]+"}, {"choice": ["a", "b"]}, {"json": _SCHEMA}],
}
GENERATION: dict[str, list[Any]] = SAMPLING | {
    "add_special_tokens": [True, False],
    "allowed_token_ids": [[5, 6]],
    "bad_words": [["a"]],
    "echo": [True],
    "length_penalty": [0.5],
    "logprob_token_ids": [[5, 6]],
    "max_tokens": [1, 40],
    "min_p": [0.1],
    "min_tokens": [2],
    "n": [2],
    "prompt_logprobs": [0, 1],
    "repetition_detection": [{"max_pattern_size": 2, "min_count": 2}],
    "response_format": [{"type": "json_object"}],
    "return_token_ids": [True],
    "return_token_offsets": [True],
    "return_tokens_as_token_ids": [True],
    "spaces_between_special_tokens": [False],
    "stop_token_ids": [[5, 6]],
    "stream_options": [{"include_usage": True}],
    "thinking_token_budget": [1],
    "truncate_prompt_tokens": [1, -1],
    "truncation_side": ["left", "right"],
    "use_beam_search": [True],
}
COMPLETIONS: dict[str, list[Any]] = GENERATION | {
    "logprobs": [0, 2],
    "prompt": [[1, 2, 3], ["a", "b"], [[1, 2], [3]], "", "word " * 600],
    "prompt_embeds": ["AAAA"],
    "suffix": ["end"],
}
CHAT: dict[str, list[Any]] = GENERATION | {
    "add_generation_prompt": [False],
    "chat_template": ["{{ messages[0]['content'] }}"],
    "chat_template_kwargs": [{"enable_thinking": False}],
    "continue_final_message": [True],
    "documents": [[{"title": "a", "text": "b"}]],
    "include_reasoning": [False],
    "logprobs": [True],
    "max_completion_tokens": [2],
    "media_io_kwargs": [{"image": {}}],
    "messages": [[{"role": "user", "content": "word " * 600}]],
    "mm_processor_kwargs": [{"some": 1}],
    "parallel_tool_calls": [False],
    "reasoning_effort": ["low"],
    "return_assistant_tokens_mask": [True],
    "return_prompt_text": [True],
    "tool_choice": ["auto", "required", {"type": "function", "function": {"name": "f"}}],
    "tools": [[_TOOL]],
    "top_logprobs": [2],
}
RESPONSES: dict[str, list[Any]] = SAMPLING | {
    "background": [True],
    "chat_template_kwargs": [{"enable_thinking": False}],
    "enable_response_messages": [True],
    "include": [["message.output_text.logprobs"]],
    "include_reasoning": [False],
    "input": [[{"role": "user", "content": "a"}], "word " * 600],
    "instructions": ["be brief"],
    "max_output_tokens": [1, 40],
    "max_tool_calls": [1],
    "media_io_kwargs": [{"image": {}}],
    "metadata": [{"a": "b"}],
    "mm_processor_kwargs": [{"some": 1}],
    "parallel_tool_calls": [False],
    "previous_input_messages": [[{"role": "user", "content": "a"}]],
    "previous_response_id": ["resp_0"],
    "prompt": [{"id": "a"}],
    "prompt_cache_key": ["a"],
    "reasoning": [{"effort": "low"}],
    "service_tier": ["flex"],
    "store": [False],
    "text": [{"format": {"type": "json_object"}}],
    "tool_choice": ["auto", "required"],
    "tools": [[{"type": "function", "name": "f", "parameters": _SCHEMA}]],
    "top_logprobs": [2],
    "truncation": ["auto"],
}
MESSAGES: dict[str, list[Any]] = {
    "chat_template_kwargs": [{"enable_thinking": False}],
    "ec_transfer_params": [{"some": "thing"}],
    "kv_transfer_params": [{"do_remote_decode": True}],
    "metadata": [{"user_id": "someone"}],
    "output_config": [{"format": {"type": "json_schema", "schema": _SCHEMA}}],
    "stop_sequences": [["a", "e"]],
    "stream": [True],
    "system": ["be brief"],
    "temperature": [0.0, 1.0],
    "tool_choice": [{"type": "auto"}, {"type": "any"}],
    "tools": [[{"name": "f", "input_schema": _SCHEMA}]],
    "top_k": [1, 5],
    "top_p": [0.5],
}
GENERATE: dict[str, list[Any]] = {
    "assistant_tokens_mask": [[0, 0, 1]],
    "cache_salt": ["salt"],
    "ec_transfer_params": [{"some": "thing"}],
    # Pictures that were never sent, and one whose tensors are none.
    "features": [
        {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [{"offset": 0, "length": 0}]}},
        {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [{"offset": 0, "length": 2}]}},
        {
            "mm_hashes": {"image": ["b"]},
            "mm_placeholders": {"image": [{"offset": 0, "length": 2}]},
            "kwargs_data": {"image": ["AAAA"]},
        },
    ],
    "kv_transfer_params": [{"do_remote_decode": True}],
    "priority": [1],
    "request_id": ["walk"],
    "stream": [True],
    "stream_options": [{"include_usage": True}],
    "token_offsets": [[[0, 1], [1, 2], [2, 3]]],
}
# What `sampling_params` of the route above may hold beyond what the other routes name.
SAMPLING_PARAMS: dict[str, list[Any]] = {
    "detokenize": [False],
    "extra_args": [{"some": "thing"}],
    "flat_logprobs": [True],
    "logprobs": [0, 2],
    "output_kind": [1, 2],
    "output_text_buffer_length": [3],
    "routed_experts_prompt_start": [1],
    "skip_clone": [True],
    "skip_reading_prefix_cache": [True],
    **{
        name: GENERATION[name]
        for name in (
            "allowed_token_ids",
            "bad_words",
            "frequency_penalty",
            "ignore_eos",
            "include_stop_str_in_output",
            "logit_bias",
            "logprob_token_ids",
            "max_tokens",
            "min_p",
            "min_tokens",
            "n",
            "presence_penalty",
            "prompt_logprobs",
            "repetition_detection",
            "repetition_penalty",
            "seed",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "stop",
            "stop_token_ids",
            "structured_outputs",
            "temperature",
            "thinking_token_budget",
            "top_k",
            "top_p",
        )
    },
}
# Values at the ends of what a type holds, and grammars that no compiler takes: each is sent alone.
_LARGE = 1 << 40
_TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}
ODD: dict[str, list[Any]] = {
    "bad_words": [["", " "]],
    "logit_bias": [{"5": 1e30}, {"5": -1e30}],
    "logprob_token_ids": [[_LARGE], [-1]],
    "max_tokens": [_LARGE],
    "min_tokens": [_LARGE],
    "prompt_logprobs": [-1],
    "seed": [(1 << 63) - 1, -1],
    "stop_token_ids": [[_LARGE], [-1]],
    "structured_outputs": [
        {"grammar": 'root ::= "a" | "b"'},
        {"grammar": "root ::= root"},
        {"json_object": True},
        {"structural_tag": json.dumps(_TAG)},
        {"structural_tag": "{}"},
        {"regex": "("},
        {"regex": "(?=a)b"},
        {"choice": []},
        {"json": {"$ref": "#/nowhere"}},
        {"json": {"type": "string", "pattern": "(?<=a)b"}},
        {"json": {"type": "object", "patternProperties": {"^a": {}}, "minProperties": 3}},
    ],
    "temperature": [1e-30, 1e30],
    "thinking_token_budget": [0, -1, _LARGE],
    "top_k": [_LARGE],
    "truncate_prompt_tokens": [_LARGE],
}
ROUTES: dict[str, tuple[str, dict[str, Any], dict[str, list[Any]]]] = {
    "completions": ("/v1/completions", {"prompt": "Hello", "max_tokens": 3, "temperature": 0}, COMPLETIONS),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "temperature": 0},
        CHAT,
    ),
    "responses": ("/v1/responses", {"input": "Hello", "max_output_tokens": 3, "temperature": 0}, RESPONSES),
    "messages": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3},
        MESSAGES,
    ),
    "generate": (
        "/inference/v1/generate",
        {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 3, "temperature": 0}},
        GENERATE,
    ),
}
ALONE: dict[str, dict[str, list[Any]]] = {
    "completions": {**ODD, "logprobs": [-1, _LARGE], "prompt": [[_LARGE], [-1], [0]], "n": [64]},
    "chat": {
        **ODD,
        "top_logprobs": [-1, _LARGE],
        "response_format": [
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#/nowhere"}}},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}},
            _TAG,
        ],
        "tools": [[{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/nowhere"}}}]],
    },
    "responses": {
        "text": [{"format": {"type": "json_schema", "name": "a", "schema": {"$ref": "#/nowhere"}}}]
    },
    "generate": {
        "token_ids": [[_LARGE], [-1], [0]],
        "sampling_params": [
            {"max_tokens": 3, "temperature": 0, name: value}
            for table in (SAMPLING_PARAMS, ODD)
            for name, values in table.items()
            for value in values
        ],
    },
}


@dataclass(frozen=True)
class Walked:
    """One request and what came: an HTTP status, `ends the engine`, `hangs` or `breaks off`."""

    route: str
    fields: dict[str, Any]
    came: str

    def __str__(self) -> str:
        return f"{self.route} {json.dumps(self.fields)[:200]}: {self.came}"


def requests(table: Mapping[str, list[Any]], pairs: bool) -> Iterator[dict[str, Any]]:
    """Every value of every parameter alone, or every two values of two parameters."""
    single = [(name, value) for name, values in table.items() for value in values]
    for chosen in itertools.combinations(single, 2) if pairs else ((item,) for item in single):
        if len({name for name, _ in chosen}) == len(chosen):
            yield dict(chosen)


def contains(fields: Mapping[str, Any], part: Mapping[str, Any]) -> bool:
    return all(name in fields and fields[name] == value for name, value in part.items())


def wanted(route: str, walked: Iterable[Walked], *, pairs: bool) -> list[dict[str, Any]]:
    """A route's requests that nobody has walked yet, without pairs of which it is known that they end an engine."""
    _, base, table = ROUTES[route]
    rows = [row for row in walked if row.route == route]
    known = {_as_text(row.fields) for row in rows}
    ending = [row.fields for row in rows if row.came in ENDS and len(row.fields) == 1]
    found = [*requests(table, pairs), *(() if pairs else requests(ALONE.get(route, {}), pairs))]
    return [
        fields
        for fields in found
        if _as_text(fields) not in known
        and not (pairs and any(contains(fields, part) for part in ending))
        and not (pairs and any(fault.holds({**base, **fields}, HOSTS) for fault in known_faults.FAULTS))
    ]


def _as_text(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, sort_keys=True)


class Results:
    """Every row that was walked, also by runs before; with a `path` each is in that file as soon as it is known, one a line."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_bytes().splitlines(keepends=True) if path and path.exists() else []
        whole = [line for line in lines if line.endswith(b"\n")]
        if path and whole != lines:  # a run was killed while it wrote
            path.write_bytes(b"".join(whole))
        self.rows = [Walked(**json.loads(line)) for line in whole]

    def add(self, rows: Iterable[Walked]) -> None:
        for row in rows:
            self.rows.append(row)
            if self._path:
                with self._path.open("a") as file:
                    file.write(json.dumps(dataclasses.asdict(row)) + "\n")


class Walk:
    """Requests sent to one slice, and to its next engine where one request ends it."""

    def __init__(self, service: Service, console: Console, results: Results, until_s: float) -> None:
        """`until_s`: on the monotonic clock; no request goes out after it."""
        self._service = service
        self._console = console
        self._results = results
        self._until_s = until_s
        self._slice = self._serving()
        self._client = httpx.Client(timeout=ANSWER_S)

    def route(self, name: str, *, pairs: bool) -> bool:
        """Send all of a route's requests that are wanted; false where time is up before."""
        path, base, _ = ROUTES[name]
        left = wanted(name, self._results.rows, pairs=pairs)
        for start in range(0, len(left), GROUP):
            if time.monotonic() > self._until_s:
                return False
            group = left[start : start + GROUP]
            came = self._together(path, base, group)
            if self._well():
                self._note(name, group, came)
            elif not self._one_by_one(name, group):
                return False
            if start // GROUP % 20 == 0:
                done = f"{start + len(group)} of {len(left)}"
                self._console.print(f"{name}, {'pairs' if pairs else 'alone'}: {done}", highlight=False)
        return True

    def _note(self, name: str, group: list[dict[str, Any]], came: list[str]) -> None:
        rows = [Walked(name, fields, what) for fields, what in zip(group, came, strict=True)]
        self._results.add(rows)
        for row in rows:
            if row.came in ENDS or row.came.startswith("5"):
                self._console.print(str(row), markup=False, highlight=False, soft_wrap=True)

    def _together(self, path: str, base: Mapping[str, Any], group: list[dict[str, Any]]) -> list[str]:
        with ThreadPoolExecutor(len(group)) as pool:
            return list(pool.map(lambda fields: self._send(path, {**base, **fields}), group))

    def _one_by_one(self, name: str, group: list[dict[str, Any]]) -> bool:
        path, base, _ = ROUTES[name]
        self._comes_back()
        for fields in group:
            if time.monotonic() > self._until_s:
                return False
            self._note(name, [fields], [self._alone(path, base, fields)])
        return True

    def _alone(self, path: str, base: Mapping[str, Any], fields: dict[str, Any]) -> str:
        came = self._send(path, {**base, **fields})
        if self._well() or self._comes_back():
            return came
        return HANGS if came == HANGS else KILLS

    def _send(self, path: str, fields: Mapping[str, Any]) -> str:
        """The status; `hangs` without an end in time, `breaks off` where the connection breaks."""
        body = {"model": self._service.model, **fields}
        try:
            return str(self._client.post(f"{self._slice.address}{path}", json=body).status_code)
        except httpx.TimeoutException:
            return HANGS
        except httpx.TransportError:
            return "breaks off"

    def _well(self) -> bool:
        """Whether the slice answers an ordinary request."""
        return self._send("/v1/completions", {"prompt": "Still there?", "max_tokens": 2}) == "200"

    def _comes_back(self) -> bool:
        """Wait for an engine: true where the same one answers again, false where another has taken its place."""
        deadline = time.monotonic() + RESTART_S
        gone = self._slice.replica
        while time.monotonic() < deadline:
            serving_now = [entry for entry in self._service.trial.store.slices() if entry.serves]
            if serving_now and serving_now[0].replica != gone:
                self._slice = serving_now[0]
                return False
            if serving_now and self._well():
                return True
            time.sleep(0.5)
        raise TimeoutError(f"no engine within {RESTART_S:.0f} s after {gone} ended")

    def _serving(self) -> SliceRecord:
        return next(entry for entry in self._service.trial.store.slices() if entry.serves)


def main() -> None:
    accounting.unwind_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--routes", nargs="+", choices=list(ROUTES), default=list(ROUTES))
    parser.add_argument("--only", choices=("singles", "pairs"), help="of each route")
    parser.add_argument(
        "--results", type=Path, help="file of every row; rows that it has are not walked again"
    )
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="after which no further request goes out"
    )
    arguments = parser.parse_args()
    console = Console(file=sys.stderr)
    started = time.monotonic()
    results = Results(arguments.results)
    parts = [
        (name, pairs)
        for pairs in (False, True)
        for name in arguments.routes
        if arguments.only != ("singles" if pairs else "pairs")
    ]
    if any(wanted(name, results.rows, pairs=pairs) for name, pairs in parts):
        with serving("llama", 1, engine="vllm", console=console) as service:
            walk = Walk(service, console, results, started + arguments.seconds)
            all(walk.route(name, pairs=pairs) for name, pairs in parts)
    for name in arguments.routes:
        counts = Counter(row.came for row in results.rows if row.route == name)
        left = sum(len(wanted(name, results.rows, pairs=pairs)) for route, pairs in parts if route == name)
        print(f"{name}: {sum(counts.values())} requests, {dict(counts.most_common())}; {left} to go")
    for row in results.rows:
        if row.came in ENDS:
            print(row)
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
