"""vLLM's own detokenizer and parsers, taken over in the middle of an answer. No engine is started."""

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serving.config import load
from serving.engine import resume
from serving.engine.protocol import CONTINUED
from serving.planning import plan
from serving.simulation import stand_in
from serving.simulation.cluster import cache_directory

pytestmark = pytest.mark.engine

LLAMA = Path(__file__).parents[2] / "deployments" / "llama.yaml"
PROMPT = [3, 70, 90, 4]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    spec = load(LLAMA).services["llama"].models[0]
    resume._teach_detokenizer()
    return AutoTokenizer.from_pretrained(stand_in.ensure(plan(spec).shape, cache_directory()))


def request_of(params: dict[str, Any], before: list[int]) -> Any:
    from vllm.sampling_params import SamplingParams

    extra = {CONTINUED: before} if before else None
    return SimpleNamespace(
        request_id="x",
        prompt_token_ids=[*PROMPT, *before],
        prompt_embeds=None,
        sampling_params=SamplingParams(max_tokens=1000, **params, extra_args=extra),
    )


def streamed(tokenizer: Any, params: dict[str, Any], before: list[int], ids: list[int]) -> list[str]:
    """The text of every token as the engine would stream it, until a stop string."""
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    made = IncrementalDetokenizer.from_new_request(tokenizer, request_of(params, before))
    texts = []
    for token in ids:
        stop = made.update([token], stop_terminated=False)
        texts.append(made.get_next_output_text(finished=bool(stop), delta=True))
        if stop:
            texts.append(f"<stop {stop}>")
            break
    assert made.num_output_tokens() == len([text for text in texts if not text.startswith("<stop")])
    return texts


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize(
    "params", [{}, {"stop": ["e t", "zzzzzzzz"]}, {"stop": ["a"], "include_stop_str_in_output": True}]
)
def test_a_detokenizer_goes_on_where_another_stood(
    tokenizer: Any, params: dict[str, Any], slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random ids of a byte-level vocabulary: characters cut in two at every other place."""
    from vllm.v1.engine import detokenizer

    monkeypatch.setattr(detokenizer, "USE_FAST_DETOKENIZER", not slow)
    pick = random.Random(1)
    for _ in range(10):
        ids = [pick.randrange(6, 640) for _ in range(25)]
        whole = streamed(tokenizer, params, [], ids)
        for cut in range(1, min(len(whole), len(ids))):
            if whole[cut].startswith("<stop"):
                break
            assert streamed(tokenizer, params, ids[:cut], ids[cut:]) == whole[cut:], (ids, cut)


def test_a_stop_string_within_the_least_tokens_is_still_passed_over(tokenizer: Any) -> None:
    ids = tokenizer.encode(" a host is here." * 6, add_special_tokens=False)
    least = len(ids) // 2
    params = {"stop": ["host is"], "min_tokens": least}
    whole = streamed(tokenizer, params, [], ids)
    assert whole[-1] == "<stop host is>"
    assert len(whole) > least
    for cut in range(1, len(whole) - 1):
        left = {**params, "min_tokens": max(0, least - cut)}
        assert streamed(tokenizer, left, ids[:cut], ids[cut:]) == whole[cut:], cut


def test_a_parser_of_thoughts_goes_on_where_another_stood(tokenizer: Any) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.parser_manager import ParserManager

    tokenizer = _with_marks(tokenizer)
    plain = ParserManager.get_parser(
        tool_parser_name=None, reasoning_parser_name="deepseek_r1", enable_auto_tools=False, model_name="x"
    )
    taught = resume.continuing_parser(plain)
    text = "<think>A host is a machine</think>It carries some chips"
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = streamed(tokenizer, {"skip_special_tokens": False}, [], ids)

    def deltas(cls: Any, cut: int) -> list[tuple[Any, Any]]:
        fields: dict[str, Any] = {
            "messages": [{"role": "user", "content": "x"}],
            "skip_special_tokens": False,
            "vllm_xargs": {CONTINUED: ids[:cut]} if cut else None,
        }
        asked = ChatCompletionRequest.model_validate(fields)
        parser = cls(tokenizer, None)
        found = [
            parser.parse_delta(piece, [token], asked, [*PROMPT, *ids[:cut]], finished=False)
            for token, piece in list(zip(ids, pieces, strict=True))[cut:]
        ]
        return [(each.reasoning, each.content) if each else (None, None) for each in found]

    whole = deltas(plain, 0)
    assert "".join(reasoning or "" for reasoning, _ in whole) == "A host is a machine"
    assert "".join(content or "" for _, content in whole) == "It carries some chips"
    for cut in range(1, len(ids)):
        assert deltas(taught, cut) == whole[cut:], cut


def _with_marks(tokenizer: Any) -> Any:
    import copy

    marked = copy.deepcopy(tokenizer)
    marked.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    return marked


@pytest.mark.parametrize(
    ("fields", "inputs"),
    [
        ({"vllm_xargs": {CONTINUED: [-1]}}, [{"prompt_token_ids": [1]}]),
        ({"vllm_xargs": {CONTINUED: ["a"]}}, [{"prompt_token_ids": [1]}]),
        ({"stream": False}, [{"prompt_token_ids": [1]}]),
        ({"n": 2}, [{"prompt_token_ids": [1]}]),
        ({}, [{"prompt_token_ids": [1]}, {"prompt_token_ids": [1]}]),
        ({}, [{"prompt_embeds": 0}]),
    ],
)
def test_what_can_t_be_gone_on_with_is_refused(fields: dict[str, Any], inputs: list[Any]) -> None:
    asked = SimpleNamespace(
        **{"vllm_xargs": {CONTINUED: [7]}, "stream": True, "n": 1, "max_tokens": None, **fields}
    )
    assert rendered(asked, inputs) == "refused"


def test_the_ids_go_behind_the_prompt() -> None:
    asked = SimpleNamespace(vllm_xargs={CONTINUED: [7, 8]}, stream=True, n=None, max_tokens=None)
    assert rendered(asked, [{"prompt_token_ids": [1]}]) == [{"prompt_token_ids": [1, 7, 8]}]
    asked.vllm_xargs = None
    assert rendered(asked, [{"prompt_token_ids": [1]}]) == [{"prompt_token_ids": [1]}]


@pytest.mark.parametrize(
    ("asked", "default", "override", "left"),
    [
        (None, None, None, None),
        (None, 50, None, 48),
        (60, 50, None, 60),
        (60, 50, 50, 48),
        (10, 50, 50, 10),
    ],
)
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_rest_of_an_answer_is_bounded_by_what_the_slice_s_own_limits_leave(
    name: str, asked: int | None, default: int | None, override: int | None, left: int | None
) -> None:
    """`asked` is what the router leaves of the client's bound."""
    request = SimpleNamespace(vllm_xargs={CONTINUED: [7, 8]}, stream=True, n=None, max_tokens=None)
    setattr(request, name, asked)
    rendered(request, [{"prompt_token_ids": [1]}], default=default, override=override)
    assert getattr(request, "max_tokens" if asked is None else name) == left


def rendered(asked: Any, inputs: list[Any], default: int | None = None, override: int | None = None) -> Any:
    async def render(_: Any) -> Any:
        return inputs

    serving = SimpleNamespace(
        create_error_response=lambda *_, **__: "refused",
        override_max_tokens=override,
        default_sampling_params={} if default is None else {"max_tokens": default},
    )
    return asyncio.run(resume._with_continued_ids(render, serving, lambda found: found)(asked))
