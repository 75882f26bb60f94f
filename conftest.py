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
from zlib import crc32

import hypothesis
import pytest

GRIDS = (
    *("packages/kernels/tests/triton/", "packages/kernels/tests/attention/", "packages/scheduler/tests/executor/"),
    *("packages/scheduler/tests/generation/", "packages/scheduler/tests/models/"),
    *("packages/scheduler/tests/core/waiting/", "packages/scheduler/tests/core/test_page_shares.py"),
    *("tests/contract/test_poor_machine.py", "tests/contract/test_start_up.py"),
)
"""Folders and files with grids of cases that compute much, or start a process each."""
SHARE_SERVERS = ("tests/chaos/", "tests/containers/", "tests/e2e/", "tests/real/")

hypothesis.settings.register_profile("untimed", deadline=None)  # a machine beside other work
hypothesis.settings.load_profile("untimed")
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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of a test in `GRIDS` as slow, except a few in which every value of every parameter appears.

    Cases are the product of parameters and parametrized fixtures; a list of rows, written by hand, stays whole.
    """
    tests: dict[str, list[tuple[pytest.Item, set[tuple[str, str]]]]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.nodeid.startswith(GRIDS) and not item.get_closest_marker("slow"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append((item, _values(item)))
    for cases in tests.values():
        missing = set[tuple[str, str]]().union(*(values for _, values in cases))
        while missing:
            case = max(cases, key=lambda case: (len(missing & case[1]), crc32(case[0].nodeid.encode())))
            cases.remove(case)
            missing -= case[1]
        for item, _ in cases if cases and cases[0][1] else ():
            item.add_marker(pytest.mark.slow)


def _values(item: pytest.Function) -> set[tuple[str, str]]:
    """Return the values of a case by parameter. Parameters that one mark gives together count as one."""
    params: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    values = {name: repr(value) for name, value in params.items()}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        if len(names) > 1:
            values[" ".join(names)] = " ".join(values.pop(name.strip()) for name in names)
    return {*values.items()}


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


@pytest.fixture(scope="session", autouse=True)
def _frozen_modules() -> Iterator[None]:
    """Keep modules and tests frozen where a scheduler changes weights: a collection of all of them takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: None)
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
