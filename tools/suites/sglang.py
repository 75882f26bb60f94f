"""SGLang's test kits: mixins of tests that need nothing but a server, from the package `sglang`."""

from pathlib import Path

from tools.suites.pytest_run import SHIMS, run_pytest
from tools.suites.sources import install
from tools.suites.suite import Outcome, Suite, Target


def fetch(folder: Path) -> None:
    install(folder, "sglang")


def run(folder: Path, target: Target) -> list[Outcome]:
    """Run the kits, with stand-ins for all other modules of SGLang."""
    tests = str(SHIMS / "sglang_kits.py")
    return run_pytest(target, ["--rootdir", str(folder), tests], folder, env={"TERCET_KITS": str(folder)})


SUITE = Suite("sglang", "SGLang's kits", fetch, run, names=("default",))
