"""Run of a suite whose tests are pytest's, in a process of its own."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.suites.suite import Outcome, Target

_LONGEST = 3600.0
"""Seconds that a suite may take."""
SHIMS = Path(__file__).parent / "shims"
"""Modules that stand between suites and the server, and run within the suites' processes."""


def run_pytest(
    target: Target,
    arguments: Sequence[str],
    folder: Path,
    *,
    path: Sequence[Path] = (),
    env: Mapping[str, str] | None = None,
    plugins: Sequence[str] = (),
) -> list[Outcome]:
    """Run pytest in `folder` and return the outcomes. `path` comes first on the import path of the tests."""
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as outcomes:
        variables = {
            **target.environment(),
            "TERCET_OUTCOMES": outcomes.name,
            "PYTHONPATH": os.pathsep.join([*map(str, path), str(SHIMS), os.environ.get("PYTHONPATH", "")]),
            **(env or {}),
        }
        chosen = [flag for plugin in ("outcomes_plugin", *plugins) for flag in ("-p", plugin)]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--tb=short",
            "--timeout=180",
            "--continue-on-collection-errors",
            "-p",
            "no:cacheprovider",
            *chosen,
            *arguments,
        ]
        ended = subprocess.run(command, cwd=folder, env=variables, timeout=_LONGEST, check=False).returncode
        found: dict[str, Outcome] = {}
        for line in outcomes:
            outcome = Outcome(**json.loads(line))
            if outcome.test not in found or outcome.status == "failed":
                found[outcome.test] = outcome
    if ended not in {0, 1}:
        found["pytest"] = Outcome("pytest", "failed", f"pytest ended with {ended}, so tests may be missing")
    return list(found.values())
