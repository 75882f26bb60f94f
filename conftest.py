"""For every test: without a GPU, Triton's kernels run in its interpreter, which it must know before it is imported.

Where several workers share a run, each takes a file at a time, or a whole folder whose files share servers.
"""

import gc
import os
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

SHARE_SERVERS = ("tests/chaos/", "tests/e2e/")

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads wait for one another, and other workers have their cores
if not Path("/proc/driver/nvidia/version").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Shorten the names of the workers' directories, since paths of sockets have a limit."""
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        config.option.basetemp = str(Path(config.option.basetemp).with_name(worker.removeprefix("gw")))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep modules and tests out of garbage collections, which would look through all of them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedule files in the order of collection: the longest first, so that no worker is left with one alone."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            folder = next((folder for folder in SHARE_SERVERS if nodeid.startswith(folder)), "")
            return folder or super()._split_scope(nodeid)

    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def _trusted_certificates() -> Iterator[None]:
    """Read the trusted certificates once: each client would for 50 ms, and none of them speaks TLS."""
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("httpx2") is not None:
            transports = import_module("httpx2._transports.default")
            patch.setattr(transports, "create_ssl_context", cache(transports.create_ssl_context))
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a table of the figures that tests measured; those of workers come with their reports."""
    reports = [report for some in terminalreporter.stats.values() for report in some]
    rows = [
        (report.nodeid.rpartition("::")[2], value)
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "call"
        for name, value in report.user_properties
        if name == "figures"
    ]
    if rows:
        terminalreporter.section("figures")
        width = max(len(name) for name, _ in rows)
        for name, figures in rows:
            terminalreporter.write_line(f"{name:<{width}}  {figures}")
