"""pytest plugin that writes the outcome of each test as a line of JSON to the file in `TERCET_OUTCOMES`."""

import json
import os

import pytest

_LONGEST = 2000


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write a test's outcome: that of its call, or of a setup or teardown that did not pass."""
    if report.when == "call" or report.outcome != "passed":
        write(report.nodeid, report.outcome, report.longreprtext)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write the failure of a module that cannot be imported."""
    if report.outcome == "failed":
        write(f"{report.nodeid}::import", "failed", report.longreprtext)


def write(test: str, status: str, message: str) -> None:
    with open(os.environ["TERCET_OUTCOMES"], "a") as file:
        file.write(json.dumps({"test": test, "status": status, "message": message[-_LONGEST:]}) + "\n")
