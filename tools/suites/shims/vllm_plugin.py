"""pytest plugin for vLLM's HTTP tests: the server in `TERCET_URL` stands in for each server that they start.

Other modules of vLLM are stand-ins, so that test modules can be imported.
"""

import os
import sys
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import anthropic
import openai

from absent_modules import stand_in  # type: ignore[import-not-found]

pytest_plugins = ["tests.entrypoints.conftest", "tests.entrypoints.openai.responses.conftest"]


class RemoteOpenAIServer:
    """Server that runs already; the model and the arguments of `vllm serve` are ignored."""

    DUMMY_API_KEY = os.environ["TERCET_KEY"]

    def __init__(self, *_: object, **__: object) -> None:
        self.url_root = os.environ["TERCET_URL"]

    def __enter__(self) -> "RemoteOpenAIServer":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._options("v1", options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._options("v1", options))

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(**self._options("", options))

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(**self._options("", options))

    def _options(self, path: str, options: dict[str, Any]) -> dict[str, Any]:
        address = {"base_url": self.url_for(path), "api_key": self.DUMMY_API_KEY}
        return {**address, "max_retries": 0, "timeout": 60, **options}


class _Hub:
    """Model hub; weights are not needed."""

    def snapshot_download(self, *_: object, **__: object) -> str:
        return ""


class _ModelConfig:
    """Configuration of the served model."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def get_vocab_size(self) -> int:
        return len(tokenizer())


@cache
def tokenizer(*_: object, **__: object) -> Any:
    """Return the tokenizer of the embedded model in place of every other."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(os.environ["TERCET_TOKENIZER"])


def add_module(name: str, **content: object) -> None:
    """Add a module of vLLM that has something in it."""
    module = import_module(name) if name.startswith("vllm") else ModuleType(name)
    vars(module).update(content)
    sys.modules[name] = module


stand_in("vllm")
add_module("tests.utils", RemoteOpenAIServer=RemoteOpenAIServer, ROCM_EXTRA_ARGS=[], ROCM_ENV_OVERRIDES={})
add_module("vllm.transformers_utils.repo_utils", hf_api=_Hub)
add_module("vllm.tokenizers", get_tokenizer=tokenizer)
add_module("vllm.config", ModelConfig=_ModelConfig)
