"""The table of a suite of JSON schemas counts refusals by keyword and instances that are judged wrongly."""

import json
from pathlib import Path

import pytest

from tools.suites import json_schema

LISTED = [
    {"description": "taken", "schema": {"type": "integer", "minimum": 2}, "tests": [{"data": 3, "valid": True}]},
    {"description": "refused", "schema": {"not": {"type": "integer"}}, "tests": []},
    {"schema": {"const": 1}, "tests": [{"data": 2, "valid": True}, {"data": 1, "valid": False}]},
]


def test_the_table_counts_every_outcome(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text(json.dumps(LISTED))
    (tmp_path / "b.json").write_text(json.dumps({"schema": {"type": "rhyme"}, "tests": []}))
    (tmp_path / "c.json").write_text(json.dumps({"schema": {"type": "integer", "multipleOf": 99999999}, "tests": []}))
    json_schema.main([str(tmp_path)])
    rows = {line.split(" | ")[0]: line.split(" | ")[1] for line in capsys.readouterr().out.splitlines()[2:]}
    counts = {name.removeprefix("| "): int(count.removesuffix(" |")) for name, count in rows.items()}
    assert (counts["schemas"], counts["taken"], counts["refused: not"]) == (5, 2, 1)
    assert counts["refused: compiler: more than two seconds"] == 1
    assert (counts["instances judged"], counts["valid, rejected"], counts["invalid, accepted"]) == (3, 1, 1)
