"""vLLM's HTTP tests (`tests/entrypoints`), from its source distribution: those that need nothing but a server."""

import tempfile
from pathlib import Path

from tercet.scheduler.model_files import resolve_model
from tools.suites.pytest_run import run_pytest
from tools.suites.sources import install, source_distribution
from tools.suites.suite import Outcome, Suite, Target

_FILES = (
    "openai/chat_completion/test_chat.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_completion_with_function_calling.py",
    "openai/chat_completion/test_include_reasoning.py",
    "openai/completion/test_completion.py",
    "openai/models/test_models.py",
    "openai/test_chunked_prompt.py",
    "openai/test_return_token_ids.py",
    "openai/test_return_tokens_as_ids.py",
    "openai/responses/test_simple.py",
    "anthropic/test_messages.py",
    "serve/tokenize/test_tokenization.py",
)
_BUILD = ("setuptools-scm", "vcs-versioning", "setuptools-rust", "semantic-version", "wheel", "cmake", "ninja")
"""Packages that read the metadata of the source distribution; nothing is built."""
_NAMES = (
    "HuggingFaceH4/zephyr-7b-beta",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen2-1.5B-Instruct",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "claude-3-7-sonnet-latest",
    "zephyr-lora",
)
_VERSION = "0.33.0"


def fetch(folder: Path) -> None:
    """Download the source distribution, whose version and device are given, because it is not built."""
    with tempfile.TemporaryDirectory() as build:
        install(Path(build), *_BUILD)
        env = {"PYTHONPATH": build, "VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": _VERSION}
        source_distribution(folder, f"vllm=={_VERSION}", flags=["--no-build-isolation"], env=env)


def run(folder: Path, target: Target) -> list[Outcome]:
    """Run the tests with a stand-in for vLLM and for the servers that the tests start."""
    files = [f"tests/entrypoints/{file}" for file in _FILES]
    options = ["--noconftest", "-o", "asyncio_mode=auto", "--rootdir", str(folder), "-c", "/dev/null"]
    env = {"TERCET_TOKENIZER": str(resolve_model("embedded"))}
    return run_pytest(target, [*options, *files], folder, path=[folder], env=env, plugins=["vllm_plugin"])


SUITE = Suite("vllm", "vLLM's HTTP tests", fetch, run, names=_NAMES)
