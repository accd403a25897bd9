import json

import httpx
import pytest
from support.fronts import front
from support.simulated_engine import MODEL

from serving.config import ModelSpec, RouterSpec
from serving.errors import BadRequestError, ConfigError
from serving.planning import plan
from serving.router.admission.controller import AdmissionController
from serving.router.http.auth import KeyFile, new, parse
from serving.router.http.isolation import UNSALTED, salt, salted
from serving.router.http.routes import ROUTES
from serving.router.scheduling.slice_table import SliceTable

FIRST, SECOND = (parse(new(name)[1], "file").keys[0] for name in ("first", "second"))
PATH = "/v1/completions"


def salt_of(body: bytes) -> str:
    return str(json.loads(body)["cache_salt"])


@pytest.mark.unit
def test_each_key_has_a_salt_of_its_own_that_stays_and_tells_nothing_of_the_key() -> None:
    assert salt(FIRST) == salt(FIRST) != salt(SECOND)
    assert len(salt(FIRST)) == 43
    assert FIRST.id not in salt(FIRST)
    assert FIRST.sha256 not in salt(FIRST)


@pytest.mark.unit
@pytest.mark.parametrize("body", [b'{"prompt": "x"}', b' \n{"prompt":"x","cache_salt":null}', b"{}", b"{ }"])
def test_the_salt_stands_in_the_body_and_nothing_else_changes(body: bytes) -> None:
    fields = json.loads(body)
    sent = salted(PATH, body, fields, FIRST)
    assert json.loads(sent) == {**fields, "cache_salt": salt(FIRST)}
    assert sent.count(b"cache_salt") == 1


@pytest.mark.unit
def test_a_client_parts_its_own_users_and_reaches_nobody_elses() -> None:
    guessed = salt(SECOND)
    bodies = [json.dumps({"prompt": "x", "cache_salt": asked}).encode() for asked in ("one", "two", guessed)]
    salts = {salt_of(salted(PATH, body, json.loads(body), FIRST)) for body in bodies}
    assert len(salts) == 3
    assert not salts & {guessed, salt(FIRST), "one", "two"}


@pytest.mark.unit
@pytest.mark.parametrize("asked", [1, ["x"], {}, True])
def test_a_salt_that_is_no_text_is_refused(asked: object) -> None:
    with pytest.raises(BadRequestError, match="cache_salt is no text"):
        salted(PATH, b"", {"cache_salt": asked}, FIRST)


@pytest.mark.unit
@pytest.mark.parametrize("name", ["uuid", "\\u0075uid"])
def test_media_have_no_names_by_which_another_key_would_find_them(name: str) -> None:
    part = '{"type": "image_url", "image_url": null, "' + name + '": "a"}'
    body = ('{"messages": [{"role": "user", "content": [' + part + "]}]}").encode()
    with pytest.raises(BadRequestError, match="Leave it out, and send the media"):
        salted(PATH, body, json.loads(body), FIRST)
    body = json.dumps({"metadata": {"uuid": "a"}, "tools": [{"properties": {"uuid": {"type": "string"}}}]})
    assert salted(PATH, body.encode(), json.loads(body), FIRST)


@pytest.mark.unit
@pytest.mark.parametrize("path", sorted(UNSALTED))
def test_a_route_that_can_not_be_kept_apart_is_refused(path: str) -> None:
    assert path in ROUTES
    with pytest.raises(BadRequestError, match="is not offered here"):
        salted(path, b"{}", {}, FIRST)


@pytest.mark.http
@pytest.mark.parametrize("isolated", [False, True])
def test_one_key_does_not_see_in_the_cache_what_another_has_asked(isolated: bool) -> None:
    made = [new(name) for name in ("first", "second")]
    ring = KeyFile(None, "\n".join(line for _, line in made))
    body = {"model": MODEL, "prompt": "a long prompt " * 100, "max_tokens": 1}
    with front(key_file=ring, keys={"isolated_cache": isolated}) as running:
        cached = []
        for key, _ in (*made, made[1]):
            answer = httpx.post(
                f"{running.address}{PATH}", json=body, headers={"authorization": f"Bearer {key}"}
            )
            assert answer.is_success, answer.text
            cached.append(running.engine.scheduler.totals.cached_tokens)
    first, second, again = (after - before for before, after in zip([0, *cached], cached, strict=False))
    assert (first, bool(second)) == (0, not isolated)
    assert again > 0


@pytest.mark.http
@pytest.mark.parametrize("isolated", [False, True])
def test_a_router_expects_no_more_of_a_slice_than_its_key_finds_there(isolated: bool) -> None:
    made = [new(name) for name in ("first", "second")]
    ring = KeyFile(None, "\n".join(line for _, line in made))
    body = {"model": MODEL, "prompt": "a long prompt " * 100, "max_tokens": 1}
    with front(key_file=ring, keys={"isolated_cache": isolated}) as running:
        blocks = []
        for key, _ in (*made, made[1]):
            headers = {"authorization": f"Bearer {key}"}
            assert httpx.post(f"{running.address}{PATH}", json=body, headers=headers).is_success
            blocks.append(sum(len(sent.names) for sent in running.table.everything()))
    first, second, again = blocks
    assert (second, again) == ((2 if isolated else 1) * first, second)


@pytest.mark.unit
def test_without_keys_there_is_nothing_to_keep_apart() -> None:
    spec = RouterSpec.model_validate({"keys": {"isolated_cache": True}})
    slice_ = {"generation": "v6e", "topology": "2x4", "hosts": 1}
    made = plan(
        ModelSpec.model_validate(
            {"model": "meta-llama/Llama-3.1-8B-Instruct", "name": "llama", "slice": slice_}
        )
    )
    with pytest.raises(ConfigError, match="isolated_cache wants keys"):
        AdmissionController(spec, [made], SliceTable({}, {}), KeyFile(None))


@pytest.mark.engine
def test_vllm_reads_a_salt_on_every_other_route_whose_prompts_it_keeps() -> None:
    """Held against vLLM's own request classes: a newer vLLM that reads it on more routes, or on fewer, is noticed."""
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import (
        BatchChatCompletionRequest,
        ChatCompletionRequest,
    )
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.pooling.base.protocol import PoolingBasicRequestMixin
    from vllm.entrypoints.pooling.embed.protocol import CohereEmbedRequest
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
    from vllm.entrypoints.speech_to_text.transcription.protocol import TranscriptionRequest
    from vllm.entrypoints.speech_to_text.translation.protocol import TranslationRequest

    with_salt = (
        ChatCompletionRequest,
        BatchChatCompletionRequest,
        CompletionRequest,
        ResponsesRequest,
        GenerateRequest,
        PoolingBasicRequestMixin,
    )
    without = (AnthropicMessagesRequest, CohereEmbedRequest, TranscriptionRequest, TranslationRequest)
    assert [model.__name__ for model in with_salt if "cache_salt" not in model.model_fields] == []
    assert [model.__name__ for model in without if "cache_salt" in model.model_fields] == []
