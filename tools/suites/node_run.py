"""Run of a suite whose tests are node's, in a process of its own."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.suites.pytest_run import SHIMS
from tools.suites.suite import Outcome, Target

_LONGEST = 1200.0
"""Seconds that a suite may take."""


def run_node(
    target: Target, files: Sequence[str], folder: Path, shims: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> list[Outcome]:
    """Run tests of node:test or of jest in `folder`, which is below one with their packages."""
    variables = {**target.environment(), **(env or {})}
    imports = [flag for shim in ("tsx", *shims) for flag in ("--import", shim)]
    reporter = f"--test-reporter={SHIMS / 'node_reporter.mjs'}"
    command = ["node", *imports, "--test", "--test-concurrency=1", reporter, *files]
    done = subprocess.run(
        command, cwd=folder, env=variables, stdout=subprocess.PIPE, text=True, timeout=_LONGEST, check=False
    )
    return [Outcome(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]
