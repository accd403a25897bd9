import json
from typing import TYPE_CHECKING, Any

import pytest
from support.fronts import front
from support.simulated_engine import MODEL

from serving.config import Seeds
from serving.errors import SeedError
from serving.router.http import seed
from serving.router.http.auth import KeyFile, new
from serving.router.http.routes import ROUTES

if TYPE_CHECKING:
    import openai

CHAT = ROUTES["/v1/chat/completions"]
GENERATE = ROUTES["/inference/v1/generate"]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"seed": None}, False),
        ({"seed": 7}, True),
        ({"seed": 0, "temperature": 0.7}, True),
        ({"seed": 7, "temperature": 0.001}, True),
        ({"seed": 7, "temperature": 0}, False),
        ({"seed": 7, "temperature": 0.0}, False),
        ({"seed": 7, "temperature": None}, True),
        ({"sampling_params": {"seed": 7}}, True),
        ({"sampling_params": {"seed": 7, "temperature": 0}, "temperature": 1}, False),
        ({"sampling_params": [7]}, False),
    ],
)
def test_a_request_is_seeded_where_an_engine_would_draw_by_its_seed(
    fields: dict[str, Any], expected: bool
) -> None:
    assert seed.seeded(GENERATE, fields) is expected


@pytest.mark.unit
def test_speech_is_left_to_the_engine() -> None:
    assert not seed.seeded(ROUTES["/v1/audio/transcriptions"], {"seed": "7"})


@pytest.mark.unit
def test_an_ignored_seed_is_left_out_and_nothing_else() -> None:
    sampling = {"top_p": 0.5, "seed": 7}
    fields = {"model": "m", "seed": 7, "sampling_params": sampling}
    assert seed.without(fields, Seeds.IGNORE) == {"model": "m", "sampling_params": {"top_p": 0.5}}
    assert fields["seed"] == sampling["seed"] == 7


@pytest.mark.unit
def test_a_refused_seed_is_told_in_openai_s_shape() -> None:
    with pytest.raises(SeedError) as refused:
        seed.without({"seed": 7}, Seeds.REFUSE)
    error = refused.value.openai_body()["error"]
    assert (error["type"], error["param"], error["code"]) == (
        "invalid_request_error",
        "seed",
        "unsupported_parameter",
    )


def ask(client: "openai.OpenAI", **fields: Any) -> Any:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    return client.chat.completions.with_raw_response.create(**{**asked, **fields})


@pytest.mark.http
@pytest.mark.parametrize("door", [True, False])
def test_seeds_are_refused_with_the_reason(door: bool) -> None:
    import openai

    with front(door=door) as running:
        client = openai.OpenAI(base_url=f"{running.address}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="seed is not supported") as refused:
            ask(client, seed=7)
        assert (refused.value.param, refused.value.code) == ("seed", "unsupported_parameter")
        greedy = ask(client, seed=7, temperature=0)
        assert "x-ignored-parameters" not in greedy.headers
        assert running.idle


@pytest.mark.http
@pytest.mark.parametrize("door", [True, False])
def test_parameters_that_no_engine_heeds_are_named(door: bool) -> None:
    import openai

    with front(door=door, seed="ignore") as running:
        client = openai.OpenAI(base_url=f"{running.address}/v1", api_key="none", max_retries=0)
        penalised = ask(client, presence_penalty=0.5, seed=7, extra_body={"min_p": 0.1})
        assert penalised.headers["x-ignored-parameters"] == "min_p, presence_penalty, seed"
        asks_for_nothing = ask(client, presence_penalty=0, logit_bias={}, extra_body={"min_p": None})
        assert "x-ignored-parameters" not in asks_for_nothing.headers


@pytest.mark.http
@pytest.mark.parametrize("door", [True, False])
@pytest.mark.parametrize("isolated", [True, False])
def test_ignored_seeds_never_reach_an_engine_and_the_answer_says_so(door: bool, isolated: bool) -> None:
    """The simulated engine refuses them, as tpu-inference does."""
    import openai

    key, line = new("first")
    ring = KeyFile(None, line)
    with front(door=door, key_file=ring, seed="ignore", keys={"isolated_cache": isolated}) as running:
        client = openai.OpenAI(base_url=f"{running.address}/v1", api_key=key, max_retries=0)
        for fields in ({}, {"stream": True}, {"extra_body": {"cache_salt": "mine"}}):
            answer = ask(client, seed=7, **fields)
            assert answer.headers["x-ignored-parameters"] == "seed"
            assert b'"content":' in answer.http_response.read()
        assert "x-ignored-parameters" not in ask(client).headers
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, seed=7, n=65)
        assert json.loads(refused.value.response.text)["error"]["message"].startswith("n must be")
