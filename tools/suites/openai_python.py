"""OpenAI's own tests of its Python client, from its source distribution: those of the endpoints that exist here."""

from pathlib import Path

from tools.suites.pytest_run import run_pytest
from tools.suites.sources import installed_version, source_distribution
from tools.suites.suite import Outcome, Suite, Target

_FILES = (
    "chat/test_completions.py",
    "chat/completions/test_messages.py",
    "test_completions.py",
    "test_conversations.py",
    "conversations/test_items.py",
    "test_models.py",
    "test_responses.py",
    "responses/test_input_items.py",
    "responses/test_input_tokens.py",
)


def fetch(folder: Path) -> None:
    """Download the source distribution of the version that is installed here."""
    source_distribution(folder, installed_version("openai"))


def run(folder: Path, target: Target) -> list[Outcome]:
    """Run the tests. Ids that they make up are replaced by those of objects that exist."""
    files = [f"tests/api_resources/{file}" for file in _FILES]
    options = ["--rootdir", str(folder), "-c", "/dev/null", "-o", "asyncio_mode=auto", "-k", "not aiohttp"]
    env = {"TEST_API_BASE_URL": f"{target.url}/v1"}
    return run_pytest(target, [*options, *files], folder, path=[folder], env=env, plugins=["openai_plugin"])


SUITE = Suite("openai_python", "openai-python", fetch, run, names=("gpt-6-astra", "gpt-3.5-turbo-instruct", "string"))
