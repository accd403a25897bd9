from typing import Any

import pytest

from serving.engine import stopped_answers, token_logprobs

pytestmark = pytest.mark.engine


def test_vllm_s_server_takes_an_answer_that_its_engine_was_stopped_in_for_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.entrypoints.openai.engine.protocol import GenerationError
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses

    monkeypatch.setattr(GenerateBaseServing, "_raise_if_error", GenerateBaseServing._raise_if_error)
    stopped_answers.install()
    for server in (OpenAIServingChat, OpenAIServingCompletion, OpenAIServingResponses):
        serving: Any = server.__new__(server)
        for reason in (None, "stop", "length"):
            serving._raise_if_error(reason, "r")
        for reason in ("abort", "error"):
            with pytest.raises(GenerationError):
                serving._raise_if_error(reason, "r")


def test_vllm_s_engine_is_asked_for_a_logprob_and_its_server_leaves_it_out() -> None:
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.logprobs import Logprob
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    engine: Any = AsyncLLM.__new__(AsyncLLM)
    asked: list[Any] = []
    engine.generate = lambda prompt, params, request_id: asked.append((prompt, params, request_id))
    token_logprobs.install(engine)
    params = SamplingParams(logprobs=0)
    engine.generate("p", params, "r")
    assert (asked[0][1].logprobs, params.logprobs) == (1, 0)
    serving: Any = OpenAIServingChat.__new__(OpenAIServingChat)
    serving.return_tokens_as_token_ids = False
    step = {5: Logprob(-2.0, 2, "a"), 6: Logprob(-1.0, 1, "b")}
    (token,) = serving._create_chat_logprobs([5], [step], None, num_output_top_logprobs=0).content
    assert (token.token, token.logprob, token.top_logprobs) == ("a", -2.0, [])
