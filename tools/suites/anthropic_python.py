"""Anthropic's own tests of its Python client, from its source distribution: those of the endpoints that exist here."""

from pathlib import Path

from tools.suites.pytest_run import run_pytest
from tools.suites.sources import installed_version, source_distribution
from tools.suites.suite import Outcome, Suite, Target


def fetch(folder: Path) -> None:
    """Download the source distribution of the version that is installed here."""
    source_distribution(folder, installed_version("anthropic"))


def run(folder: Path, target: Target) -> list[Outcome]:
    """Run the tests of messages and models; those of batches have a folder of their own."""
    files = [f"tests/api_resources/{file}.py" for file in ("test_messages", "test_models")]
    options = ["--noconftest", "--rootdir", str(folder), "-c", "/dev/null", "-o", "asyncio_mode=auto"]
    chosen = [*options, "-k", "not aiohttp", *files]
    return run_pytest(target, chosen, folder, path=[folder], plugins=["anthropic_plugin"])


SUITE = Suite("anthropic_python", "anthropic", fetch, run, names=("claude-opus-5", "claude-1.3", "model_id"))
