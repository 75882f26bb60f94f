"""OpenAI's own tests of its Node client, from its repository: those of the endpoints that exist here."""

import shutil
from pathlib import Path

from tools.suites.node_run import run_node
from tools.suites.pytest_run import SHIMS
from tools.suites.sources import clone, install_node
from tools.suites.suite import Outcome, Suite, Target

_REPOSITORY = "repository"
_SHIM = "openai_node.mjs"
_FILES = (
    "chat/completions/completions.test.ts",
    "chat/completions/messages.test.ts",
    "completions.test.ts",
    "conversations/conversations.test.ts",
    "conversations/items.test.ts",
    "models.test.ts",
    "responses/responses.test.ts",
    "responses/input-items.test.ts",
    "responses/input-tokens.test.ts",
)


def fetch(folder: Path) -> None:
    """Clone the repository, and install the client's package and what the tests import beside it."""
    clone(folder / _REPOSITORY, "openai/openai-node")
    install_node(folder, "tsx", "expect@30", "openai")


def run(folder: Path, target: Target) -> list[Outcome]:
    """Run the tests with node's runner; the shim imports packages, so a copy of it lies beside them."""
    shutil.copy(SHIMS / _SHIM, folder)
    files = [f"tests/api-resources/{file}" for file in _FILES]
    env = {"TEST_API_BASE_URL": f"{target.url}/v1"}
    return run_node(target, files, folder / _REPOSITORY, [str(folder / _SHIM)], env)


SUITE = Suite(
    "openai_node", "openai-node", fetch, run, names=("gpt-5.4", "gpt-4o-mini", "gpt-3.5-turbo-instruct", "string")
)
