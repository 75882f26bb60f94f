"""Tests of the suites' runner: outcomes, expectations, and modules of peers that are not installed."""

from pathlib import Path

import pytest

from tools.suites.__main__ import NAMES, suite_of
from tools.suites.pytest_run import run_pytest
from tools.suites.suite import EXPECTED, Expectation, Outcome, Target, expectations, judge, report

TARGET = Target("http://127.0.0.1:1", "embedded", "key")
TESTS = """
import os
import pytest
from absent_modules import stand_in

stand_in("absent_peer")
from absent_peer.deep.inside import Thing


def test_right():
    assert os.environ["TERCET_URL"] == "http://127.0.0.1:1"


@pytest.mark.parametrize("number", [1, 2])
def test_wrong(number):
    assert number == 3


def test_needs_the_peer():
    Thing.of(1)


def test_teardown_fails(request):
    request.addfinalizer(lambda: 1 / 0)
"""


def test_outcomes_are_those_of_pytest_and_absent_modules_skip(tmp_path: Path) -> None:
    (tmp_path / "test_peer.py").write_text(TESTS)
    (tmp_path / "test_broken.py").write_text("import absent_module")
    outcomes = {
        each.test.partition("::")[2]: each for each in run_pytest(TARGET, [], tmp_path, env={"PYTEST_ADDOPTS": ""})
    }
    statuses = {name: each.status for name, each in outcomes.items()}
    assert statuses == {
        "import": "failed",
        "test_right": "passed",
        "test_wrong[1]": "failed",
        "test_wrong[2]": "failed",
        "test_needs_the_peer": "skipped",
        "test_teardown_fails": "failed",
    }
    assert "assert 1 == 3" in outcomes["test_wrong[1]"].message


def test_an_expectation_explains_failures_of_its_name_and_message() -> None:
    one = Expectation(("a::b[[]1]",), ("404", "405"), "ours", "one")
    all_others = Expectation(("a::*",), ("refused",), "theirs", "others")
    unused = Expectation(("c::*",), ("404",), "model", "unused")
    failed = [
        Outcome("a::b[1]", "failed", "error 405"),
        Outcome("a::b[1]", "failed", "refused"),
        Outcome("a::b[2]", "failed", "error 405"),
        Outcome("x::y", "failed", "refused"),
    ]
    verdict = judge([*failed, Outcome("p", "passed"), Outcome("s", "skipped")], [one, all_others, unused])
    assert verdict.expected == {one: [failed[0]], all_others: [failed[1]]}
    assert (verdict.unexpected, verdict.unused) == (failed[2:], [unused])
    assert [verdict.count(owner) for owner in ("ours", "theirs", "model")] == [1, 1, 0]
    assert "| 1 | 1 | 1 | 0 | 2 | 1 |" in report(suite_of("sglang"), verdict)


@pytest.mark.parametrize("name", NAMES)
def test_every_suite_has_its_name_and_valid_expectations(name: str) -> None:
    assert suite_of(name).name == name
    expected = expectations(name)
    assert len({each.reason for each in expected}) == len(expected)


def test_every_file_of_expectations_belongs_to_a_suite() -> None:
    assert {path.stem for path in EXPECTED.glob("*.toml")} <= set(NAMES)
