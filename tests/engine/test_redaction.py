import logging
from types import SimpleNamespace
from typing import Any

import pytest

from serving.engine.redaction import REDACTED, redacted, secrets_of
from serving.engine.vllm import VllmServer
from serving.errors import EngineStartError

TOKEN = "hf_AbCdEfGh"


@pytest.mark.unit
def test_texts_of_options_with_secret_names_are_found_wherever_they_stand() -> None:
    options = {
        "hf_token": TOKEN,
        "max_num_batched_tokens": 2048,
        "tokenizer": "meta-llama",
        "kv_transfer_config": {"kv_connector_extra_config": {"access_key": "s3-key", "endpoint": "bucket"}},
        "api_key": ["first-key", "second-key"],
        "ssl_keyfile": "/etc/key",
    }
    environment = {
        "AWS_SECRET_ACCESS_KEY": "aws-secret",
        "HF_TOKEN": TOKEN,
        "TOKENIZERS_PARALLELISM": "false",
    }
    found = secrets_of(options, environment)
    assert found == {TOKEN, "s3-key", "first-key", "second-key", "aws-secret"}


@pytest.mark.unit
def test_a_secret_goes_also_where_another_is_a_part_of_it() -> None:
    assert redacted("key=abcd-long and abcd", {"abcd", "abcd-long"}) == f"key={REDACTED} and {REDACTED}"


@pytest.mark.engine
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_model_len": "many"}, "max-model-len"),
        ({"no_such_option": TOKEN}, "no-such-option"),
    ],
)
def test_what_vllms_parser_says_has_no_token_in_it(
    options: dict[str, Any], says: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(EngineStartError) as refusal, caplog.at_level(logging.DEBUG):
        server({"hf_token": TOKEN, **options})._arguments()
    assert says in refusal.value.message
    assert len(refusal.value.message) < 400
    assert TOKEN not in refusal.value.message + "".join(capfd.readouterr()) + caplog.text


@pytest.mark.unit
def test_a_start_that_fails_repeats_no_token_not_even_in_its_traceback() -> None:
    made = server({"hf_token": TOKEN})._start_failed(ValueError(f"input_value={{'hf_token': '{TOKEN}'}}"))
    assert REDACTED in made.message
    assert TOKEN not in made.message
    assert made.__cause__ is None
    assert made.__suppress_context__
    harmless = ValueError("no such checkpoint")
    assert server({})._start_failed(harmless).__cause__ is harmless


@pytest.mark.unit
async def test_whatever_fails_in_a_start_is_an_error_of_it_without_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's app is built once the engine is up; a chat template that it can't read ends the start there."""

    async def fails(_: VllmServer) -> None:
        raise ValueError(f"no template {TOKEN}")

    made = server({"hf_token": TOKEN, "enable_prefix_caching": False})
    monkeypatch.setattr(VllmServer, "_start", fails)
    with pytest.raises(EngineStartError) as failed:
        await made.start()
    assert TOKEN not in failed.value.message


def server(options: dict[str, Any]) -> VllmServer:
    """As far as its options go."""
    made = VllmServer.__new__(VllmServer)
    made._plan = SimpleNamespace(  # type: ignore[assignment]
        engine=options,
        options=options | {"model": "m"},
        model=SimpleNamespace(name="llama"),
        adapters=(),
        layout=SimpleNamespace(data=1, attention_groups=1),
    )
    made._cache = None
    made._held = SimpleNamespace(hosts=[None], name="slice-0")  # type: ignore[assignment]
    made._overrides = SimpleNamespace(options={})  # type: ignore[assignment]
    return made
