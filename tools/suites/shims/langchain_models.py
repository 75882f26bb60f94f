"""Chat models for LangChain's standard tests, which `tools.suites.langchain` runs. The server is in `TERCET_URL`."""

import os
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests  # type: ignore[import-not-found]


class TestChatCompletions(ChatModelIntegrationTests):  # type: ignore[misc]
    """The standard tests with /v1/chat/completions."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": os.environ["TERCET_MODEL"],
            "base_url": f"{os.environ['TERCET_URL']}/v1",
            "api_key": os.environ["TERCET_KEY"],
            "temperature": 0,
            "max_completion_tokens": 400,
            "stream_usage": True,
            "max_retries": 0,
        }

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return False


class TestResponses(TestChatCompletions):
    """The standard tests with /v1/responses."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "use_responses_api": True}
