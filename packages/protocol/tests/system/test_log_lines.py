import json
import logging
import subprocess
import sys
import time
from datetime import UTC, datetime
from typing import Any

import pytest

from tercet.protocol.system.log_lines import JsonFormatter, LogSettings, settings_of_rank

OF_FRONTEND = LogSettings(0, "json", "frontend-0")
PROGRAM = """
import logging
from tercet.protocol.system.log_lines import LogSettings, start_logging
start_logging(LogSettings(logging.INFO, "json", "scheduler-0"))
logging.getLogger("tercet.loop").debug("not shown")
raise RuntimeError("no room")
"""


def line_of(message: str, *args: object, settings: LogSettings = OF_FRONTEND) -> dict[str, Any]:
    record = logging.LogRecord("tercet.x", logging.WARNING, "x.py", 1, message, args, None)
    text = JsonFormatter(settings).format(record)
    assert "\n" not in text
    line: dict[str, Any] = json.loads(text)
    return line


def test_fields_of_the_format_are_members() -> None:
    line = line_of("%s: lost, moved 5%% cause=%s rid=%r age=%.1fs n=%d", "scheduler-0", "died", "r", 1.25, 3)
    assert line | {"time": ""} == {
        "time": "",
        "level": "WARNING",
        "part": "frontend-0",
        "logger": "tercet.x",
        "message": "scheduler-0: lost, moved 5% cause=died rid='r' age=1.2s n=3",
        "cause": "died",
        "rid": "r",
        "age": 1.25,
        "n": 3,
    }
    written = datetime.fromisoformat(line["time"])
    assert written.tzinfo == UTC
    assert abs(written.timestamp() - time.time()) < 60


@pytest.mark.parametrize("value", ["level=DEBUG", 'a"b\nc', "\ud800", "%s", float("nan")])
def test_values_cannot_break_or_forge_a_line(value: object) -> None:
    line = line_of("%s level=%s", value, value)
    assert line["level"] == "WARNING"
    assert set(line) == {"time", "level", "part", "logger", "message"}


def test_a_rank_is_a_member() -> None:
    assert line_of("x", settings=LogSettings(0, "json", "s", rank=2))["rank"] == 2


def test_ranks_log_as_their_scheduler_does(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(LogSettings(logging.DEBUG, "json", "scheduler-0")))
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [handler])
    monkeypatch.setattr(root, "level", logging.ERROR)
    assert settings_of_rank(1) == LogSettings(logging.ERROR, "json", "scheduler-0", 1)
    handler.setFormatter(logging.Formatter())
    assert settings_of_rank(1) == LogSettings(logging.ERROR, "text", "", 1)


def test_an_uncaught_exception_is_one_line() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=60)
    (line,) = map(json.loads, done.stderr.splitlines())
    assert done.returncode == 1
    assert line["message"] == "uncaught exception: type=RuntimeError error=no room"
    assert line["exception"].endswith("RuntimeError: no room")
