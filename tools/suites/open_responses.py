"""Open Responses' compliance tests, from its repository."""

import json
import subprocess
from pathlib import Path
from typing import Any

from tools.suites.sources import clone, install_node
from tools.suites.suite import Outcome, Suite, Target

_REPOSITORY = "repository"


def fetch(folder: Path) -> None:
    """Clone the repository, and install what its tests import beside it."""
    clone(folder / _REPOSITORY, "openresponses/openresponses")
    install_node(folder, "tsx", "zod@3")


def run(folder: Path, target: Target) -> list[Outcome]:
    """Run the tests, which print one JSON document. Node 20 has `WebSocket` only with an option."""
    options = ("--base-url", f"{target.url}/v1", "--api-key", target.key, "--model", target.model, "--json")
    command = ["node", "--experimental-websocket", "--import", "tsx", "bin/compliance-test.ts", *options]
    done = subprocess.run(command, cwd=folder / _REPOSITORY, capture_output=True, text=True, timeout=600, check=False)
    return [_outcome(each) for each in json.loads(done.stdout)["results"]]


def _outcome(result: dict[str, Any]) -> Outcome:
    return Outcome(result["id"], result["status"], "\n".join(map(str, result.get("errors") or ())))


SUITE = Suite("open_responses", "Open Responses", fetch, run)
