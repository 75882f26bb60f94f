"""The AI SDK of npm with its providers of OpenAI's APIs. Its own tests use mocks, so these tests are this project's."""

import shutil
from pathlib import Path

from tools.suites.node_run import run_node
from tools.suites.pytest_run import SHIMS
from tools.suites.sources import install_node
from tools.suites.suite import Outcome, Suite, Target

_TESTS = "ai_sdk.test.mjs"


def fetch(folder: Path) -> None:
    install_node(folder, "tsx", "ai@6", "@ai-sdk/openai@3", "@ai-sdk/openai-compatible@2")


def run(folder: Path, target: Target) -> list[Outcome]:
    """Run the tests with node's runner; they import packages, so a copy of them lies beside these."""
    shutil.copy(SHIMS / _TESTS, folder)
    return run_node(target, [_TESTS], folder)


SUITE = Suite("ai_sdk", "AI SDK", fetch, run)
