"""langchain's standard tests of chat models. Those that judge what a model says are left out: the simulated engine has none."""

import os

from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestService(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, object]:
        return {
            "model": os.environ["SERVICE_MODEL"],
            "base_url": f"{os.environ['SERVICE_URL']}/v1",
            "api_key": "none",
            "max_tokens": 64,
            "max_retries": 0,
            "stream_usage": True,
        }

    @property
    def has_tool_choice(self) -> bool:
        return True

    @property
    def supports_image_inputs(self) -> bool:
        return False
